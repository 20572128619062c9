"""What operators and libraries look at: models, health, versions, metrics, keys, request ids, the OpenAPI document."""

import re

import httpx
import pytest

from tests.conformance.api import API_KEYS, CHAT, COMPLETIONS, MODEL, Api, chat_body


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping", "/version", "/load", "/metrics", "/openapi.json"])
def test_probes_and_scrapers_need_no_key(api: Api, path: str) -> None:
    assert httpx.get(f"{api.http.base_url}{path}", timeout=240).status_code == 200


def test_a_ping_may_be_posted(api: Api) -> None:
    assert api.http.post("/ping").status_code == 200


GUARDED = [("GET", "/v1/models"), ("POST", COMPLETIONS), ("POST", CHAT), ("GET", f"/v1/models/{MODEL}")]
NO_KEYS = {
    "none": {},
    "another key": {"Authorization": "Bearer sk-other"},
    "no bearer": {"Authorization": API_KEYS[0]},
    "another scheme": {"Authorization": f"Basic {API_KEYS[0]}"},
    "a part of the key": {"Authorization": f"Bearer {API_KEYS[0][:-1]}"},
    "more than the key": {"Authorization": f"Bearer {API_KEYS[0]}x"},
    "nothing after bearer": {"Authorization": "Bearer"},
    "letters beyond ascii": {"Authorization": "Bearer sk-\u00e9"},
}


@pytest.mark.parametrize(("method", "path"), GUARDED, ids=[path for _, path in GUARDED])
@pytest.mark.parametrize("headers", NO_KEYS.values(), ids=NO_KEYS)
def test_the_api_needs_a_key(api: Api, method: str, path: str, headers: dict[str, str]) -> None:
    raw = {name: value.encode("latin-1") for name, value in headers.items()}
    response = httpx.request(method, f"{api.http.base_url}{path}", headers=raw, json=chat_body(), timeout=240)
    assert response.status_code == 401
    assert response.json()["error"]


@pytest.mark.parametrize("key", API_KEYS)
@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_each_of_the_keys_opens_it(api: Api, key: str, scheme: str) -> None:
    headers = {"Authorization": f"{scheme} {key}"}
    assert httpx.get(f"{api.http.base_url}/v1/models", headers=headers, timeout=240).status_code == 200


def test_models_are_listed(api: Api) -> None:
    listed = api.http.get("/v1/models").json()
    assert listed["object"] == "list"
    [card] = listed["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == (MODEL, "model", 1024)
    assert {"created", "owned_by", "root", "parent", "permission"} <= card.keys()
    assert api.http.get(f"/v1/models/{MODEL}").json()["id"] == MODEL


def test_the_version_is_told(api: Api) -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", api.http.get("/version").json()["version"])


def test_the_load_is_a_number(api: Api) -> None:
    assert isinstance(api.http.get("/load").json()["server_load"], int | float)


METRICS = {
    **dict.fromkeys(
        ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info"), "gauge"
    ),
    **dict.fromkeys(("prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total"), "counter"),
    **dict.fromkeys(("prompt_tokens_total", "generation_tokens_total", "request_success_total"), "counter"),
    **dict.fromkeys(("time_to_first_token_seconds", "inter_token_latency_seconds"), "histogram"),
    **dict.fromkeys(("request_time_per_output_token_seconds", "e2e_request_latency_seconds"), "histogram"),
    **dict.fromkeys(("request_queue_time_seconds", "request_inference_time_seconds"), "histogram"),
    **dict.fromkeys(("request_prefill_time_seconds", "request_decode_time_seconds"), "histogram"),
    **dict.fromkeys(("request_prompt_tokens", "request_generation_tokens"), "histogram"),
    **dict.fromkeys(("request_params_n", "request_params_max_tokens"), "histogram"),
}


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_has_its_name_kind_and_model(api: Api, name: str) -> None:
    api.text(max_tokens=3)
    text = api.http.get("/metrics").text
    assert re.search(rf"^# TYPE vllm:{name} {METRICS[name]}$", text, re.MULTILINE)
    samples = [line for line in text.splitlines() if line.startswith(f"vllm:{name}")]
    assert samples
    if name != "cache_config_info":
        assert any(f'model_name="{MODEL}"' in line for line in samples)


def counter(api: Api, name: str) -> float:
    lines = api.http.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{"))


def test_tokens_are_counted(api: Api) -> None:
    prompts, outputs = counter(api, "vllm:prompt_tokens_total"), counter(api, "vllm:generation_tokens_total")
    usage = api.complete(max_tokens=9, ignore_eos=True)["usage"]
    assert counter(api, "vllm:prompt_tokens_total") == prompts + usage["prompt_tokens"]
    assert counter(api, "vllm:generation_tokens_total") == outputs + 9


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_ends_are_counted_by_their_reason(api: Api, reason: str) -> None:
    def ended() -> float:
        pattern = rf'^vllm:request_success_total{{.*finished_reason="{reason}".*}} (\S+)$'
        found = re.search(pattern, api.http.get("/metrics").text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    before = ended()
    api.chat("What is the capital of France?", max_tokens=60 if reason == "stop" else 2)
    assert ended() == before + 1


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_request_id_of_the_client_is_kept(api: Api, path: str) -> None:
    body = {**chat_body(), "prompt": "a"}
    if path == COMPLETIONS:
        del body["messages"]
    response = api.http.post(path, json=body, headers={"X-Request-Id": "mine-17"})
    assert "mine-17" in response.json()["id"]
    assert "mine-17" in response.headers["x-request-id"]


def test_every_answer_has_a_request_id(api: Api) -> None:
    ids = {api.http.post(CHAT, json=chat_body(max_tokens=1)).headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3


def test_other_origins_are_not_allowed_by_default(api: Api) -> None:
    response = api.http.post(CHAT, json=chat_body(max_tokens=1), headers={"Origin": "http://example.org"})
    assert "access-control-allow-origin" not in response.headers


def test_the_openapi_document_describes_the_endpoints(api: Api) -> None:
    document = api.http.get("/openapi.json").json()
    assert document["openapi"].startswith("3.")
    for path in (COMPLETIONS, CHAT, "/tokenize", "/detokenize"):
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert schema
    assert "get" in document["paths"]["/v1/models"]
