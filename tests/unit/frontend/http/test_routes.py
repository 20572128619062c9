"""Which path leads where, which are served when, and through which layers a call goes. Nothing is served."""

from typing import Any, cast

import pytest

from pagoda_common.config.frontend_config import FrontendConfig
from pagoda_frontend.http.app import make_app
from pagoda_frontend.serving.models import Models
from pagoda_frontend.serving.serving import Serving

ROUTES = """
GET /openapi.json FastAPI.setup/openapi
GET /live Operations.live
GET /health Operations.health
GET /ready Operations.ready
GET /ping Operations.health
POST /ping Operations.health
GET /version Operations.version
GET /load Operations.load
GET /metrics Operations.metrics
GET /v1/models Operations.models
GET /v1/models/{model_id:path} Operations.model
POST /tokenize TokenCalls.tokenize
POST /detokenize TokenCalls.detokenize
GET /tokenizer_info TokenCalls.tokenizer_info
POST /v1/completions Completions.create
POST /v1/chat/completions ChatCompletions.create
POST /v1/chat/completions/batch ChatCompletions.create_batch
POST /v1/messages Messages.create
POST /v1/responses Responses.create
POST /invocations Invocations.create
POST /v1/embeddings Embeddings.create
POST /pooling PoolingCalls.pool
POST /classify PoolingCalls.classify
POST /score PoolingCalls.score
POST /v1/score PoolingCalls.score
POST /rerank PoolingCalls.rerank
POST /v1/rerank PoolingCalls.rerank
POST /v2/rerank PoolingCalls.rerank
POST /v2/embed PoolingCalls.cohere_embed
POST /v1/messages/count_tokens Messages.count_tokens
GET /v1/responses/{response_id} Responses.retrieve
GET /v1/responses/{response_id}/input_items Responses.input_items
POST /v1/responses/{response_id}/cancel Responses.cancel
DELETE /v1/responses/{response_id} Responses.delete
POST /sleep SleepMode.sleep
POST /wake_up SleepMode.wake_up
GET /is_sleeping SleepMode.is_sleeping
POST /reload_weights SleepMode.reload_weights
POST /v1/load_lora_adapter LoraAdapters.load
POST /v1/unload_lora_adapter LoraAdapters.unload
GET /docs add_docs_pages/swagger
GET /redoc add_docs_pages/redoc
GET /docs/assets/swagger-ui-bundle.js serve_file/answer
GET /docs/assets/swagger-ui.css serve_file/answer
GET /docs/assets/redoc.standalone.js serve_file/answer
GET /docs/assets/favicon.png serve_file/answer
GET / serve_file/answer
GET /status/page.css serve_file/answer
GET /status/page.js serve_file/answer
GET /status/figures.js serve_file/answer
GET /status/samples.js serve_file/answer
GET /status/chat.js serve_file/answer
GET /status/model.js serve_file/answer
GET /status/history.js serve_file/answer
GET /status/markdown.js serve_file/answer
GET /status/calls.js serve_file/answer
GET /status/tokens.js serve_file/answer
GET /status/icon.svg serve_file/answer
GET /status/history StatusCalls.history
GET /status/facts StatusCalls.facts
GET /status/requests StatusCalls.requests
POST /status/requests/{request_id:path}/abort StatusCalls.abort
"""
SLEEP = ("/sleep", "/wake_up", "/is_sleeping", "/reload_weights")
LORA = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
KEYED: dict[str, Any] = {"api_key": ("a",)}
BELOW = ["RequestIds", "LoadReports", "SendInPieces", "CountCalls"]
"""The layers that are always there, the outermost first."""


def serving_of(**config: Any) -> Serving:
    return Serving(config=FrontendConfig(**config), engine=cast("Any", None), metrics=cast("Any", None))


def app(**config: Any) -> Any:
    return make_app(Models([serving_of(**config)]), [cast("Any", None)])


