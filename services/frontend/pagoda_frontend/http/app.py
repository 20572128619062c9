"""The HTTP application: maps paths to handlers. Handlers read their bodies themselves, so that every fault is a 4xx."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from pagoda_common.engine.client import EngineClient
from pagoda_common.rpc.bearer import BearerKeys
from pagoda_common.version import VERSION
from pagoda_frontend.http.access import RequestIds, RequireKeys, RootPath
from pagoda_frontend.http.answers.load_report import LoadReports
from pagoda_frontend.http.answers.pieces import SendInPieces
from pagoda_frontend.http.browsers import RefuseForeignPages
from pagoda_frontend.http.by_model import QUERY, ByModel, load_of
from pagoda_frontend.http.draining import CountCalls
from pagoda_frontend.http.errors import install_error_handlers
from pagoda_frontend.http.operators.lora_adapters import LoraAdapters
from pagoda_frontend.http.operators.operations import Operations, TokenCalls
from pagoda_frontend.http.operators.sleep_mode import SleepMode
from pagoda_frontend.http.operators.status_calls import StatusCalls
from pagoda_frontend.http.traces import TraceHttp
from pagoda_frontend.messages.handlers import Messages
from pagoda_frontend.messages.protocol import CountTokensBody, MessagesBody
from pagoda_frontend.openai.chat import ChatCompletions
from pagoda_frontend.openai.completions import Completions
from pagoda_frontend.openai.embeddings import Embeddings
from pagoda_frontend.openai.invocations import Invocations
from pagoda_frontend.openai.protocol import (
    ChatBatchBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    LoadLoraAdapterBody,
    ReloadWeightsBody,
    TokenizeBody,
    UnloadLoraAdapterBody,
)
from pagoda_frontend.pages import answers
from pagoda_frontend.pages.docs import add_docs_pages
from pagoda_frontend.pages.openapi import EVENT_STREAM, GENERATION_ERRORS, Paths
from pagoda_frontend.pages.status import add_status_page
from pagoda_frontend.pooling import answers as pooling_answers
from pagoda_frontend.pooling.handlers import PoolingCalls
from pagoda_frontend.pooling.protocol import ClassifyBody, CohereEmbedBody, PoolBody, RerankBody, ScoreBody
from pagoda_frontend.responses.handlers import Responses
from pagoda_frontend.responses.protocol import ResponsesBody
from pagoda_frontend.serving.models import Models
from pagoda_frontend.serving.serving import Serving

READING_ERRORS = (400, 404, 413, 503)
EMBEDDING_ERRORS = (*GENERATION_ERRORS, 501)
PLAIN = {"text/plain": {"schema": {"type": "string"}}}
SLEEP_ERRORS = (400, 404, 409, 503)
LORA_ERRORS = (400, 404, 409, 503)
MODEL = {"name": QUERY, "in": "query", "required": True, "schema": {"type": "string"}}
"""Query parameter of calls that take it when there are several models."""
GROUP = {"name": "group", "in": "query", "schema": {"type": "integer"}}
SLEEP_QUERY = (
    {"name": "level", "in": "query", "schema": {"type": "integer", "enum": [1, 2], "default": 1}},
    {"name": "mode", "in": "query", "schema": {"type": "string", "enum": ["keep", "abort"], "default": "keep"}},
    GROUP,
)
WAKE_QUERY = (
    {"name": "tags", "in": "query", "schema": {"type": "array", "items": {"enum": ["weights", "kv_cache"]}}},
    GROUP,
)
FOLLOWING = (
    {"name": "stream", "in": "query", "schema": {"type": "boolean"}},
    {"name": "starting_after", "in": "query", "schema": {"type": "integer"}},
)
PAGING = (
    {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 100}},
    {"name": "order", "in": "query", "schema": {"type": "string", "enum": ["asc", "desc"]}},
    {"name": "after", "in": "query", "schema": {"type": "string"}},
)


def make_app(models: Models, engines: Sequence[EngineClient]) -> FastAPI:
    """The app of one frontend.

    Args:
        engines: the engine of each of `models`, for operators' calls.
    """
    config = models.first.config
    url = None if config.disable_fastapi_docs else "/openapi.json"
    app = FastAPI(title="Pagoda", version=VERSION, openapi_url=url, docs_url=None, redoc_url=None)
    app.router.redirect_slashes = False
    install_error_handlers(app)
    paths = Paths(app, has_api_keys=bool(config.api_key))
    _add_operations(paths, models)
    _add_generation(paths, models)
    if config.enable_sleep_mode:
        _add_sleep_mode(paths, models, engines)
    if config.enable_runtime_lora_updating:
        _add_lora_adapters(paths, models, engines)
    if not config.disable_fastapi_docs:
        add_docs_pages(app)
    if not config.disable_status_page:
        add_status_page(app)
        StatusCalls(models=models).add_to(app)
    _add_layers(app, models, engines)
    return app


def _add_layers(app: FastAPI, models: Models, engines: Sequence[EngineClient]) -> None:
    serving = models.first
    config = serving.config
    if config.api_key or config.operator_key:
        operator_keys = BearerKeys(config.operator_key)
        app.add_middleware(RequireKeys, keys=serving.api_keys, operator_keys=operator_keys)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.allowed_origins),
            allow_methods=list(config.allowed_methods),
            allow_headers=list(config.allowed_headers),
            allow_credentials=config.allow_credentials,
        )
    if not config.api_key:
        allowed, origins = config.allowed_hosts, config.allowed_origins
        app.add_middleware(RefuseForeignPages, host=config.host, allowed_hosts=allowed, origins=origins)
    if serving.tracer is not None:
        app.add_middleware(TraceHttp, tracer=serving.tracer)
    app.add_middleware(CountCalls, serving=serving)
    app.add_middleware(SendInPieces)
    app.add_middleware(LoadReports, load=load_of(models, engines))
    app.add_middleware(RequestIds, with_probes=config.enable_request_id_headers)
    if config.root_path:
        app.add_middleware(RootPath, root_path=config.root_path)


def _add_operations(paths: Paths, models: Models) -> None:
    operations, by_model = Operations(models=models), ByModel(models)
    tokens = [TokenCalls(serving=serving) for serving in models.servings]
    paths.add("GET", "/live", operations.live)
    paths.add("GET", "/health", operations.health, errors=(503,))
    paths.add("GET", "/ready", operations.ready, answer=answers.ReadyAnswer, errors=(503,))
    paths.add("GET", "/ping", operations.health, errors=(503,))
    paths.add("POST", "/ping", operations.health, errors=(503,))
    paths.add("GET", "/version", operations.version, answer=answers.VersionAnswer)
    paths.add("GET", "/load", operations.load, answer=answers.LoadAnswer)
    paths.add("GET", "/metrics", operations.metrics, media=PLAIN)
    paths.add("GET", "/v1/models", operations.models, answer=answers.ModelList, errors=(503,))
    paths.add("GET", "/v1/models/{model_id:path}", operations.model, answer=answers.ModelCard, errors=(404, 503))
    for path, handlers, body, answer in (
        ("/tokenize", [one.tokenize for one in tokens], TokenizeBody, answers.TokenizeAnswer),
        ("/detokenize", [one.detokenize for one in tokens], DetokenizeBody, answers.DetokenizeAnswer),
    ):
        paths.add("POST", path, by_model.body(handlers), body=body, answer=answer, errors=READING_ERRORS)
    if models.first.config.enable_tokenizer_info_endpoint:
        info, handler = answers.TokenizerInfoAnswer, by_model.query([one.tokenizer_info for one in tokens])
        paths.add("GET", "/tokenizer_info", handler, answer=info, errors=(503,), query=_model_query(models))


def _add_sleep_mode(paths: Paths, models: Models, engines: Sequence[EngineClient]) -> None:
    pairs = zip(models.servings, engines, strict=True)
    of_all = [SleepMode(serving=serving, engine=engine) for serving, engine in pairs]
    one, named = ByModel(models).query, _model_query(models)
    add = partial(paths.add, errors=SLEEP_ERRORS)
    add("POST", "/sleep", one([sleep_mode.sleep for sleep_mode in of_all]), query=(*named, *SLEEP_QUERY))
    add("POST", "/wake_up", one([sleep_mode.wake_up for sleep_mode in of_all]), query=(*named, *WAKE_QUERY))
    handler = one([sleep_mode.is_sleeping for sleep_mode in of_all])
    paths.add("GET", "/is_sleeping", handler, answer=answers.IsSleepingAnswer, errors=(503,), query=named)
    handler = one([sleep_mode.reload_weights for sleep_mode in of_all])
    add("POST", "/reload_weights", handler, body=ReloadWeightsBody, answer=answers.ReloadWeightsAnswer, query=named)


def _model_query(models: Models) -> tuple[dict[str, Any], ...]:
    return (MODEL,) if models.are_several else ()


def _add_lora_adapters(paths: Paths, models: Models, engines: Sequence[EngineClient]) -> None:
    pairs, one = zip(models.servings, engines, strict=True), ByModel(models).query
    of_all = [LoraAdapters(serving=serving, engine=engine, models=models) for serving, engine in pairs]
    for path, handlers, body in (
        ("/v1/load_lora_adapter", [adapters.load for adapters in of_all], LoadLoraAdapterBody),
        ("/v1/unload_lora_adapter", [adapters.unload for adapters in of_all], UnloadLoraAdapterBody),
    ):
        query = _model_query(models)
        paths.add("POST", path, one(handlers), body=body, errors=LORA_ERRORS, media=PLAIN, query=query)


class _Generation:
    """The handlers of one model."""

    def __init__(self, serving: Serving) -> None:
        self.completions = Completions(serving=serving)
        self.chat = ChatCompletions(serving=serving)
        self.messages = Messages(serving=serving)
        self.responses = Responses(serving=serving)
        self.embeddings = Embeddings(serving=serving)
        self.pooling = PoolingCalls(serving=serving)
        self.invocations = Invocations(
            chat=self.chat,
            completions=self.completions,
            embeddings=self.embeddings,
            pooling=self.pooling,
            serving=serving,
        )


def _add_generation(paths: Paths, models: Models) -> None:
    of_all, by_model = [_Generation(serving) for serving in models.servings], ByModel(models)
    one = by_model.body_or_stream
    for path, handlers, body, answer in (
        ("/v1/completions", [each.completions.create for each in of_all], CompletionBody, answers.CompletionAnswer),
        ("/v1/chat/completions", [each.chat.create for each in of_all], ChatBody, answers.ChatAnswer),
        ("/v1/chat/completions/batch", [each.chat.create_batch for each in of_all], ChatBatchBody, answers.ChatAnswer),
        ("/v1/messages", [each.messages.create for each in of_all], MessagesBody, answers.MessagesAnswer),
        ("/v1/responses", [each.responses.create for each in of_all], ResponsesBody, answers.ResponseAnswer),
    ):
        paths.add("POST", path, one(handlers), body=body, answer=answer, errors=GENERATION_ERRORS, media=EVENT_STREAM)
    handler = one([each.invocations.create for each in of_all])
    paths.add("POST", "/invocations", handler, errors=GENERATION_ERRORS, media=EVENT_STREAM)
    paths.add(
        "POST",
        "/v1/embeddings",
        by_model.body([each.embeddings.create for each in of_all]),
        body=EmbeddingBody,
        answer=answers.EmbeddingAnswer,
        errors=EMBEDDING_ERRORS,
    )
    _add_pooling(paths, [each.pooling for each in of_all], by_model)
    paths.add(
        "POST",
        "/v1/messages/count_tokens",
        by_model.body([each.messages.count_tokens for each in of_all]),
        body=CountTokensBody,
        answer=answers.CountTokensAnswer,
        errors=READING_ERRORS,
    )
    _add_stored_responses(paths, [each.responses for each in of_all], by_model)


def _add_stored_responses(paths: Paths, of_all: Sequence[Responses], by_model: ByModel) -> None:
    kept, found, responses = "/v1/responses/{response_id}", answers.ResponseAnswer, of_all[0]  # stored for all models
    retrieve = by_model.stream([each.retrieve for each in of_all])
    paths.add("GET", kept, retrieve, answer=found, errors=(400, 404), media=EVENT_STREAM, query=FOLLOWING)
    paths.add(
        "GET", f"{kept}/input_items", responses.input_items, answer=answers.ItemPage, errors=(400, 404), query=PAGING
    )
    paths.add("POST", f"{kept}/cancel", responses.cancel, answer=found, errors=(400, 404))
    paths.add("DELETE", kept, responses.delete, answer=answers.DeletedResponse, errors=(404,))


def _add_pooling(paths: Paths, of_all: Sequence[PoolingCalls], by_model: ByModel) -> None:
    for path, name, body, answer in (
        ("/pooling", "pool", PoolBody, pooling_answers.PoolingAnswer),
        ("/classify", "classify", ClassifyBody, pooling_answers.ClassifyAnswer),
        ("/score", "score", ScoreBody, pooling_answers.ScoreAnswer),
        ("/v1/score", "score", ScoreBody, pooling_answers.ScoreAnswer),
        ("/rerank", "rerank", RerankBody, pooling_answers.RerankAnswer),
        ("/v1/rerank", "rerank", RerankBody, pooling_answers.RerankAnswer),
        ("/v2/rerank", "rerank", RerankBody, pooling_answers.RerankAnswer),
        ("/v2/embed", "cohere_embed", CohereEmbedBody, pooling_answers.CohereEmbedAnswer),
    ):
        handler = by_model.body([getattr(calls, name) for calls in of_all])
        paths.add("POST", path, handler, body=body, answer=answer, errors=EMBEDDING_ERRORS)
