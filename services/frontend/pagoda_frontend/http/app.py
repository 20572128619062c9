"""The HTTP application: which path leads where. Handlers read their bodies themselves, so that every fault is a 4xx."""

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from pagoda_common.engine.client import EngineClient
from pagoda_common.rpc.bearer import BearerKeys
from pagoda_common.version import VERSION
from pagoda_frontend.http.access import RequestIds, RequireKeys, RootPath
from pagoda_frontend.http.browsers import RefuseForeignPages
from pagoda_frontend.http.draining import CountCalls
from pagoda_frontend.http.errors import install_error_handlers
from pagoda_frontend.http.load_report import LoadReports
from pagoda_frontend.http.lora_adapters import LoraAdapters
from pagoda_frontend.http.operations import Operations
from pagoda_frontend.http.sleep_mode import SleepMode
from pagoda_frontend.http.status_calls import StatusCalls
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
from pagoda_frontend.requests.serving import Serving
from pagoda_frontend.responses.handlers import Responses
from pagoda_frontend.responses.protocol import ResponsesBody

READING_ERRORS = (400, 404, 413, 503)
EMBEDDING_ERRORS = (*GENERATION_ERRORS, 501)
PLAIN = {"text/plain": {"schema": {"type": "string"}}}
SLEEP_ERRORS = (400, 404, 409, 503)
LORA_ERRORS = (400, 404, 409, 503)
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


def make_app(serving: Serving, engine: EngineClient) -> FastAPI:
    """The app of one frontend; `engine`: the one that `serving` uses, for what operators ask of it."""
    config = serving.config
    url = None if config.disable_fastapi_docs else "/openapi.json"
    app = FastAPI(title="Pagoda", version=VERSION, openapi_url=url, docs_url=None, redoc_url=None)
    app.router.redirect_slashes = False
    install_error_handlers(app)
    paths = Paths(app, has_api_keys=bool(config.api_key))
    _add_operations(paths, serving)
    _add_generation(paths, serving)
    if config.enable_sleep_mode:
        _add_sleep_mode(paths, serving, engine)
    if config.enable_runtime_lora_updating:
        _add_lora_adapters(paths, serving, engine)
    if not config.disable_fastapi_docs:
        add_docs_pages(app)
    if not config.disable_status_page:
        add_status_page(app)
        StatusCalls(serving=serving).add_to(app)
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
    app.add_middleware(LoadReports, load=lambda: engine.load)
    app.add_middleware(RequestIds, with_probes=config.enable_request_id_headers)
    if config.root_path:
        app.add_middleware(RootPath, root_path=config.root_path)
    return app


def _add_operations(paths: Paths, serving: Serving) -> None:
    operations = Operations(serving=serving)
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
    for path, handler, body, answer in (
        ("/tokenize", operations.tokenize, TokenizeBody, answers.TokenizeAnswer),
        ("/detokenize", operations.detokenize, DetokenizeBody, answers.DetokenizeAnswer),
    ):
        paths.add("POST", path, handler, body=body, answer=answer, errors=READING_ERRORS)
    if serving.config.enable_tokenizer_info_endpoint:
        info = answers.TokenizerInfoAnswer
        paths.add("GET", "/tokenizer_info", operations.tokenizer_info, answer=info, errors=(503,))


def _add_sleep_mode(paths: Paths, serving: Serving, engine: EngineClient) -> None:
    sleep_mode = SleepMode(serving=serving, engine=engine)
    paths.add("POST", "/sleep", sleep_mode.sleep, errors=SLEEP_ERRORS, query=SLEEP_QUERY)
    paths.add("POST", "/wake_up", sleep_mode.wake_up, errors=SLEEP_ERRORS, query=WAKE_QUERY)
    paths.add("GET", "/is_sleeping", sleep_mode.is_sleeping, answer=answers.IsSleepingAnswer, errors=(503,))
    body, answer = ReloadWeightsBody, answers.ReloadWeightsAnswer
    paths.add("POST", "/reload_weights", sleep_mode.reload_weights, body=body, answer=answer, errors=SLEEP_ERRORS)


