"""VllmEngineSink: every field of chunks and of whole answers, for several sequences of one request."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("smg_grpc_proto")

from pagoda_common.errors import RequestFailed
from pagoda_scheduler.core.request import Request
from pagoda_scheduler.core.step import LogprobRows, PromptLogprobRows
from pagoda_scheduler.core.step_result import StepResult
from pagoda_scheduler.vllm_engine.sink import VllmEngineSink
from tests.unit.scheduler.stories import make_request


def sink_of(**more: Any) -> VllmEngineSink:
    fields: dict[str, Any] = {"num_sequences": 2, "streams": True, "num_logprobs": None, "takes_prompt": False}
    return VllmEngineSink(**{**fields, "on_room": lambda sink: None, **more})


def messages(sink: VllmEngineSink) -> list[Any]:
    """What was put since the last look."""
    found = list(sink.outbox._messages)
    sink.outbox._messages.clear()
    return found


def rows_of(rows: dict[int, list[tuple[int, float]]]) -> LogprobRows:
    entries = [entry for row in rows.values() for entry in row]
    return LogprobRows(
        rows=np.array(list(rows), np.uint32),
        counts=np.array([len(row) for row in rows.values()], np.uint32),
        token_ids=np.array([token for token, _ in entries], np.uint32),
        logprobs=np.array([value for _, value in entries], np.float32),
        sampled_ranks=np.ones(len(rows), np.uint32),
    )


def two_sequences() -> list[Request]:
    requests = [make_request("a", 6, index=index) for index in range(2)]
    for request in requests:
        request.first_cached_tokens = 4
    return requests


def sample(result: StepResult, request: Request, token_id: int, row: int) -> None:
    request.output_token_ids.append(token_id)
    result.add_token(request, token_id, row)


def test_chunks_say_whose_they_are_and_how_far_each_sequence_is() -> None:
    sink, (first, second) = sink_of(), two_sequences()
    result = StepResult(step=1)
    for row, (request, token) in enumerate(((second, 21), (second, 22), (first, 11))):
        sample(result, request, token, row)
    sink.push(result)
    chunks = [message.chunk for message in messages(sink)]
    assert [(chunk.index, list(chunk.token_ids), chunk.completion_tokens) for chunk in chunks] == [
        (1, [21], 1),
        (1, [22], 2),
        (0, [11], 1),
    ]
    assert [(chunk.prompt_tokens, chunk.cached_tokens) for chunk in chunks] == [(6, 4)] * 3
    assert not any(chunk.HasField("output_logprobs") or chunk.HasField("input_logprobs") for chunk in chunks)


@pytest.mark.parametrize("reason", ["stop", "length", "abort", "error"])
def test_a_whole_answer_ends_each_sequence_and_the_stream_with_the_last(reason: Any) -> None:
    sink, (first, second) = sink_of(streams=False), two_sequences()
    result = StepResult(step=1)
    sample(result, second, 21, 0)
    sample(result, first, 11, 1)
    second.finish_reason = reason
    result.finished.append(second)
    sink.push(result)
    (message,) = messages(sink)
    complete = message.complete
    assert (complete.index, list(complete.output_ids), complete.finish_reason) == (1, [21], reason)
    assert (complete.prompt_tokens, complete.completion_tokens, complete.cached_tokens) == (6, 1, 4)
    assert not complete.HasField("output_logprobs")
    assert complete.WhichOneof("matched_stop") is None
    assert not sink.outbox._is_closed
    first.finish_reason, first.stop_token_id = "stop", 11
    sink.push(StepResult(step=2, finished=[first]))
    (message,) = messages(sink)
    assert (message.complete.index, message.complete.matched_token_id) == (0, 11)
    assert sink.outbox._is_closed
    assert sink.outbox._error is None


def test_the_first_failure_ends_the_stream() -> None:
    sink, (first, second) = sink_of(num_sequences=3), two_sequences()
    for request, text in ((first, "first"), (second, "second")):
        request.finish_reason, request.error = "error", RequestFailed(text)
    sink.push(StepResult(step=1, finished=[first, second]))
    assert (sink.outbox._is_closed, sink.outbox._error) == (True, first.error)


def test_log_probabilities_are_each_sequences_own_and_gathered_for_its_whole_answer() -> None:
    sink, (first, second) = sink_of(num_logprobs=1), two_sequences()
    for step in (1, 2):
        result = StepResult(step=step)
        sample(result, first, 10 * step, 0)
        sample(result, second, 10 * step + 1, 3)
        result.logprobs = rows_of({0: [(10 * step, -2.0), (5, -1.0)], 3: [(10 * step + 1, -float(step))]})
        sink.push(result)
    chunks = [message.chunk for message in messages(sink)]
    assert [list(chunk.output_logprobs.token_ids) for chunk in chunks] == [[10], [11], [20], [21]]
    assert [list(chunk.output_logprobs.token_logprobs) for chunk in chunks] == [[-2], [-1], [-2], [-2]]
    first.finish_reason = second.finish_reason = "length"
    sink.push(StepResult(step=3, finished=[second, first]))
    of_second, of_first = (message.complete.output_logprobs for message in messages(sink))
    assert (list(of_second.token_ids), list(of_second.token_logprobs)) == ([11, 21], [-1, -2])
    assert (list(of_first.token_ids), list(of_first.token_logprobs)) == ([10, 20], [-2, -2])
    assert [list(top.token_ids) for top in of_first.top_logprobs] == [[5], [5]]


def test_the_prompts_log_probabilities_begin_with_a_token_that_has_none_and_come_once() -> None:
    sink, (first, second) = sink_of(takes_prompt=True), two_sequences()
    chunks = (
        rows_of({0: [(1001, -1.0), (7, -0.5)], 1: [(1002, -2.0), (8, -3.0)]}),
        rows_of({0: [(1003, -4.0)]}),
    )
    for start, chunk in zip((0, 2), chunks, strict=True):
        sink.push(StepResult(step=1, prompt_logprobs=[(first, PromptLogprobRows(0, start, chunk))]))
    result = StepResult(step=2)
    sample(result, first, 11, 0)
    sample(result, second, 12, 1)
    first.finish_reason = second.finish_reason = "length"
    result.finished += [first, second]
    sink.push(result)
    one, two, *wholes = messages(sink)
    assert not two.chunk.HasField("input_logprobs")
    for whole in (one.chunk, *(message.complete for message in wholes)):
        logprobs = whole.input_logprobs
        assert list(logprobs.token_ids) == [1000, 1001, 1002, 1003]
        assert [entry.HasField("value") for entry in logprobs.token_logprobs] == [False, True, True, True]
        assert [entry.value for entry in logprobs.token_logprobs[1:]] == [-1, -2, -4]
        assert [list(top.token_ids) for top in logprobs.top_logprobs] == [[], [7, 1001], [1002, 8], [1003]]
        assert [list(top.values) for top in logprobs.top_logprobs] == [[], [-0.5, -1], [-2, -3], [-4]]


def test_prompt_log_probabilities_that_nobody_wants_are_left_out() -> None:
    sink, (first, _) = sink_of(num_sequences=1), two_sequences()
    sink.push(StepResult(step=1, prompt_logprobs=[(first, PromptLogprobRows(0, 0, rows_of({0: [(1, -1.0)]})))]))
    first.finish_reason = "length"
    sink.push(StepResult(step=2, finished=[first]))
    (message,) = messages(sink)
    assert not message.complete.HasField("input_logprobs")


def test_a_caller_that_is_behind_is_told_of_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagoda_scheduler.rpc.outbox.MAX_UNTAKEN", 2)
    heard: list[VllmEngineSink] = []
    sink, (first, _) = sink_of(on_room=heard.append), two_sequences()
    sink.outbox.is_acknowledged = True
    result = StepResult(step=1)
    for row in range(3):
        sample(result, first, row, row)
    sink.push(result)
    assert (sink.is_behind, heard) == (True, [])
    sink.announce()
    sink.outbox.acknowledge(3)
    assert (sink.is_behind, heard) == (False, [sink])
    sink.close(RequestFailed("why"))
    assert sink.outbox._is_closed
