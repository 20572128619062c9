"""A span for each call of the API over gRPC."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio

from pagoda_common.metrics.tracing import TRACEPARENT_HEADER, TRACESTATE_HEADER, Tracer, current_span
from pagoda_common.process.logging import trace_id as log_trace_id


class TraceRpc(grpc.aio.ServerInterceptor):
    """A span for each call of one gRPC service."""

    def __init__(self, *, service: str, tracer: Tracer) -> None:
        """`service`: full name, such as pagoda.v1.Inference; its calls have one request each."""
        self._prefix = f"/{service}/"
        self._tracer = tracer

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The handler of the call, with a span around it."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(self._prefix):
            return handler
        pairs = handler_call_details.invocation_metadata
        metadata = {key: value for key, value in pairs if isinstance(value, str)}
        codecs = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        if handler.response_streaming:
            stream = self._wrap_stream(handler.unary_stream, method, metadata)
            return grpc.unary_stream_rpc_method_handler(stream, **codecs)
        return grpc.unary_unary_rpc_method_handler(self._wrap_call(handler.unary_unary, method, metadata), **codecs)

    def _wrap_call(self, behaviour: Callable[..., Any], method: str, metadata: dict[str, str]) -> Callable[..., Any]:
        async def call(request: Any, context: Any) -> Any:
            self._start(method, metadata, context)
            return await behaviour(request, context)

        return call

    def _wrap_stream(self, behaviour: Callable[..., Any], method: str, metadata: dict[str, str]) -> Callable[..., Any]:
        async def stream(request: Any, context: Any) -> AsyncGenerator[Any]:
            self._start(method, metadata, context)
            async with aclosing(behaviour(request, context)) as responses:
                async for response in responses:
                    yield response

        return stream

    def _start(self, method: str, metadata: dict[str, str], context: Any) -> None:
        """Begin a span that ends with the call."""
        service, _, name = method[1:].partition("/")
        span = self._tracer.start(
            method[1:],
            kind="server",
            traceparent=metadata.get(TRACEPARENT_HEADER, ""),
            tracestate=metadata.get(TRACESTATE_HEADER, ""),
            attributes={"rpc.system": "grpc", "rpc.service": service, "rpc.method": name},
        )
        log_trace_id.set(span.trace_id)
        current_span.set(span)
        context.add_done_callback(lambda _: span.end())