def _add_lora_adapters(paths: Paths, serving: Serving, engine: EngineClient) -> None:
    adapters = LoraAdapters(serving=serving, engine=engine)
    for path, handler, body in (
        ("/v1/load_lora_adapter", adapters.load, LoadLoraAdapterBody),
        ("/v1/unload_lora_adapter", adapters.unload, UnloadLoraAdapterBody),
    ):
        paths.add("POST", path, handler, body=body, errors=LORA_ERRORS, media=PLAIN)


def _add_generation(paths: Paths, serving: Serving) -> None:
    completions = Completions(serving=serving)
    chat = ChatCompletions(serving=serving)
    messages = Messages(serving=serving)
    responses = Responses(serving=serving)
    for path, handler, body, answer in (
        ("/v1/completions", completions.create, CompletionBody, answers.CompletionAnswer),
        ("/v1/chat/completions", chat.create, ChatBody, answers.ChatAnswer),
        ("/v1/chat/completions/batch", chat.create_batch, ChatBatchBody, answers.ChatAnswer),
        ("/v1/messages", messages.create, MessagesBody, answers.MessagesAnswer),
        ("/v1/responses", responses.create, ResponsesBody, answers.ResponseAnswer),
    ):
        paths.add("POST", path, handler, body=body, answer=answer, errors=GENERATION_ERRORS, media=EVENT_STREAM)
    embeddings, pooling = Embeddings(serving=serving), PoolingCalls(serving=serving)
    invocations = Invocations(
        chat=chat, completions=completions, embeddings=embeddings, pooling=pooling, serving=serving
    )
    paths.add("POST", "/invocations", invocations.create, errors=GENERATION_ERRORS, media=EVENT_STREAM)
    paths.add(
        "POST",
        "/v1/embeddings",
        embeddings.create,
        body=EmbeddingBody,
        answer=answers.EmbeddingAnswer,
        errors=EMBEDDING_ERRORS,
    )
    _add_pooling(paths, pooling)
    paths.add(
        "POST",
        "/v1/messages/count_tokens",
        messages.count_tokens,
        body=CountTokensBody,
        answer=answers.CountTokensAnswer,
        errors=READING_ERRORS,
    )
    kept = "/v1/responses/{response_id}"
    found = answers.ResponseAnswer
    paths.add("GET", kept, responses.retrieve, answer=found, errors=(400, 404), media=EVENT_STREAM, query=FOLLOWING)
    paths.add(
        "GET", f"{kept}/input_items", responses.input_items, answer=answers.ItemPage, errors=(400, 404), query=PAGING
    )
    paths.add("POST", f"{kept}/cancel", responses.cancel, answer=found, errors=(400, 404))
    paths.add("DELETE", kept, responses.delete, answer=answers.DeletedResponse, errors=(404,))


def _add_pooling(paths: Paths, calls: PoolingCalls) -> None:
    for path, handler, body, answer in (
        ("/pooling", calls.pool, PoolBody, pooling_answers.PoolingAnswer),
        ("/classify", calls.classify, ClassifyBody, pooling_answers.ClassifyAnswer),
        ("/score", calls.score, ScoreBody, pooling_answers.ScoreAnswer),
        ("/v1/score", calls.score, ScoreBody, pooling_answers.ScoreAnswer),
        ("/rerank", calls.rerank, RerankBody, pooling_answers.RerankAnswer),
        ("/v1/rerank", calls.rerank, RerankBody, pooling_answers.RerankAnswer),
        ("/v2/rerank", calls.rerank, RerankBody, pooling_answers.RerankAnswer),
        ("/v2/embed", calls.cohere_embed, CohereEmbedBody, pooling_answers.CohereEmbedAnswer),
    ):
        paths.add("POST", path, handler, body=body, answer=answer, errors=EMBEDDING_ERRORS)
