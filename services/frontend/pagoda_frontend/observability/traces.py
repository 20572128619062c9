"""The frontend's spans: one for each call of the API over HTTP or gRPC, and below it one for each engine request."""

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagoda_common.engine.client import EngineRequest
from pagoda_common.metrics.tracing import TRACEPARENT_HEADER, TRACESTATE_HEADER, Span, Tracer, Value, current_span
from pagoda_common.params.outputs import SequenceDelta
from pagoda_common.process.logging import trace_id as log_trace_id
from pagoda_frontend.http.access import GUARDED_PREFIXES
from pagoda_frontend.http.errors import route_path


class TraceHttp:
    """A span for each POST to the API, from its head to the last byte of its answer."""

    def __init__(self, app: ASGIApp, *, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the call on."""
        if scope["type"] != "http" or scope["method"] != "POST" or not route_path(scope).startswith(GUARDED_PREFIXES):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        span = self._tracer.start(
            "POST",
            kind="server",
            traceparent=headers.get(TRACEPARENT_HEADER, ""),
            tracestate=headers.get(TRACESTATE_HEADER, ""),
            attributes={"http.request.method": "POST", "url.path": scope["path"]},
        )
        log_trace_id.set(span.trace_id)
        current_span.set(span)

        async def send_and_note(message: Message) -> None:
            if message["type"] == "http.response.start":
                span.set({"http.response.status_code": message["status"]})
                if message["status"] >= 500:
                    span.fail(f"status {message['status']}")
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            route = getattr(scope.get("route"), "path", None)
            if route is not None:
                span.rename(f"POST {route}")
                span.set({"http.route": route})
            span.end()


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


class RequestSpan:
    """The span of one engine request, with vLLM's name and attributes."""

    def __init__(self, *, span: Span, request: EngineRequest, model_name: str) -> None:
        self._span = span
        self._request = request
        self._start_ns = time.time_ns()
        self._first_ns = 0
        self._num_tokens: dict[int, int] = {}
        self._queue_s: float | None = None
        params = request.sampling_params
        attributes: dict[str, Value] = {
            "gen_ai.request.id": request.request_id,
            "gen_ai.response.model": model_name,
            "gen_ai.request.n": params.n,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.usage.num_sequences": params.n,
            "gen_ai.usage.prompt_tokens": len(request.prompt_token_ids),
        }
        if params.max_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = params.max_tokens
        span.set(attributes)

    def add(self, deltas: list[SequenceDelta]) -> None:
        """News that is given out."""
        for delta in deltas:
            if delta.token_ids and not self._first_ns:
                self._first_ns = time.time_ns()
            self._num_tokens[delta.index] = delta.num_output_tokens
            if self._queue_s is None:
                self._queue_s = delta.queue_s

    def close(self, outcome: str, error: str = "") -> None:
        """It is over: all of it was given out, or nobody wants it any more, or it failed."""
        end_ns = time.time_ns()
        attributes: dict[str, Value] = {
            "gen_ai.usage.completion_tokens": sum(self._num_tokens.values()),
            "gen_ai.latency.e2e": (end_ns - self._start_ns) / 1e9,
        }
        if self._queue_s is not None:
            attributes["gen_ai.latency.time_in_queue"] = self._queue_s
        if self._first_ns:
            first_s = (self._first_ns - self._start_ns) / 1e9
            attributes["gen_ai.latency.time_to_first_token"] = first_s
            attributes["gen_ai.latency.time_in_model_decode"] = (end_ns - self._first_ns) / 1e9
            if self._queue_s is not None:
                attributes["gen_ai.latency.time_in_model_prefill"] = max(0.0, first_s - self._queue_s)
            self._span.add("deliver", self._first_ns, end_ns, {"pagoda.outcome": outcome})
        self._span.set(attributes)
        if error:
            self._span.fail(error)
        self._span.end(end_ns)


def start_request_span(request: EngineRequest, *, tracer: Tracer, model_name: str) -> RequestSpan | None:
    """Begin the span of `request` and let the engine go on with its trace; None when it is not sampled."""
    above = current_span.get()
    span = tracer.start("llm_request") if above is None else above.start("llm_request") if above.is_sampled else None
    if span is None or not span.is_sampled:
        return None
    request.traceparent = span.traceparent
    return RequestSpan(span=span, request=request, model_name=model_name)
