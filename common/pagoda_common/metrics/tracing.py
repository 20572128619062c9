"""Spans of OpenTelemetry, as little of them as services need. Nothing is imported or made unless a tracer is asked for.

A trace goes from process to process as W3C's traceparent; what is not sampled has an empty one here, and costs nothing
further on.
"""

import re
import threading
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, Literal, TypeAlias

from pagoda_common.config.observability_config import ObservabilityConfig
from pagoda_common.errors import ConfigError

CLOSE_S = 3.0
"""Time for a collector to take the last spans."""
TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
TRACEPARENT_HEADER = "traceparent"
TRACESTATE_HEADER = "tracestate"

Value: TypeAlias = str | int | float | bool
Kind: TypeAlias = Literal["server", "internal"]


def trace_id_of(traceparent: str) -> str:
    """The trace's id, 32 hexadecimal digits; empty when `traceparent` is none."""
    match = TRACEPARENT.fullmatch(traceparent)
    return match[1] if match is not None and match[1].strip("0") else ""


def sampled_traceparent(metadata: Any) -> str:
    """The traceparent in a call's metadata, if it is sampled; else empty."""
    for key, value in metadata or ():
        if key == TRACEPARENT_HEADER and isinstance(value, str):
            match = TRACEPARENT.fullmatch(value)
            return value if match is not None and int(match[3], 16) & 1 else ""
    return ""


class Span:
    """A span that has begun. Times are Unix nanoseconds; None is now."""

    def __init__(self, tracer: Any, span: Any) -> None:
        self._tracer = tracer
        self._span = span
        context = span.get_span_context()
        self.trace_id = f"{context.trace_id:032x}"
        self.is_sampled = bool(context.trace_flags.sampled)
        self.traceparent = f"00-{self.trace_id}-{context.span_id:016x}-01" if self.is_sampled else ""
        """For the service that continues the trace; empty when it is not sampled."""

    def start(self, name: str, *, start_ns: int | None = None, attributes: Mapping[str, Value] | None = None) -> "Span":
        """Begin a span below this one."""
        from opentelemetry.trace import set_span_in_context

        context = set_span_in_context(self._span)
        begun = self._tracer.start_span(name, context, start_time=start_ns, attributes=attributes)
        return Span(self._tracer, begun)

    def add(self, name: str, start_ns: int, end_ns: int, attributes: Mapping[str, Value] | None = None) -> "Span":
        """A span below this one that is over."""
        child = self.start(name, start_ns=start_ns, attributes=attributes)
        child.end(max(start_ns, end_ns))
        return child

    def rename(self, name: str) -> None:
        """Change the name, which may become known late."""
        self._span.update_name(name)

    def set(self, attributes: Mapping[str, Value]) -> None:
        """Add attributes."""
        self._span.set_attributes(attributes)

    def event(self, name: str, at_ns: int, attributes: Mapping[str, Value] | None = None) -> None:
        """Something happened within."""
        self._span.add_event(name, attributes, at_ns)

    def fail(self, message: str) -> None:
        """It went wrong."""
        from opentelemetry.trace import Status, StatusCode

        self._span.set_status(Status(StatusCode.ERROR, message))

    def end(self, end_ns: int | None = None) -> None:
        """It is over."""
        self._span.end(end_ns)


class Tracer:
    """Makes spans and sends them to a collector, on a thread of its own."""

    def __init__(self, *, service: str, endpoint: str) -> None:
        """Raises ConfigError when OpenTelemetry is not installed."""
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            message = "otlp_traces_endpoint needs OpenTelemetry: pip install 'pagoda-llm[otel]'"
            raise ConfigError(message, field="otlp_traces_endpoint") from error
        # The sampler is the SDK's: as the parent has decided, else OTEL_TRACES_SAMPLER, else every request.
        resource = Resource.create({"service.name": service})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)  # close() has a bound on time
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("pagoda")
        self._propagator = TraceContextTextMapPropagator()

    def start(
        self,
        name: str,
        *,
        traceparent: str = "",
        tracestate: str = "",
        kind: Kind = "internal",
        attributes: Mapping[str, Value] | None = None,
        start_ns: int | None = None,
    ) -> Span:
        """Begin a span: below the one of another process if `traceparent` names one, else of a trace of its own."""
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind

        carrier = {TRACEPARENT_HEADER: traceparent, TRACESTATE_HEADER: tracestate}
        context = self._propagator.extract(carrier, Context()) if traceparent else Context()
        kinds = {"server": SpanKind.SERVER, "internal": SpanKind.INTERNAL}
        begun = self._tracer.start_span(name, context, kinds[kind], attributes, start_time=start_ns)
        return Span(self._tracer, begun)

    def close(self) -> None:
        """Send what is left, for CLOSE_S at most: a collector that is away keeps no one from ending."""
        thread = threading.Thread(target=self._provider.shutdown, name="traces-end", daemon=True)
        thread.start()
        thread.join(CLOSE_S)


current_span: ContextVar[Span | None] = ContextVar("current_span", default=None)
"""Span of the call that the current task answers."""


def make_tracer(service: str, config: ObservabilityConfig) -> Tracer | None:
    """The tracer that `config` asks for; None makes no spans.

    Raises:
        ConfigError: as of Tracer.
    """
    if config.otlp_traces_endpoint is None:
        return None
    return Tracer(service=service, endpoint=config.otlp_traces_endpoint)
