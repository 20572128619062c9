"""Spans of a sequence that has ended: each with its times and attributes."""

from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from pagoda_common.errors import NotReady
from pagoda_common.metrics.tracing import Tracer
from pagoda_scheduler.core.request import Request
from pagoda_scheduler.core.step import StepTimings
from pagoda_scheduler.observability.trace_spans import SpanMaker
from pagoda_scheduler.observability.traces import PrefillChunk, RequestTrace
from tests.unit.scheduler.stories import make_request

SECOND = 10**9


@dataclass
class NotedSpan:
    """What is said of a span."""

    name: str
    start_ns: int
    end_ns: int = 0
    attributes: dict[str, Any] = field(default_factory=dict)
    children: list["NotedSpan"] = field(default_factory=list)
    events: list[tuple[str, int]] = field(default_factory=list)
    failure: str = ""
    traceparent: str = ""

    def add(self, name: str, start_ns: int, end_ns: int, attributes: dict[str, Any] | None = None) -> "NotedSpan":
        self.children.append(NotedSpan(name, start_ns, end_ns, attributes or {}))
        return self.children[-1]

    def event(self, name: str, at_ns: int) -> None:
        self.events.append((name, at_ns))

    def fail(self, message: str) -> None:
        self.failure = message

    def end(self, end_ns: int) -> None:
        self.end_ns = end_ns


class NotingTracer:
    """Keeps the span that was begun last."""

    def start(self, name: str, *, traceparent: str, start_ns: int, attributes: dict[str, Any]) -> NotedSpan:
        self.span = NotedSpan(name, start_ns, attributes=attributes, traceparent=traceparent)
        return self.span


def spans_of(trace: RequestTrace, *, has_details: bool = True) -> NotedSpan:
    tracer = NotingTracer()
    SpanMaker(tracer=cast("Tracer", tracer), has_details=has_details)(trace)
    return tracer.span


def traced(**fields: Any) -> tuple[Request, RequestTrace]:
    request = make_request("a", 9, index=2, attempt=3)
    request.arrival_ns, request.admitted_ns = 1 * SECOND, 4 * SECOND
    request.output_token_ids += [5, 6, 7]
    request.first_cached_tokens, request.num_preemptions, request.finish_reason = 4, 1, "stop"
    trace = RequestTrace(request, "the-parent", submitted_ns=2 * SECOND, end_ns=12 * SECOND, **fields)
    return request, trace


TIMINGS = StepTimings(
    queue_ns=SECOND,
    prepare_ns=SECOND // 8,
    forward_ns=SECOND // 4,
    sample_ns=SECOND // 2,
    decode_ns=SECOND // 4,
    wire_ns=SECOND // 2,
)


def test_the_whole_and_its_parts() -> None:
    chunks = [
        PrefillChunk(step=40, start_ns=5 * SECOND, num_tokens=3, is_last=False, end_ns=7 * SECOND, timings=TIMINGS),
        PrefillChunk(step=42, start_ns=7 * SECOND, num_tokens=2, is_last=True),
    ]
    _, trace = traced(chunks=chunks, first_token_ns=8 * SECOND, events=[("preempted", 6 * SECOND)])
    span = spans_of(trace)
    assert (span.name, span.traceparent, span.start_ns, span.end_ns) == (
        "engine_request",
        "the-parent",
        1 * SECOND,
        12 * SECOND,
    )
    assert span.attributes == {
        "gen_ai.request.id": "a",
        "gen_ai.usage.prompt_tokens": 9,
        "gen_ai.usage.completion_tokens": 3,
        "pagoda.sequence.index": 2,
        "pagoda.request.attempt": 3,
        "pagoda.usage.cached_tokens": 4,
        "pagoda.num_preemptions": 1,
        "pagoda.finish_reason": "stop",
    }
    assert (span.events, span.failure) == ([("preempted", 6 * SECOND)], "")
    worker = NotedSpan(
        "worker",
        start_ns=5 * SECOND,
        end_ns=65 * SECOND // 10,  # a quarter for the way back, a quarter to read the answer
        attributes={
            "pagoda.worker.queue": 1.0,
            "pagoda.worker.prepare": 0.125,
            "gen_ai.latency.time_in_model_forward": 0.25,
            "gen_ai.latency.time_in_model_execute": 1.875,
            "pagoda.worker.sample": 0.5,
        },
    )
    first, second = (
        {"pagoda.chunk": number, "pagoda.step": step, "pagoda.num_tokens": count, "pagoda.is_answered": is_answered}
        for number, step, count, is_answered in ((0, 40, 3, True), (1, 42, 2, False))
    )
    decode = {
        "gen_ai.usage.completion_tokens": 3,
        "gen_ai.latency.time_in_model_decode": 4.0,
        "pagoda.time_per_output_token": 2.0,
    }
    assert span.children == [
        NotedSpan("submit", 1 * SECOND, 2 * SECOND),
        NotedSpan("queue", 2 * SECOND, 4 * SECOND, {"gen_ai.latency.time_in_queue": 2.0}),
        NotedSpan("prefill", 5 * SECOND, 7 * SECOND, first, [worker]),
        NotedSpan("prefill", 7 * SECOND, 12 * SECOND, second),
        NotedSpan("decode", 8 * SECOND, 12 * SECOND, decode),
    ]
    assert not any(child.children for child in spans_of(trace, has_details=False).children)


def test_a_worker_s_share_lies_within_its_chunk() -> None:
    slow = StepTimings(queue_ns=9 * SECOND, forward_ns=9 * SECOND, decode_ns=9 * SECOND)
    chunk = PrefillChunk(step=1, start_ns=5 * SECOND, num_tokens=1, is_last=True, end_ns=7 * SECOND, timings=slow)
    [worker] = spans_of(traced(chunks=[chunk])[1]).children[2].children
    assert (worker.start_ns, worker.end_ns) == (5 * SECOND, 5 * SECOND)


def test_what_never_ran_waited_to_its_end() -> None:
    request, trace = traced()
    request.admitted_ns, request.finish_reason = 0, None
    request.error = NotReady("no worker")
    span = spans_of(trace)
    assert [child.name for child in span.children] == ["submit", "queue"]
    assert span.children[1].end_ns == 12 * SECOND
    assert span.children[1].attributes == {"gen_ai.latency.time_in_queue": 10.0}
    assert (span.attributes["pagoda.finish_reason"], span.failure) == ("dropped", "no worker")


@pytest.mark.parametrize(("arrival_s", "start_s"), [(0, 2), (1, 1), (3, 2)])
def test_a_clock_that_is_ahead_moves_no_beginning(arrival_s: int, start_s: int) -> None:
    request, trace = traced()
    request.arrival_ns = arrival_s * SECOND
    assert spans_of(trace).start_ns == start_s * SECOND


def test_one_token_has_no_time_per_token() -> None:
    request, trace = traced(first_token_ns=13 * SECOND)
    request.output_token_ids = [5]
    decode = spans_of(trace).children[-1]
    assert decode.attributes == {
        "gen_ai.usage.completion_tokens": 1,
        "gen_ai.latency.time_in_model_decode": 0.0,
    }
