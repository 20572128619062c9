"""What the OpenAPI document says of a path: its body, answers, errors, keys and query."""

from typing import Any

import pytest
from fastapi import FastAPI
from pydantic import BaseModel

from pagoda_frontend.pages.openapi import ERRORS, Paths


class Asked(BaseModel):
    """A body."""

    text: str


class Answered(BaseModel):
    """An answer."""

    number: int


async def handler() -> None:
    """Does it.

    At length.
    """


def described(path: str, *, has_api_keys: bool = False, method: str = "POST", **given: Any) -> tuple[Any, Any]:
    """The operation, and the whole document."""
    app = FastAPI(title="t", version="v")
    paths = Paths(app, has_api_keys=has_api_keys)
    paths.add(method, path, handler, **given)
    paths.add("GET", "/other", handler, answer=Answered, errors=(503,))
    document = app.openapi()
    assert app.openapi() is document
    return document["paths"][path][method.lower()], document


def schema(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}


def test_a_path_with_everything() -> None:
    query = ({"name": "level", "in": "query", "schema": {"type": "integer"}},)
    operation, document = described(
        "/v1/x",
        body=Asked,
        answer=Answered,
        errors=(400, 504),
        media={"text/event-stream": {}},
        query=query,
        has_api_keys=True,
    )
    del operation["operationId"]
    assert operation == {
        "summary": "Does it.",
        "parameters": list(query),
        "security": [{"bearer": []}],
        "requestBody": {"required": True, "content": schema("Asked")},
        "responses": {
            "200": {"description": "Success.", "content": {**schema("Answered"), "text/event-stream": {}}},
            "400": {"description": ERRORS[400], "content": schema("ErrorAnswer")},
            "504": {"description": ERRORS[504], "content": schema("ErrorAnswer")},
            "401": {
                "description": "The call has no valid API key.",
                "content": schema("UnauthorizedAnswer"),
            },
        },
    }
    assert document["info"] == {"title": "t", "version": "v"}
    assert document["components"]["securitySchemes"] == {"bearer": {"type": "http", "scheme": "bearer"}}
    schemas = document["components"]["schemas"]
    assert {"Asked", "Answered", "ErrorAnswer", "UnauthorizedAnswer"} <= schemas.keys()
    assert not {"HTTPValidationError", "ValidationError"} & schemas.keys()
    assert schemas["Asked"]["required"] == ["text"]


def test_a_path_with_nothing() -> None:
    operation, document = described("/x", method="GET")
    del operation["operationId"]
    assert operation == {"summary": "Does it.", "responses": {"200": {"description": "Success."}}}
    assert "securitySchemes" not in document["components"]


@pytest.mark.parametrize(
    ("path", "has_api_keys", "is_guarded"),
    [("/v1/x", True, True), ("/v1/x", False, False), ("/health", True, False), ("/pooling", True, True)],
)
def test_keys_are_asked_for_where_there_are_some(path: str, has_api_keys: bool, is_guarded: bool) -> None:
    operation, document = described(path, has_api_keys=has_api_keys)
    assert ("security" in operation, "401" in operation["responses"]) == (is_guarded, is_guarded)
    assert ("securitySchemes" in document["components"]) == has_api_keys


def test_errors_of_messages_have_anthropic_s_shape() -> None:
    operation, _ = described("/v1/messages/x", errors=(404,), has_api_keys=True)
    for status in ("401", "404"):
        assert operation["responses"][status]["content"] == schema("AnthropicErrorAnswer")


def test_another_media_type_alone() -> None:
    operation, _ = described("/x", media={"text/plain": {"schema": {"type": "string"}}})
    assert operation["responses"]["200"]["content"] == {"text/plain": {"schema": {"type": "string"}}}
