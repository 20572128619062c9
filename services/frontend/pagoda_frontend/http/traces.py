"""A span for each call of the API over HTTP."""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagoda_common.metrics.tracing import TRACEPARENT_HEADER, TRACESTATE_HEADER, Tracer, current_span
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
