"""Errors as answers: every code's status and type, every part of the body, in OpenAI's shape and in Anthropic's."""

from typing import Any

import httpx
import orjson
import pytest
from fastapi import FastAPI
from starlette.exceptions import HTTPException

from pagoda_common.errors import (
    Code,
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    ModelLoadError,
    NotFound,
    NotReady,
    PagodaError,
    QueueFull,
    RequestFailed,
    RequestTooLong,
    StaleEpoch,
    Superseded,
)
from pagoda_frontend.http.errors import (
    BodyTooLarge,
    ClientDisconnected,
    anthropic_error,
    error_body,
    error_json,
    error_object,
    error_response,
    install_error_handlers,
    route_path,
)

SERVER_ERROR = "The server had an error while processing your request."
CODES: list[tuple[Code, int, str, str]] = [
    (Code.CANCELLED, 499, "RequestCancelledError", "invalid_request_error"),
    (Code.INVALID_ARGUMENT, 400, "BadRequestError", "invalid_request_error"),
    (Code.DEADLINE_EXCEEDED, 504, "TimeoutError", "timeout_error"),
    (Code.NOT_FOUND, 404, "NotFoundError", "not_found_error"),
    (Code.PERMISSION_DENIED, 403, "PermissionDeniedError", "permission_error"),
    (Code.RESOURCE_EXHAUSTED, 503, "ServiceUnavailableError", "overloaded_error"),
    (Code.FAILED_PRECONDITION, 409, "Conflict", "invalid_request_error"),
    (Code.ABORTED, 409, "Conflict", "invalid_request_error"),
    (Code.UNIMPLEMENTED, 501, "NotImplementedError", "api_error"),
    (Code.INTERNAL, 500, "InternalServerError", "api_error"),
    (Code.UNAVAILABLE, 503, "ServiceUnavailableError", "overloaded_error"),
    (Code.UNAUTHENTICATED, 401, "Unauthorized", "authentication_error"),
]


def test_the_table_has_every_code() -> None:
    assert {code for code, *_ in CODES} == set(Code) - {Code.OK}
    assert [int(code) for code, *_ in CODES] == [1, 3, 4, 5, 7, 8, 9, 10, 12, 13, 14, 16]


@pytest.mark.parametrize(("code", "status", "kind", "anthropic"), CODES)
def test_an_answer_has_every_part(code: Code, status: int, kind: str, anthropic: str) -> None:
    error = PagodaError("what is wrong", field="prompt", code=code, retry_after_s=2.5)
    shown = {"message": "what is wrong", "type": kind, "param": "prompt", "code": status}
    response = error_response(error, {"path": "/v1/completions"})
    assert (response.status_code, response.media_type) == (status, "application/json")
    assert response.headers.get("retry-after") == ("3" if status == 503 else None)
    assert orjson.loads(bytes(response.body)) == {"error": shown} == orjson.loads(error_json(error))
    told = {"type": "error", "error": {"type": anthropic, "message": "prompt: what is wrong"}}
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        assert orjson.loads(error_body(shown, {"path": path})) == told
    told["error"] = {"type": anthropic, "message": "what is wrong"}
    assert anthropic_error({**shown, "param": None}) == told


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        *((InvalidRequest, 400), (ConfigError, 400), (RequestTooLong, 400), (NotFound, 404), (QueueFull, 503)),
        *((NotReady, 503), (StaleEpoch, 409), (Superseded, 409), (DeadlineExceeded, 504), (RequestFailed, 500)),
        *((ModelLoadError, 409), (BodyTooLarge, 413), (PagodaError, 500)),
    ],
)
def test_every_kind_of_error_has_its_status(kind: type[PagodaError], status: int) -> None:
    error = kind("x")
    assert error_response(error).status_code == status
    assert (error.message, error.field, error.retry_after_s, str(error)) == ("x", None, 0.0, "x")


