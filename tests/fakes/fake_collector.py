"""An OpenTelemetry collector on a free port that keeps every span it is sent."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True)
class CollectedSpan:
    """A span as it came over the wire."""

    name: str
    service: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    is_error: bool
    events: list[str]


class FakeCollector(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc]
    """Used as a context manager."""

    def __init__(self) -> None:
        self._spans: list[CollectedSpan] = []
        self._lock = threading.Lock()
        self._server = grpc.server(ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.url = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._server.stop(None).wait()

    def spans(self, trace_id: str = "") -> list[CollectedSpan]:
        """All spans, or those of one trace, in the order of their beginning."""
        with self._lock:
            found = [span for span in self._spans if trace_id in ("", span.trace_id)]
        return sorted(found, key=lambda span: (span.start_ns, -span.end_ns))

    def Export(self, request: Any, context: Any) -> Any:
        """Take spans."""
        with self._lock:
            for resource in request.resource_spans:
                service = {one.key: _value(one.value) for one in resource.resource.attributes}["service.name"]
                for scope in resource.scope_spans:
                    self._spans += [_collected(span, service) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


def _collected(span: Any, service: str) -> CollectedSpan:
    return CollectedSpan(
        name=span.name,
        service=service,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes={one.key: _value(one.value) for one in span.attributes},
        is_error=span.status.code == 2,
        events=[event.name for event in span.events],
    )


def _value(value: Any) -> Any:
    return getattr(value, value.WhichOneof("value"))
