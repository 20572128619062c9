"""Who reaches which path, over the layers around the app alone: keys, operators, ids, prefixes, load reports."""

from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import orjson
import pytest

from pagoda.v1 import types_pb2
from pagoda_common.process import logging
from pagoda_common.rpc.bearer import BearerKeys
from pagoda_frontend.http import access
from pagoda_frontend.http.access import RequestIds, RequireKeys, RootPath, clean_request_id
from pagoda_frontend.http.answers.load_report import LoadReports, load_report
from pagoda_frontend.http.body import TENANT

KEYS, OPERATORS = BearerKeys(("key", "other")), BearerKeys(("operator",))
NO_KEYS = BearerKeys(())
API = ("/v1/models", "/v1/completions", "/v1/messages", "/v2/embed", "/inference/x", "/pooling", "/classify", "/score")
MORE_API = ("/rerank", "/invocations", "/is_sleeping", "/status/requests", "/status/requests/a/abort")
OPERATED = ("/sleep", "/wake_up", "/reload_weights", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
OPEN = ("/", "/live", "/health", "/ready", "/ping", "/metrics", "/load", "/version", "/docs", "/tokenize")


async def call(layer: Any, path: str, headers: dict[str, str] | None = None, **scope: Any) -> tuple[int, Any, Any]:
    """Status, head of the answer (names to values), and body, of a call through `layer`."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    raw = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    whole = {"type": "http", "method": "POST", "path": path, "headers": raw, **scope}
    await layer(whole, None, send)
    shown = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], shown, sent[1]["body"]


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answers with what it was given."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    body = {"tenant": scope.get(TENANT), "root": scope.get("root_path")}
    await send({"type": "http.response.body", "body": orjson.dumps(body)})


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def status_of(keys: BearerKeys, path: str, headers: dict[str, str], **scope: Any) -> int:
    return (await call(RequireKeys(app, keys=keys, operator_keys=OPERATORS), path, headers, **scope))[0]


@pytest.mark.parametrize("path", [*API, *MORE_API])
async def test_the_api_needs_a_key(path: str) -> None:
    for headers, wanted in (({}, 401), (bearer("wrong"), 401), (bearer("key"), 200), (bearer("other"), 200)):
        assert await status_of(KEYS, path, headers) == wanted, headers
        assert await status_of(KEYS, f"/root{path}", headers, root_path="/root") == wanted
        assert await status_of(NO_KEYS, path, headers) == 200
    assert await status_of(KEYS, path, bearer("operator")) == (200 if path == "/is_sleeping" else 401)
    assert await status_of(KEYS, path, {}, method="OPTIONS") == 200
    anthropic = 200 if path == "/v1/messages" else 401
    assert await status_of(KEYS, path, {"x-api-key": "key"}) == anthropic


@pytest.mark.parametrize("path", OPERATED)
async def test_what_concerns_all_needs_an_operators_key(path: str) -> None:
    for keys, headers, wanted in (
        *((KEYS, {}, 401), (KEYS, bearer("key"), 403), (KEYS, bearer("operator"), 200), (KEYS, bearer("wrong"), 401)),
        *((NO_KEYS, {}, 401), (NO_KEYS, bearer("operator"), 200)),
    ):
        assert await status_of(keys, path, headers) == wanted, headers
    layer = RequireKeys(app, keys=KEYS, operator_keys=OPERATORS)
    _, _, body = await call(layer, path, bearer("key"))
    message = "this call affects all clients: it needs one of --operator-key, not an API key"
    fault = {"message": message, "type": "PermissionDeniedError", "param": None, "code": 403}
    assert orjson.loads(body) == {"error": fault}


@pytest.mark.parametrize("path", OPEN)
async def test_probes_and_pages_are_open(path: str) -> None:
    assert await status_of(KEYS, path, {}) == 200


async def test_a_refusal_has_the_shape_of_its_api_and_a_call_its_tenant() -> None:
    layer = RequireKeys(app, keys=KEYS, operator_keys=OPERATORS)
    status, headers, body = await call(layer, "/v1/completions")
    assert (status, headers["content-type"], orjson.loads(body)) == (401, "application/json", {"error": "Unauthorized"})
    _, _, body = await call(layer, "/v1/messages")
    told = {"type": "error", "error": {"type": "authentication_error", "message": "Unauthorized"}}
    assert orjson.loads(body) == told
    tenants = [orjson.loads((await call(layer, "/v1/x", bearer(key)))[2])["tenant"] for key in ("key", "other", "key")]
    assert tenants[0] == tenants[2] != tenants[1]
    assert tenants[0] is not None
    assert "key" not in tenants[0]
    assert orjson.loads((await call(layer, "/metrics", bearer("key")))[2])["tenant"] is None


@pytest.mark.parametrize(("given", "told"), [("/a", "/a"), ("/a/", "/a"), ("/a/b//", "/a/b")])
async def test_the_app_knows_its_prefix(given: str, told: str) -> None:
    assert orjson.loads((await call(RootPath(app, root_path=given), "/v1/x"))[2])["root"] == told


@pytest.mark.parametrize("path", ["/live", "/health", "/ping", "/ready", "/metrics", "/load", "/version", "/v1/models"])
async def test_ids_of_answers(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "uuid", SimpleNamespace(uuid4=lambda: UUID(int=7)))
    drawn = {"x-request-id": f"{7:032x}"}
    for with_probes in (False, True):
        layer = RequestIds(app, with_probes=with_probes)
        is_drawn = with_probes or path == "/v1/models"
        assert (await call(layer, path))[1] == (drawn if is_drawn else {})
        assert (await call(layer, path, {"x-request-id": "a b"}))[1] == {"x-request-id": "a_b"}


async def test_an_id_that_the_endpoint_gave_stays_unless_the_client_gave_one() -> None:
    async def endpoint(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-request-id", b"resp_1")]})
        await send({"type": "http.response.body", "body": b""})

    layer = RequestIds(endpoint, with_probes=False)
    assert (await call(layer, "/v1/x"))[1] == {"x-request-id": "resp_1"}
    assert (await call(layer, "/v1/x", {"x-request-id": "mine"}))[1] == {"x-request-id": "mine"}


def test_an_id_is_cut_and_cleaned() -> None:
    assert clean_request_id("aZ09_.:-") == "aZ09_.:-"
    assert clean_request_id("a/b c\r\né") == "a_b_c___"
    assert clean_request_id("x" * 129) == "x" * 128


async def test_the_load_is_told_to_who_asks() -> None:
    load = types_pb2.EngineLoad(num_used_blocks=25, num_total_blocks=100, num_waiting_reqs=3)
    asked: list[str] = []

    def current(scope: Any) -> types_pb2.EngineLoad:
        asked.append(scope["path"])
        return load

    layer = LoadReports(app, load=current)
    header = "endpoint-load-metrics-format"
    text = "TEXT named_metrics.kv_cache_usage_perc=0.25, named_metrics.num_requests_waiting=3.0"
    for form, told in (
        *(("text", {"endpoint-load-metrics": text}), ("bin", {}), ("", {})),
        (
            "Json",
            {
                "endpoint-load-metrics": 'JSON {"named_metrics": {"kv_cache_usage_perc": 0.25, '
                '"num_requests_waiting": 3.0}}'
            },
        ),
    ):
        assert (await call(layer, "/v1/x", {header: form}))[1] == told
    assert (await call(layer, "/v1/x"))[1] == {}
    assert asked == ["/v1/x"] * 2, "once for each report"
    load.num_total_blocks = 0
    assert load_report(load, "TEXT").startswith("TEXT named_metrics.kv_cache_usage_perc=0.0,")


async def test_layers_pass_on_what_is_no_call() -> None:
    scope, receive, send = {"type": "lifespan"}, object(), object()
    passed: list[Any] = []

    async def endpoint(*given: Any) -> None:
        passed.append(given)

    for layer in (
        RequireKeys(endpoint, keys=KEYS, operator_keys=OPERATORS),
        RequestIds(endpoint, with_probes=True),
        LoadReports(endpoint, load=types_pb2.EngineLoad),
    ):
        passed.clear()
        await layer(scope, cast("Any", receive), cast("Any", send))
        assert passed == [(scope, receive, send)], layer


async def test_the_log_has_the_ids_of_the_call_and_its_trace() -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    seen: list[Any] = []

    async def endpoint(scope: Any, receive: Any, send: Any) -> None:
        seen.append((logging.request_id.get(), logging.trace_id.get()))
        await app(scope, receive, send)
        seen.append(logging.request_id.get())

    layer = RequestIds(endpoint, with_probes=False)
    _, headers, _ = await call(layer, "/v1/x", {"traceparent": f"00-{trace}-00f067aa0ba902b7-01"})
    assert seen == [("", trace), headers["x-request-id"]]
    seen.clear()
    await call(layer, "/v1/x", {"x-request-id": "mine"})
    assert seen == [("mine", ""), "mine"]
