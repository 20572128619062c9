"""Spans: below what they hang, which times they have, and what of a trace goes on."""

from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from pagoda_common.metrics.tracing import Span, sampled_traceparent, trace_id_of

TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def whole(exporter: InMemorySpanExporter) -> Span:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    return Span(tracer, tracer.start_span("whole", start_time=1000))


def finished(exporter: InMemorySpanExporter) -> dict[str, Any]:
    return {span.name: span for span in exporter.get_finished_spans()}


@pytest.mark.parametrize(
    ("start_ns", "end_ns", "expected"), [(1100, 1500, 1500), (1100, 1100, 1100), (1100, 900, 1100)]
)
def test_a_span_that_is_over_ends_at_its_start_at_the_earliest(
    whole: Span, exporter: InMemorySpanExporter, start_ns: int, end_ns: int, expected: int
) -> None:
    whole.add("part", start_ns, end_ns, {"tokens": 3})
    part = finished(exporter)["part"]
    assert (part.start_time, part.end_time) == (start_ns, expected), "clocks of two processes may differ"
    assert dict(part.attributes) == {"tokens": 3}
    assert f"{part.parent.span_id:016x}" == whole.traceparent.split("-")[2]


def test_what_is_said_of_a_span_is_in_it(whole: Span, exporter: InMemorySpanExporter) -> None:
    whole.rename("renamed")
    whole.set({"a": 1})
    whole.set({"b": 2.5})
    whole.event("preempted", 1200, {"step": 4})
    whole.fail("it broke")
    assert finished(exporter) == {}
    whole.end(2000)
    span = finished(exporter)["renamed"]
    assert (span.start_time, span.end_time, dict(span.attributes)) == (1000, 2000, {"a": 1, "b": 2.5})
    ((event,),) = (span.events,)
    assert (event.name, event.timestamp, dict(event.attributes)) == ("preempted", 1200, {"step": 4})
    assert (span.status.is_ok, span.status.description) == (False, "it broke")


def test_what_is_not_sampled_has_no_traceparent() -> None:
    tracer = TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False).get_tracer("test")
    span = Span(tracer, tracer.start_span("whole"))
    assert (span.is_sampled, span.traceparent) == (False, "")


@pytest.mark.parametrize(("flags", "is_sampled"), [("00", False), ("01", True), ("02", False), ("03", True)])
def test_the_lowest_bit_of_the_flags_says_whether_it_is_sampled(flags: str, is_sampled: bool) -> None:
    traceparent = f"00-{TRACE}-b7ad6b7169203331-{flags}"
    assert sampled_traceparent([("other", "x"), ("traceparent", traceparent)]) == (traceparent if is_sampled else "")
    assert trace_id_of(traceparent) == TRACE
