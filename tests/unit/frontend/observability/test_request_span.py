"""The span of one engine request: which attributes it gets, of which times."""

from typing import Any, cast

import pytest

from pagoda_common.engine.stream import EngineRequest
from pagoda_common.metrics.tracing import Span, Tracer
from pagoda_common.params.outputs import SequenceDelta
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_frontend.observability import request_span
from pagoda_frontend.observability.request_span import RequestSpan, start_request_span


class Clock:
    """time.time_ns, as the test says."""

    def __init__(self) -> None:
        self.now_ns = 1_000_000_000

    def time_ns(self) -> int:
        return self.now_ns

    def wait(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)


class FakeSpan:
    """Remembers what it was given."""

    traceparent = "00-trace-span-01"

    def __init__(self, *, is_sampled: bool = True) -> None:
        self.is_sampled = is_sampled
        self.attributes: dict[str, Any] = {}
        self.added: list[tuple[str, int, int, dict[str, Any]]] = []
        self.error = ""
        self.end_ns = 0
        self.below: list[str] = []

    def start(self, name: str) -> "FakeSpan":
        self.below.append(name)
        return FakeSpan(is_sampled=self.is_sampled)

    def set(self, attributes: dict[str, Any]) -> None:
        self.attributes |= attributes

    def add(self, name: str, start_ns: int, end_ns: int, attributes: dict[str, Any]) -> None:
        self.added.append((name, start_ns, end_ns, attributes))

    def fail(self, message: str) -> None:
        self.error = message

    def end(self, end_ns: int) -> None:
        self.end_ns = end_ns


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(request_span, "time", clock)
    return clock


def make_request() -> EngineRequest:
    params = SamplingParams(n=2, temperature=0.5, top_p=0.9, max_tokens=7)
    return EngineRequest(request_id="r", prompt_token_ids=[1, 2, 3], sampling_params=params)


def delta(index: int, num_tokens: int, total: int, *, queue_s: float | None = 0.25) -> SequenceDelta:
    return SequenceDelta(
        index=index,
        text="",
        token_ids=[5] * num_tokens,
        offset=total - num_tokens,
        num_output_tokens=total,
        queue_s=queue_s,
    )


def test_times_are_of_the_queue_the_prompt_and_the_tokens(clock: Clock) -> None:
    span = FakeSpan()
    following = RequestSpan(span=cast("Span", span), request=make_request(), model_name="tiny")
    began_ns = clock.now_ns
    clock.wait(0.5)
    following.add([delta(0, 0, 0, queue_s=None)])
    clock.wait(0.5)
    following.add([delta(0, 1, 1)])
    clock.wait(2.0)
    following.add([delta(0, 2, 3), delta(1, 4, 4, queue_s=0.75)])
    clock.wait(1.0)
    following.close("finished")
    latency = {name.rpartition(".")[2]: value for name, value in span.attributes.items() if ".latency." in name}
    assert latency == pytest.approx(
        {
            "e2e": 4.0,
            "time_in_queue": 0.25,
            "time_to_first_token": 1.0,
            "time_in_model_prefill": 0.75,
            "time_in_model_decode": 3.0,
        }
    )
    assert span.added == [("deliver", began_ns + 1_000_000_000, clock.now_ns, {"pagoda.outcome": "finished"})]
    assert span.attributes["gen_ai.usage.completion_tokens"] == 7
    assert (span.end_ns, span.error) == (clock.now_ns, "")


def test_what_was_asked_for_is_in_it() -> None:
    span = FakeSpan()
    RequestSpan(span=cast("Span", span), request=make_request(), model_name="tiny")
    assert span.attributes == {
        "gen_ai.request.id": "r",
        "gen_ai.response.model": "tiny",
        "gen_ai.request.n": 2,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.max_tokens": 7,
        "gen_ai.usage.num_sequences": 2,
        "gen_ai.usage.prompt_tokens": 3,
    }


def test_a_request_that_fails_before_a_token_has_no_times_of_tokens(clock: Clock) -> None:
    span = FakeSpan()
    following = RequestSpan(span=cast("Span", span), request=make_request(), model_name="tiny")
    clock.wait(1.0)
    following.close("failed", "too much waits")
    assert span.error == "too much waits"
    assert span.added == []
    assert {name for name in span.attributes if ".latency." in name} == {"gen_ai.latency.e2e"}


@pytest.mark.parametrize("is_sampled", [False, True])
@pytest.mark.parametrize("has_call", [False, True])
def test_a_request_is_told_of_a_sampled_span_below_its_call(is_sampled: bool, has_call: bool) -> None:
    request, above = make_request(), FakeSpan(is_sampled=is_sampled)
    tracer = FakeSpan(is_sampled=is_sampled)  # as a tracer, it starts spans of their own trace
    span = start_request_span(
        request, tracer=cast("Tracer", tracer), above=cast("Span", above) if has_call else None, model_name="tiny"
    )
    assert (span is not None) is is_sampled
    assert request.traceparent == (FakeSpan.traceparent if is_sampled else "")
    assert tracer.below == ([] if has_call else ["llm_request"])
    assert above.below == (["llm_request"] if has_call and is_sampled else [])
