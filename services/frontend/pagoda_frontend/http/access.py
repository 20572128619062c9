"""Access to the app over HTTP: keys and request ids, in thin layers."""

import re
import uuid
from typing import Any

import orjson
from fastapi import Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagoda_common.errors import Code, PagodaError
from pagoda_common.metrics.tracing import TRACEPARENT_HEADER, trace_id_of
from pagoda_common.process.logging import request_id as log_request_id
from pagoda_common.process.logging import trace_id as log_trace_id
from pagoda_common.rpc.bearer import BearerKeys
from pagoda_frontend.http.calls import note_tenant
from pagoda_frontend.http.errors import ANTHROPIC_PREFIX, error_response, route_path
from pagoda_frontend.requests.call_context import MAX_REQUEST_ID_CHARS

OPERATOR_PREFIXES = (
    "/sleep",
    "/wake_up",
    "/reload_weights",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
)
"""Paths that affect all clients."""
GUARDED_PREFIXES = (
    "/v1",
    "/v2",
    "/inference",
    "/pooling",
    "/classify",
    "/score",
    "/rerank",
    "/invocations",
    "/is_sleeping",
    "/status/requests",
    *OPERATOR_PREFIXES,
)
"""Paths that need a key: vLLM's, the second name of the API's path, and operators' paths. Paths of probes and scrapers
are open."""
NO_OPERATOR = PagodaError(
    "this call affects all clients: it needs one of --operator-key, not an API key", code=Code.PERMISSION_DENIED
)
API_KEY_HEADER = "x-api-key"
"""Header in which Anthropic's clients send the key."""
REQUEST_ID_HEADER = "x-request-id"
PROBES = frozenset(("/live", "/health", "/ping", "/ready", "/metrics", "/load", "/version"))
"""Paths that monitors poll."""


class RequireKeys:
    """Refuses calls of the HTTP API without one of the keys: 401, with vLLM's body.

    Calls that affect all clients need an operator's key; a client's key is a 403 there.
    """

    def __init__(self, app: ASGIApp, *, keys: BearerKeys, operator_keys: BearerKeys) -> None:
        """`keys`: without keys, all paths except the operators' are open."""
        self._app = app
        self._keys = keys
        self._operator_keys = operator_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Note the tenant and pass the call on, or refuse it."""
        if scope["type"] == "http" and scope["method"] != "OPTIONS" and (refusal := self._refusal(scope)) is not None:
            await refusal(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        """The answer to a forbidden call; None lets it pass."""
        path, headers = route_path(scope), Headers(scope=scope).items()
        if not path.startswith(GUARDED_PREFIXES):
            return None
        is_operator = self._operator_keys.accepted(headers) is not None
        if path.startswith("/is_sleeping") and is_operator:
            return None
        key_header = API_KEY_HEADER if path.startswith(ANTHROPIC_PREFIX) else None
        accepted = self._keys.accepted(headers, key_header=key_header)
        if path.startswith(OPERATOR_PREFIXES):
            if is_operator:
                return None
            return _unauthorized(path) if accepted is None else error_response(NO_OPERATOR, scope)
        if self._keys and accepted is None:
            return _unauthorized(path)
        if accepted is not None:
            note_tenant(scope, accepted)
        return None


def _unauthorized(path: str) -> Response:
    body: dict[str, Any] = {"error": "Unauthorized"}
    if path.startswith(ANTHROPIC_PREFIX):
        body = {"type": "error", "error": {"type": "authentication_error", "message": "Unauthorized"}}
    return Response(orjson.dumps(body), 401, media_type="application/json")


class RootPath:
    """Tells the app the path prefix of a proxy, whether or not the proxy strips the prefix."""

    def __init__(self, app: ASGIApp, *, root_path: str) -> None:
        self._app = app
        self._root_path = root_path.rstrip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the call on."""
        await self._app({**scope, "root_path": self._root_path}, receive, send)


class RequestIds:
    """Adds an X-Request-Id to every response: the client's own, else one drawn by the endpoint or by this layer.

    As in vLLM, answers to probes get no drawn id unless the configuration asks for it.
    """

    def __init__(self, app: ASGIApp, *, with_probes: bool) -> None:
        self._app = app
        self._with_probes = with_probes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the call on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = clean_request_id(Headers(scope=scope).get(REQUEST_ID_HEADER, ""))
        log_request_id.set(given)
        log_trace_id.set(trace_id_of(Headers(scope=scope).get(TRACEPARENT_HEADER, "")))
        if not given and not self._with_probes and route_path(scope) in PROBES:
            await self._app(scope, receive, send)
            return

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if given or REQUEST_ID_HEADER not in headers:
                    headers[REQUEST_ID_HEADER] = given or uuid.uuid4().hex
                log_request_id.set(headers[REQUEST_ID_HEADER])
            await send(message)

        await self._app(scope, receive, send_with_id)


def clean_request_id(given: str) -> str:
    """The client's id of its request, cut to 128 characters that every log and header can contain."""
    return re.sub(r"[^A-Za-z0-9_.:-]", "_", given[:MAX_REQUEST_ID_CHARS])
