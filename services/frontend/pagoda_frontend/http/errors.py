"""Error responses as OpenAI's clients expect them: one JSON shape for all failures, without paths or tracebacks."""

import logging
import math
import re
from collections.abc import Mapping
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from pagoda_common.errors import HttpError, InvalidRequest, PagodaError

logger = logging.getLogger(__name__)

MAX_MESSAGE_CHARS = 2000
ANTHROPIC_PREFIX = "/v1/messages"
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Error types of Anthropic's API by status."""
SERVER_ERROR = "The server had an error while processing your request."

_PATH = re.compile(r"(?:[\w.~-]*/){2,}[\w.~-]*")
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{4,}\b")


class BodyTooLarge(PagodaError):
    """The request body is larger than the server reads."""

    @property
    def http(self) -> HttpError:
        """413 has no gRPC code of its own."""
        return HttpError(413, "BadRequestError")


class NotServed(InvalidRequest):
    """The path is not available for the served model."""

    detail = "Not Found"
    """FastAPI's message for an unknown path: vLLM has no such path then."""

    @property
    def http(self) -> HttpError:
        """Over gRPC the code is INVALID_ARGUMENT."""
        return HttpError(404, "NotFoundError")


class ClientDisconnected(Exception):
    """The client is gone: no response can be sent."""


def error_object(error: Exception) -> dict[str, Any]:
    """`error` as the value of "error" in OpenAI's shape."""
    if not isinstance(error, PagodaError):
        return {"message": SERVER_ERROR, "type": "InternalServerError", "param": None, "code": 500}
    http = error.http
    message = error.message
    if http.status >= 500:
        message = _ADDRESS.sub("…", _PATH.sub("…", message.partition("\n")[0])) or SERVER_ERROR
    if len(message) > MAX_MESSAGE_CHARS:
        message = message[:MAX_MESSAGE_CHARS] + "…"
    return {"message": message, "type": http.type, "param": error.field, "code": int(http.status)}


def anthropic_error(error: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's error object as the whole body of Anthropic's Messages API."""
    kind = ANTHROPIC_TYPES.get(error["code"], "api_error" if error["code"] >= 500 else "invalid_request_error")
    message = error["message"] if error["param"] is None else f"{error['param']}: {error['message']}"
    return {"type": "error", "error": {"type": kind, "message": message}}


def error_body(error: dict[str, Any], scope: Mapping[str, Any] | None = None, *, detail: str = "") -> bytes:
    """The whole body of an error response, in the shape of the API that `scope` (ASGI's) calls.

    Args:
        detail: FastAPI's message for an unknown path, which clients of vLLM know; empty for a known path.
    """
    if scope is not None and route_path(scope).startswith(ANTHROPIC_PREFIX):
        return orjson.dumps(anthropic_error(error))
    return orjson.dumps({"error": error} | ({"detail": detail} if detail else {}))


def route_path(scope: Mapping[str, Any]) -> str:
    """The path that selects the handler: without the root path where the proxy did not strip it."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    rest = path.removeprefix(root)
    return rest if root and path.startswith(root) and (not rest or rest.startswith("/")) else path


def error_json(error: Exception) -> bytes:
    """The whole body of an error response, in OpenAI's shape."""
    return error_body(error_object(error))


def error_response(error: Exception, scope: Mapping[str, Any] | None = None) -> Response:
    """The response to a request that failed; `scope` as in `error_body`."""
    status = error.http.status if isinstance(error, PagodaError) else 500
    headers = {}
    if status in (429, 503):
        retry_after_s = error.retry_after_s if isinstance(error, PagodaError) else 0.0
        headers["Retry-After"] = str(max(1, math.ceil(retry_after_s)))
    detail = error.detail if isinstance(error, NotServed) else ""
    body = error_body(error_object(error), scope, detail=detail)
    return Response(body, status_code=status, media_type="application/json", headers=headers)


def install_error_handlers(app: FastAPI) -> None:
    """Give every failure of `app` the same shape."""

    async def on_pagoda_error(request: Request, error: Exception) -> Response:
        return error_response(error, request.scope)

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        kind = {404: "NotFoundError", 405: "MethodNotAllowedError"}.get(error.status_code, "BadRequestError")
        message = error.detail
        is_route = error.status_code in (404, 405)
        if is_route:
            message = f"{error.detail}: {request.method} {request.url.path}"
        shown = {"message": message, "type": kind, "param": None, "code": error.status_code}
        body = error_body(shown, request.scope, detail=error.detail if is_route else "")
        return Response(body, error.status_code, media_type="application/json", headers=error.headers)

    async def on_bug(request: Request, error: Exception) -> Response:
        return error_response(error, request.scope)  # the server logs the traceback

    async def on_disconnect(_: Request, error: Exception) -> Response:
        return Response(status_code=499)

    app.add_exception_handler(PagodaError, on_pagoda_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(ClientDisconnected, on_disconnect)
    app.add_exception_handler(Exception, on_bug)
