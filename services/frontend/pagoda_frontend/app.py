"""The HTTP application: which path leads where. Handlers read their bodies themselves, so that every fault is a 4xx."""

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.middleware.cors import CORSMiddleware

from pagoda_frontend.access import RequestIds, RequireApiKey
from pagoda_frontend.chat import ChatCompletions
from pagoda_frontend.completions import Completions
from pagoda_frontend.errors import install_error_handlers
from pagoda_frontend.operations import Operations
from pagoda_frontend.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from pagoda_frontend.serving import VERSION, Serving


def make_app(serving: Serving) -> FastAPI:
    """The app of one frontend."""
    config = serving.config
    app = FastAPI(title="Pagoda", version=VERSION, root_path=config.root_path)
    app.router.redirect_slashes = False
    install_error_handlers(app)
    operations = Operations(serving=serving)
    app.get("/health")(operations.health)
    app.get("/ready")(operations.ready)
    app.get("/ping")(operations.health)
    app.post("/ping")(operations.health)
    app.get("/version")(operations.version)
    app.get("/load")(operations.load)
    app.get("/metrics")(operations.metrics)
    app.get("/v1/models")(operations.models)
    app.get("/v1/models/{model_id:path}")(operations.model)
    app.post("/tokenize", openapi_extra=_body(TokenizeBody))(operations.tokenize)
    app.post("/detokenize", openapi_extra=_body(DetokenizeBody))(operations.detokenize)
    completions = Completions(serving=serving)
    app.post("/v1/completions", openapi_extra=_body(CompletionBody))(completions.create)
    chat = ChatCompletions(serving=serving)
    app.post("/v1/chat/completions", openapi_extra=_body(ChatBody))(chat.create)
    if config.api_key:
        app.add_middleware(RequireApiKey, keys=config.api_key)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.allowed_origins),
            allow_methods=list(config.allowed_methods),
            allow_headers=list(config.allowed_headers),
            allow_credentials=config.allow_credentials,
        )
    app.add_middleware(RequestIds)
    return app


def _body(body_type: type[BaseModel]) -> dict[str, Any]:
    """The request body's part of the OpenAPI document."""
    schema = body_type.model_json_schema()
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": _inlined(schema, schema)}}}}


def _inlined(node: Any, root: dict[str, Any]) -> Any:
    """`node` with references into `root` replaced by what they name: the document has no place for definitions."""
    if isinstance(node, dict):
        if "$ref" in node:
            return _inlined(root["$defs"][node["$ref"].rpartition("/")[2]], root)
        return {name: _inlined(item, root) for name, item in node.items() if name != "$defs"}
    return [_inlined(item, root) for item in node] if isinstance(node, list) else node