def routes(**config: Any) -> list[str]:
    return [
        " ".join(
            [*sorted(set(route.methods) - {"HEAD"}), route.path, route.endpoint.__qualname__.replace(".<locals>.", "/")]
        )
        for route in app(**config).routes
    ]


async def test_where_each_path_leads() -> None:
    whole = routes(enable_sleep_mode=True, enable_runtime_lora_updating=True, enable_tokenizer_info_endpoint=True)
    assert whole == ROUTES.strip().splitlines()


@pytest.mark.parametrize(
    ("config", "missing"),
    [
        ({}, ("/tokenizer_info", *SLEEP, *LORA)),
        ({"enable_sleep_mode": True}, ("/tokenizer_info", *LORA)),
        ({"enable_runtime_lora_updating": True}, ("/tokenizer_info", *SLEEP)),
        ({"enable_tokenizer_info_endpoint": True}, (*SLEEP, *LORA)),
        ({"disable_fastapi_docs": True}, ("/tokenizer_info", *SLEEP, *LORA, "/openapi.json", "/docs", "/redoc")),
        ({"disable_status_page": True}, ("/tokenizer_info", *SLEEP, *LORA, "/", "/status")),
    ],
)
async def test_what_is_served_when_it_is_asked_for(config: Any, missing: tuple[str, ...]) -> None:
    def is_missing(path: str) -> bool:
        return path in missing or any(path.startswith(f"{one}/") for one in missing if one in ("/docs", "/status"))

    kept = [line for line in ROUTES.strip().splitlines() if not is_missing(line.split()[1])]
    assert routes(**config) == kept


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({}, [*BELOW, "RefuseForeignPages"]),
        (KEYED, [*BELOW, "RequireKeys"]),
        ({"operator_key": ("o",)}, [*BELOW, "RefuseForeignPages", "RequireKeys"]),
        ({"allowed_origins": ("http://o",)}, [*BELOW, "RefuseForeignPages", "CORSMiddleware"]),
        (
            KEYED | {"allowed_origins": ("http://o",), "root_path": "/r"},
            ["RootPath", *BELOW, "CORSMiddleware", "RequireKeys"],
        ),
    ],
)
async def test_the_layers_of_an_app(config: Any, layers: list[str]) -> None:
    assert [layer.cls.__name__ for layer in app(**config).user_middleware] == layers


async def test_what_each_layer_is_told() -> None:
    made = app(
        host="127.0.0.1",
        operator_key=("o",),
        allowed_hosts=("h",),
        allowed_origins=("http://o",),
        allowed_methods=("GET",),
        allowed_headers=("x-a",),
        allow_credentials=True,
        root_path="/r",
        enable_request_id_headers=True,
    )
    told = {layer.cls.__name__: layer.kwargs for layer in made.user_middleware}
    assert told["RefuseForeignPages"] == {"host": "127.0.0.1", "allowed_hosts": ("h",), "origins": ("http://o",)}
    assert told["CORSMiddleware"] == {
        "allow_origins": ["http://o"],
        "allow_methods": ["GET"],
        "allow_headers": ["x-a"],
        "allow_credentials": True,
    }
    assert told["RootPath"] == {"root_path": "/r"}
    assert told["RequestIds"] == {"with_probes": True}
    keys = told["RequireKeys"]
    assert not keys["keys"]
    assert keys["operator_keys"].accepted([("authorization", "Bearer o")]) is not None
    assert (made.title, made.router.redirect_slashes, made.docs_url, made.redoc_url) == ("Pagoda", False, None, None)


async def test_a_trace_begins_above_the_keys() -> None:
    serving = serving_of(**KEYED)
    serving.tracer = cast("Any", object())
    layers = [layer.cls.__name__ for layer in make_app(Models([serving]), [cast("Any", None)]).user_middleware]
    assert layers == [*BELOW, "TraceHttp", "RequireKeys"]