def test_a_body_that_is_too_large_has_a_status_of_its_own() -> None:
    shown = error_object(BodyTooLarge("x"))
    assert shown == {"message": "x", "type": "BadRequestError", "param": None, "code": 413}
    assert anthropic_error(shown)["error"]["type"] == "request_too_large"
    assert anthropic_error({**shown, "code": 429})["error"]["type"] == "rate_limit_error"


def test_a_bug_is_an_error_of_the_server() -> None:
    response = error_response(ValueError("secret"))
    fault = {"message": SERVER_ERROR, "type": "InternalServerError", "param": None, "code": 500}
    assert (response.status_code, orjson.loads(bytes(response.body))) == (500, {"error": fault})


@pytest.mark.parametrize(
    ("message", "code", "shown"),
    [
        ("x" * 2000, Code.INVALID_ARGUMENT, "x" * 2000),
        ("x" * 2001, Code.INVALID_ARGUMENT, "x" * 2000 + "…"),
        ("see /a/b and\nmore", Code.INVALID_ARGUMENT, "see /a/b and\nmore"),
        ("see /a/b and\nmore", Code.INTERNAL, "see … and"),
        ("at 0xabcd it", Code.INTERNAL, "at … it"),
        ("at 0xabc it", Code.INTERNAL, "at 0xabc it"),
        ("n/a is a/b", Code.UNAVAILABLE, "n/a is a/b"),
        ("\nmore", Code.INTERNAL, SERVER_ERROR),
    ],
)
def test_what_is_shown_of_a_message(message: str, code: Code, shown: str) -> None:
    assert error_object(PagodaError(message, code=code))["message"] == shown


@pytest.mark.parametrize(
    ("path", "root", "route"),
    [
        *(("/v1/x", "", "/v1/x"), ("/a/v1/x", "/a", "/v1/x"), ("/ab/v1/x", "/a", "/ab/v1/x"), ("/a", "/a", "")),
        ("/v1/x", "/a", "/v1/x"),
    ],
)
def test_a_proxy_s_prefix_is_no_part_of_the_route(path: str, root: str, route: str) -> None:
    scope: dict[str, Any] = {"path": path, "root_path": root}
    assert route_path(scope) == route
    assert route_path({"path": path}) == path


async def answered(path: str, method: str = "GET") -> httpx.Response:
    """The answer of an app with our handlers, some of whose endpoints fail."""
    app = FastAPI(docs_url=None)
    install_error_handlers(app)
    faults = {
        "/wrong": InvalidRequest("no", field="f"),
        "/gone": ClientDisconnected(),
        "/bug": ValueError("secret"),
        "/teapot": HTTPException(418, "short and stout", headers={"x-spout": "1"}),
    }

    @app.get("/{name}")
    async def endpoint(name: str) -> None:
        raise faults[f"/{name}"]

    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.request(method, path)


@pytest.mark.parametrize(
    ("path", "method", "status", "kind", "message", "field"),
    [
        ("/wrong", "GET", 400, "BadRequestError", "no", "f"),
        ("/a/b", "GET", 404, "NotFoundError", "Not Found: GET /a/b", None),
        ("/wrong", "PUT", 405, "MethodNotAllowedError", "Method Not Allowed: PUT /wrong", None),
        ("/teapot", "GET", 418, "BadRequestError", "short and stout", None),
        ("/bug", "GET", 500, "InternalServerError", SERVER_ERROR, None),
    ],
)
async def test_every_failure_of_an_app_has_the_one_shape(
    path: str, method: str, status: int, kind: str, message: str, field: str | None
) -> None:
    response = await answered(path, method)
    shown = {"message": message, "type": kind, "param": field, "code": status}
    detail = {404: {"detail": "Not Found"}, 405: {"detail": "Method Not Allowed"}}.get(status, {})
    assert (response.status_code, response.json()) == (status, {"error": shown, **detail})
    assert response.headers["content-type"] == "application/json"
    assert response.headers.get("allow") == ("GET" if status == 405 else None)
    assert response.headers.get("x-spout") == ("1" if status == 418 else None)


async def test_a_client_that_is_gone_is_told_nothing() -> None:
    response = await answered("/gone")
    assert (response.status_code, response.content) == (499, b"")
