"""Spans: below what they hang, which times they have, and what of a trace goes on."""

import threading
from typing import Any, ClassVar

import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from pagoda_common.config.observability_config import ObservabilityConfig
from pagoda_common.metrics import tracing
from pagoda_common.metrics.tracing import Span, make_tracer, sampled_traceparent, trace_id_of

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


class Collector(InMemorySpanExporter):
    """An exporter that keeps what it is given, and where it would have sent it."""

    endpoints: ClassVar[list[str]] = []
    made: ClassVar[list["Collector"]] = []

    def __init__(self, *, endpoint: str) -> None:
        super().__init__()
        self.endpoints.append(endpoint)
        self.made.append(self)


@pytest.fixture
def collectors(monkeypatch: pytest.MonkeyPatch) -> list[Collector]:
    module = pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc.trace_exporter")
    monkeypatch.setattr(module, "OTLPSpanExporter", Collector)
    monkeypatch.setattr(Collector, "endpoints", [])
    monkeypatch.setattr(Collector, "made", [])
    return Collector.made


def test_a_tracer_sends_spans_to_its_endpoint_under_the_service_s_name(collectors: list[Collector]) -> None:
    tracer = make_tracer("pagoda-test", ObservabilityConfig(otlp_traces_endpoint="http://collector:4317"))
    assert tracer is not None
    parent = f"00-{TRACE}-b7ad6b7169203331-01"
    below = tracer.start("below", traceparent=parent, tracestate="a=b", kind="server", attributes={"n": 1}, start_ns=5)
    assert below.trace_id == TRACE
    alone = tracer.start("alone")
    assert alone.trace_id not in ("", TRACE)
    below.end(9)
    alone.end()
    tracer.close()
    assert Collector.endpoints == ["http://collector:4317"]
    spans = finished(collectors[0])
    assert spans["below"].parent.span_id == 0xB7AD6B7169203331
    assert spans["below"].parent.trace_state == {"a": "b"}
    assert (spans["below"].kind.name, spans["below"].start_time, spans["below"].end_time) == ("SERVER", 5, 9)
    assert dict(spans["below"].attributes) == {"n": 1}
    assert (spans["alone"].kind.name, spans["alone"].parent) == ("INTERNAL", None)
    assert spans["alone"].resource.attributes["service.name"] == "pagoda-test"


def test_without_an_endpoint_there_is_no_tracer() -> None:
    assert make_tracer("pagoda-test", ObservabilityConfig()) is None


def test_a_collector_that_is_away_keeps_no_one_from_ending(
    collectors: list[Collector], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tracing.CLOSE_S == 3.0
    monkeypatch.setattr(tracing, "CLOSE_S", 0.01)
    tracer = make_tracer("pagoda-test", ObservabilityConfig(otlp_traces_endpoint="http://collector:4317"))
    assert tracer is not None
    shutdown, hangs = tracer._provider.shutdown, threading.Event()
    monkeypatch.setattr(tracer._provider, "shutdown", lambda: hangs.wait(240))
    tracer.close()
    hangs.set()
    shutdown()
