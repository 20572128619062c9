"""Timestamps of sampled requests: prefill chunks, first token, preemptions, ends."""

from pagoda_scheduler.core.scheduler import Scheduler
from pagoda_scheduler.core.step import ModelRunnerOutput, SchedulerOutput, StepTimings
from pagoda_scheduler.observability.timeline import Timeline
from pagoda_scheduler.observability.traces import RequestTrace, TracedTimeline, Traces
from tests.unit.scheduler.stories import make_request, make_scheduler

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Story:
    """A scheduler whose steps are followed."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.ended: list[RequestTrace] = []
        self.scheduler = scheduler
        self.traces = Traces(on_end=self.ended.append)
        self.timeline = TracedTimeline(inner=Timeline(), traces=self.traces)

    def step(self) -> SchedulerOutput:
        """One step from its schedule to its end; every row that samples gets token 7."""
        output = self.scheduler.schedule(1)
        assert output is not None
        self.timeline.scheduled(output, 0)
        samples = [request.num_pending > 0 for request in self.scheduler.running]
        counts = [int(is_sampled) for is_sampled in samples]
        answer = ModelRunnerOutput(output.step, counts, [7] * sum(counts), timings=StepTimings(forward_ns=5))
        self.timeline.answered(answer)
        result = self.scheduler.update(answer)
        self.timeline.delivered(answer, 0)
        self.traces.end(result.finished)
        return output


def test_chunks_of_a_prompt_are_noted_and_decodes_are_not() -> None:
    story = Story(make_scheduler(max_num_batched_tokens=16))
    request = make_request("a", 40, max_tokens=3)
    story.traces.begin([request], PARENT)
    story.scheduler.add(request)
    while not story.ended:
        story.step()
    (trace,) = story.ended
    assert [chunk.num_tokens for chunk in trace.chunks] == [16, 16, 8]
    assert [chunk.is_last for chunk in trace.chunks] == [False, False, True]
    assert all(chunk.timings is not None and chunk.end_ns >= chunk.start_ns for chunk in trace.chunks)
    assert trace.submitted_ns <= trace.first_token_ns == trace.chunks[-1].end_ns <= trace.end_ns
    assert not story.traces


def test_who_is_not_followed_is_not_noted() -> None:
    story = Story(make_scheduler())
    followed, other = make_request("a", 5, max_tokens=1), make_request("b", 6, max_tokens=4)
    story.traces.begin([followed], PARENT)
    for request in (followed, other):
        story.scheduler.add(request)
    story.step()
    assert [trace.request for trace in story.ended] == [followed]
    assert not story.traces
    story.step()
    assert len(story.ended) == 1


def test_what_comes_from_the_cache_is_not_counted_as_computed() -> None:
    story = Story(make_scheduler())
    first, second = make_request("a", 40, max_tokens=1), make_request("b", 40, max_tokens=1)
    second.prompt_token_ids = first.prompt_token_ids
    story.scheduler.add(first)
    story.step()
    story.traces.begin([second], PARENT)
    story.scheduler.add(second)
    story.step()
    (trace,) = story.ended
    assert second.first_cached_tokens > 0
    assert sum(chunk.num_tokens for chunk in trace.chunks) == 40 - second.first_cached_tokens


def test_a_lost_worker_is_an_event_and_the_prompt_is_computed_again() -> None:
    story = Story(make_scheduler())
    request = make_request("a", 10, max_tokens=8)
    story.traces.begin([request], PARENT)
    story.scheduler.add(request)
    story.step()
    story.step()
    (taken,) = story.scheduler.take_all()
    story.traces.lose([taken])
    story.scheduler = make_scheduler()
    story.timeline = TracedTimeline(inner=Timeline(), traces=story.traces)
    story.scheduler.add(taken, at_front=True)
    while not story.ended:
        story.step()
    (trace,) = story.ended
    assert [name for name, _ in trace.events] == ["worker lost"]
    assert [chunk.num_tokens for chunk in trace.chunks] == [10, 12]


def test_a_preemption_is_an_event() -> None:
    story = Story(make_scheduler(num_blocks=8, enable_prefix_caching=False))
    first, second = make_request("a", 12, max_tokens=12), make_request("b", 12, max_tokens=12)
    story.traces.begin([first, second], PARENT)
    for request in (first, second):
        story.scheduler.add(request)
    while len(story.ended) < 2:
        story.step()
    by_name = {trace.request.request_id: trace for trace in story.ended}
    assert [name for name, _ in by_name["b"].events] == ["preempted"] * second.num_preemptions != []
    assert len(by_name["b"].chunks) == 1 + second.num_preemptions


def test_a_request_that_was_refused_is_forgotten() -> None:
    story = Story(make_scheduler())
    request = make_request("a", 10)
    story.traces.begin([request], PARENT)
    story.traces.forget([request])
    story.traces.end([request])
    assert story.ended == []
