"""Reads and checks request bodies, and writes JSON answers. Every fault of a body is a 4xx."""

import codecs
import json
import time
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import orjson
from fastapi import Request, Response
from pydantic import ValidationError

from pagoda_common.config.frontend_config import FrontendConfig
from pagoda_common.errors import Code, InvalidRequest, PagodaError
from pagoda_common.text import exact_json
from pagoda_frontend.budget.caller import caller, current_hold, network_of
from pagoda_frontend.budget.fields import check_fields
from pagoda_frontend.budget.held_memory import VALUE_BYTES, Hold
from pagoda_frontend.budget.json_scan import JsonScan
from pagoda_frontend.http.errors import BodyTooLarge, ClientDisconnected
from pagoda_frontend.openai.mapped import json_pieces
from pagoda_frontend.openai.protocol import RequestBody
from pagoda_frontend.requests.errors import validation_message
from pagoda_frontend.serving.serving import Serving

Body = TypeVar("Body", bound=RequestBody)

DISCARD_FACTOR = 8
"""A body that is too large is read to its end up to this many times the limit, so that its sender sees the answer."""
DISCARD_S = 10.0
MAX_NESTING = 200
"""Maximum nesting of lists and objects in a body: well below what JSON writers and recursion can take with an answer
around it."""
TENANT = "pagoda.tenant"
"""Key in the scope: id of the accepted API key."""
RAW_BODY = "pagoda.body"
"""Key in the scope: the body, where it was already read to find its model. Reading it removes it."""


async def read_body(request: Request, body_type: type[Body], *, serving: Serving) -> Body:
    """The body of `request` as `body_type`.

    Raises:
        InvalidRequest: not JSON, or a field is wrong; `field` names it.
        BodyTooLarge: more than `serving` reads.
        QueueFull: bodies that are being read hold too much memory.
        PagodaError: the body names an adapter that cannot be used.
    """
    raw = await read_bytes(request, serving=serving)
    body = await serving.work.run_sized(lambda: parse_body(raw, body_type), num_bytes=len(raw))
    await serving.look_for(getattr(body, "model", None))
    return body


async def read_bytes(request: Request, *, serving: Serving) -> bytes:
    """The JSON text that `request` carries.

    Raises:
        InvalidRequest: its Content-Type is not JSON, or it has too many values.
        BodyTooLarge: more than `serving` reads.
        QueueFull: bodies that are being read hold too much memory.
    """
    if (given_body := request.scope.pop(RAW_BODY, None)) is not None:  # which is freed when it is parsed
        return bytes(given_body)
    name = owner_of(request.scope)
    caller.set(name)
    hold = current_hold.get() or serving.held_memory.begin()
    hold.owner = name
    raw = await _read(request, serving.config, hold)
    if not has_json(request):
        media_type = _media_type(request)
        given = f"got {media_type!r}" if media_type else "it is missing"
        raise InvalidRequest(f"Content-Type must be application/json, {given}")
    return raw


def has_json(request: Request) -> bool:
    """Whether `request` says that its body is JSON."""
    return _media_type(request) == "application/json"


def _media_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def owner_of(scope: Mapping[str, Any]) -> str:
    """The owner of a call's share: its API key, or else its network."""
    client = scope.get("client")
    return scope.get(TENANT) or ("" if client is None else network_of(str(client[0])))


async def _read(request: Request, config: FrontendConfig, hold: Hold) -> bytes:
    """The whole body. After a refusal, reading continues for a while, so that the sender sees the answer."""
    max_bytes = config.max_request_body_bytes
    announced = request.headers.get("content-length", "")
    scan = JsonScan(max_values=config.max_request_values)
    fault: PagodaError | None = None
    chunks: list[bytes] = []
    size, num_held, deadline = 0, 0, time.monotonic() + DISCARD_S
    is_too_large = announced.isdecimal() and int(announced) > max_bytes
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        chunk = message.get("body", b"")
        size += len(chunk)
        is_too_large = is_too_large or size > max_bytes
        if chunk and fault is None and not is_too_large:
            chunks.append(chunk)
            try:
                scan.feed(chunk)
                hold.add(size + scan.num_values * VALUE_BYTES - num_held)
            except PagodaError as error:
                fault = error
            num_held = size + scan.num_values * VALUE_BYTES
        if fault is not None or is_too_large:
            chunks.clear()
            hold.release()
            if size > DISCARD_FACTOR * max_bytes or time.monotonic() > deadline:
                break
        if not message.get("more_body", False):
            break
    if is_too_large:
        size = max(size, int(announced or 0))
        raise BodyTooLarge(f"request body has {size} bytes, at most {max_bytes} are read", code=Code.INVALID_ARGUMENT)
    if fault is not None:
        raise fault
    return b"".join(chunks)


def parse_body(raw: bytes, body_type: type[Body]) -> Body:
    """JSON text as `body_type`.

    Raises:
        InvalidRequest: not JSON, or a field is wrong; `field` names it.
    """
    fault: Exception | None = None
    raw = raw.removeprefix(codecs.BOM_UTF8)  # which clients on Windows write
    try:
        value = exact_json.loads(raw)
    except orjson.JSONDecodeError as error:
        fault = error
        value = _parse_leniently(raw)
    if value is None and fault is not None:
        raise InvalidRequest(f"request body is not valid JSON: {fault}")
    if not isinstance(value, dict):
        raise InvalidRequest(f"request body must be a JSON object, got {type(value).__name__}")
    if field := _field_nested_too_deeply(raw, value):
        raise InvalidRequest(f"{field} is nested more than {MAX_NESTING} levels deep", field=field)
    check_fields(value)
    try:
        body = body_type.model_validate(value)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False)
        raise InvalidRequest(validation_message(errors), field=str(errors[0]["loc"][0])) from None
    if fault is not None:
        raise InvalidRequest(f"request body is not valid JSON: {fault}")
    return body


def _field_nested_too_deeply(raw: bytes, body: dict[str, Any]) -> str | None:
    """The first field nested more than MAX_NESTING levels deep."""
    if raw.count(b"[") + raw.count(b"{") <= MAX_NESTING:
        return None  # the usual body: it cannot be so deep
    for field, value in body.items():
        level = [value]
        for _ in range(MAX_NESTING):
            level = [inner for outer in level if isinstance(outer, dict | list) for inner in _values(outer)]
        if any(isinstance(inner, dict | list) for inner in level):
            return field
    return None


def _values(outer: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return outer.values() if isinstance(outer, dict) else outer


def _parse_leniently(raw: bytes) -> Any:
    """Parse `raw` with Python's parser, which accepts NaN and Infinity, so that the error can name the field that holds
    them."""
    if b"NaN" not in raw and b"Infinity" not in raw:
        return None
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None


def json_response(value: Any, headers: Mapping[str, str] | None = None) -> Response:
    """A 200 with a JSON body."""
    return Response(b"".join(json_pieces(value)), media_type="application/json", headers=dict(headers or {}))
