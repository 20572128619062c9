"""Who may call, over HTTP and gRPC, and under which id: thin layers around the app and the service."""

import hmac
import re
import uuid
from collections.abc import Awaitable, Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import orjson
from fastapi import Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagoda_common.errors import Code, ConfigError, PagodaError
from pagoda_frontend.errors import ANTHROPIC_PREFIX, route_path

GUARDED_PREFIXES = ("/v1", "/v2", "/inference", "/invocations")
"""vLLM's, and the one path that leads to the API under another name; what probes and scrapers need stays open."""
API_KEY_HEADER = "x-api-key"
"""Where Anthropic's clients show the key."""
REQUEST_ID_HEADER = "x-request-id"
MAX_REQUEST_ID_CHARS = 128


class ApiKeys:
    """The keys that open the API."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        self._digests = [sha256(key.encode()).digest() for key in keys]

    def allow(self, headers: Mapping[str, str], *, with_api_key_header: bool = False) -> bool:
        """Whether `headers` show one of the keys as bearer token (or, where allowed, as x-api-key)."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        shown = [token.strip()] if scheme.lower() == "bearer" else []
        if with_api_key_header:
            shown.append(headers.get(API_KEY_HEADER, "").strip())
        given = [sha256(_raw(key)).digest() for key in shown]
        # Every digest is compared, in constant time: neither length nor order of the keys leaks.
        matches = [hmac.compare_digest(one, digest) for one in given for digest in self._digests]
        return any(matches)


def _raw(value: str) -> bytes:
    """The bytes that came over the wire (HTTP headers are decoded as latin-1)."""
    try:
        return value.encode("latin-1")
    except UnicodeEncodeError:
        return value.encode()


class RequireApiKey:
    """Refuses calls of the HTTP API without one of the keys: 401, with vLLM's body."""

    def __init__(self, app: ASGIApp, *, keys: tuple[str, ...]) -> None:
        self._app = app
        self._keys = ApiKeys(keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the call on, or refuse it."""
        if scope["type"] == "http" and scope["method"] != "OPTIONS" and not self._is_allowed(scope):
            refusal = Response(orjson.dumps(_refusal(route_path(scope))), 401, media_type="application/json")
            await refusal(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        path = route_path(scope)
        if not path.startswith(GUARDED_PREFIXES):
            return True
        return self._keys.allow(Headers(scope=scope), with_api_key_header=path.startswith(ANTHROPIC_PREFIX))


def _refusal(path: str) -> dict[str, Any]:
    if path.startswith(ANTHROPIC_PREFIX):
        return {"type": "error", "error": {"type": "authentication_error", "message": "Unauthorized"}}
    return {"error": "Unauthorized"}


class RequireApiKeyRpc(grpc.aio.ServerInterceptor):
    """Refuses calls of one gRPC service without one of the keys: UNAUTHENTICATED. Health and reflection stay open."""

    def __init__(self, *, service: str, keys: tuple[str, ...]) -> None:
        """`service`: full name, such as pagoda.v1.Inference."""
        self._prefix = f"/{service}/"
        self._keys = ApiKeys(keys)
        self._refusal: Any = grpc.unary_unary_rpc_method_handler(_refuse)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The handler of the call, or the one that refuses it."""
        if handler_call_details.method.startswith(self._prefix):
            headers = {key: value for key, value in handler_call_details.invocation_metadata if isinstance(value, str)}
            if not self._keys.allow(headers):
                return self._refusal
        return await continuation(handler_call_details)


async def _refuse(request: Any, context: Any) -> Any:
    message = "the call shows none of the API keys: metadata `authorization: Bearer KEY` is expected"
    raise PagodaError(message, code=Code.UNAUTHENTICATED)


class RootPath:
    """Tells the app under which prefix a proxy serves it, whether or not the proxy takes the prefix away."""

    def __init__(self, app: ASGIApp, *, root_path: str) -> None:
        self._app = app
        self._root_path = root_path.rstrip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the call on."""
        await self._app({**scope, "root_path": self._root_path}, receive, send)


class RequestIds:
    """Gives every response an X-Request-Id: the client's own, or else the one that the endpoint or we drew."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the call on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = clean_request_id(Headers(scope=scope).get(REQUEST_ID_HEADER, ""))

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if given or REQUEST_ID_HEADER not in headers:
                    headers[REQUEST_ID_HEADER] = given or uuid.uuid4().hex
            await send(message)

        await self._app(scope, receive, send_with_id)


def clean_request_id(given: str) -> str:
    """What a client calls its request, cut to 128 characters of those that every log and header can hold."""
    return re.sub(r"[^A-Za-z0-9_.:-]", "_", given[:MAX_REQUEST_ID_CHARS])


def read_api_keys(file: str) -> tuple[str, ...]:
    """The keys in `file`, one a line; empty lines and lines that begin with # are left out.

    Raises:
        ConfigError: the file cannot be read, or has no key: it would leave the API open.
    """
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"api_key_file {file!r} cannot be read: {error}", field="api_key_file") from error
    lines = (line.strip() for line in text.splitlines())
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"api_key_file {file!r} has no key", field="api_key_file")
    return keys
