"""Errors as OpenAI's clients expect them: one JSON shape for whatever goes wrong, without paths or tracebacks."""

import logging
import math
import re
from collections.abc import Sequence
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from pagoda_common.errors import HttpError, PagodaError

logger = logging.getLogger(__name__)

MAX_REPORTED_ERRORS = 10
"""Of all the fields that are wrong in one body, this many are named."""
MAX_MESSAGE_CHARS = 2000
SERVER_ERROR = "The server had an error while processing your request."

_PATH = re.compile(r"(?:[\w.~-]*/){2,}[\w.~-]*")
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{4,}\b")


class BodyTooLarge(PagodaError):
    """The request body is larger than the server reads."""

    @property
    def http(self) -> HttpError:
        """413 has no gRPC code of its own."""
        return HttpError(413, "BadRequestError")


class ClientDisconnected(Exception):
    """The client is gone: there is nobody to answer."""


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


def error_json(error: Exception) -> bytes:
    """The whole body of an error response."""
    return orjson.dumps({"error": error_object(error)})


def error_response(error: Exception) -> Response:
    """The response to a request that failed."""
    status = error.http.status if isinstance(error, PagodaError) else 500
    headers = {}
    if status == 503:
        retry_after_s = error.retry_after_s if isinstance(error, PagodaError) else 0.0
        headers["Retry-After"] = str(max(1, math.ceil(retry_after_s)))
    return Response(error_json(error), status_code=status, media_type="application/json", headers=headers)


def validation_message(errors: Sequence[Any]) -> str:
    """Pydantic's errors in one line: ``max_tokens: Input should be a valid integer (got 'x'); …``."""
    lines = []
    for error in errors[:MAX_REPORTED_ERRORS]:
        place = ".".join(str(part) for part in error["loc"])
        given = repr(error["input"])
        given = given if len(given) <= 100 else given[:100] + "…"
        lines.append(f"{place}: {error['msg']}" + ("" if error["type"] == "missing" else f" (got {given})"))
    if len(errors) > MAX_REPORTED_ERRORS:
        lines.append(f"and {len(errors) - MAX_REPORTED_ERRORS} more")
    return "; ".join(lines)


def install_error_handlers(app: FastAPI) -> None:
    """Give every failure of `app` the one shape."""

    async def on_pagoda_error(_: Request, error: Exception) -> Response:
        return error_response(error)

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        kind = {404: "NotFoundError", 405: "MethodNotAllowedError"}.get(error.status_code, "BadRequestError")
        message = error.detail
        if error.status_code in (404, 405):
            message = f"{error.detail}: {request.method} {request.url.path}"
        body = {"error": {"message": message, "type": kind, "param": None, "code": error.status_code}}
        return Response(orjson.dumps(body), error.status_code, media_type="application/json", headers=error.headers)

    async def on_bug(_: Request, error: Exception) -> Response:
        return error_response(error)  # the server logs the traceback

    async def on_disconnect(_: Request, error: Exception) -> Response:
        return Response(status_code=499)

    app.add_exception_handler(PagodaError, on_pagoda_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(ClientDisconnected, on_disconnect)
    app.add_exception_handler(Exception, on_bug)
