"""The OpenAPI document: describes the body, the answers and the errors of each path. Knows no engine."""

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from pagoda_frontend.http.access import GUARDED_PREFIXES
from pagoda_frontend.http.errors import ANTHROPIC_PREFIX
from pagoda_frontend.pages.answers import AnthropicErrorAnswer, ErrorAnswer, UnauthorizedAnswer

BEARER = "bearer"
"""Name of the API keys' security scheme."""
REFERENCE = "#/components/schemas/{model}"
ERRORS = {
    400: "The request is wrong; `param` names the field.",
    404: "There is nothing of that name.",
    409: "The worker cannot load the weights: they are missing, damaged, or of another model.",
    413: "The body is too large.",
    429: "This client has as many waiting requests as one client may have.",
    500: "The server failed.",
    501: "The workers run an earlier version, which does not support this.",
    503: "The server is not ready, or overloaded.",
    504: "The request exceeded its own time limit.",
}
GENERATION_ERRORS = (400, 404, 413, 429, 500, 503, 504)
EVENT_STREAM: dict[str, Any] = {"text/event-stream": {}}


class Paths:
    """Adds paths to an app, and describes them."""

    def __init__(self, app: FastAPI, *, has_api_keys: bool) -> None:
        self._app = app
        self._has_api_keys = has_api_keys
        self._models: dict[JsonSchemaMode, list[type[BaseModel]]] = {"validation": [], "serialization": []}
        """Models of bodies (validation) and answers (serialization). FastAPI would prepare a serializer of each for
        each path."""
        app.openapi = self._document  # type: ignore[method-assign]  # FastAPI's own way

    def add(
        self,
        method: str,
        path: str,
        handler: Callable[..., Any],
        *,
        body: type[BaseModel] | None = None,
        answer: type[BaseModel] | None = None,
        errors: tuple[int, ...] = (),
        media: dict[str, Any] | None = None,
        query: tuple[dict[str, Any], ...] = (),
    ) -> None:
        """Serve `path`.

        Args:
            body: the JSON request body.
            answer: the JSON body of a 200; None where it is not JSON.
            errors: statuses besides 200; those for missing keys and wrong methods are added.
            media: further contents of the 200, by media type.
            query: query parameters, in the form of the document.
        """
        is_anthropic = path.startswith(ANTHROPIC_PREFIX)
        shape = AnthropicErrorAnswer if is_anthropic else ErrorAnswer
        responses: dict[int | str, dict[str, Any]] = {
            status: {"description": ERRORS[status], "content": self._json(shape)} for status in errors
        }
        extra: dict[str, Any] = {"parameters": list(query)} if query else {}
        if self._has_api_keys and path.startswith(GUARDED_PREFIXES):
            extra["security"] = [{BEARER: []}]
            refusal = AnthropicErrorAnswer if is_anthropic else UnauthorizedAnswer
            description = "The call has no valid API key."
            responses[401] = {"description": description, "content": self._json(refusal)}
        content = (self._json(answer) if answer is not None else {}) | (media or {})
        responses[200] = {"description": "Success.", "content": content}
        if body is not None:
            extra["requestBody"] = {"required": True, "content": self._json(body, "validation")}
        self._app.add_api_route(
            path,
            handler,
            methods=[method],
            responses=responses,
            openapi_extra=extra or None,
            summary=(handler.__doc__ or "").partition("\n")[0],
            description=" ",
        )

    def _json(self, model: type[BaseModel], mode: JsonSchemaMode = "serialization") -> dict[str, Any]:
        """The contents of a body or an answer."""
        self._models[mode].append(model)
        return {"application/json": {"schema": {"$ref": REFERENCE.format(model=model.__name__)}}}

    def _document(self) -> dict[str, Any]:
        app = self._app
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, routes=app.routes)
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            for mode, models in self._models.items():
                _, definitions = models_json_schema([(model, mode) for model in models], ref_template=REFERENCE)
                schemas |= definitions.get("$defs", {})
            for operations in document["paths"].values():
                for operation in operations.values():
                    _clean(operation)
            if self._has_api_keys:
                document["components"]["securitySchemes"] = {BEARER: {"type": "http", "scheme": "bearer"}}
            for unused in ("HTTPValidationError", "ValidationError"):
                schemas.pop(unused, None)
            app.openapi_schema = document
        return app.openapi_schema


def _clean(operation: dict[str, Any]) -> None:
    """Remove parts that FastAPI adds by itself and that are not true here."""
    responses = operation["responses"]
    responses.pop("422", None)
    operation.pop("description", None)
    success = responses["200"]
    content = success.get("content", {})
    if content.get("application/json", {}).get("schema") == {}:
        del content["application/json"]
    if not content:
        success.pop("content", None)
