"""Health, readiness, models, metrics, keys, and the way up and down."""

import asyncio
import contextlib
import re
from typing import Any

import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from pagoda_common.process.children import free_port
from tests.fakes.fake_scheduler import FakeScheduler, serve_fake_scheduler
from tests.service.frontend.harness import MODEL, Running, frontend_at, running_frontend, until


async def test_live_ready_version_models_and_load(frontend: Running) -> None:
    http = frontend.http
    for path in ("/live", "/health", "/ready", "/ping", "/version", "/load"):
        assert (await http.get(path)).status_code == 200
    assert (await http.post("/ping")).status_code == 200
    assert (await http.get("/load")).json() == {"server_load": 0}
    models = await frontend.openai.models.list()
    assert [model.id for model in models.data] == [MODEL, "alias"]
    assert (await frontend.openai.models.retrieve("alias")).id == "alias"
    card = (await http.get("/v1/models")).json()["data"][0]
    assert (card["max_model_len"], card["owned_by"], card["parent"]) == (512, "pagoda", None)


async def test_it_is_live_but_not_ready_while_the_engine_loads() -> None:
    fake = FakeScheduler()
    fake.load.is_ready = False
    fake.load.not_ready_reason = "the worker loads weights"
    async with serve_fake_scheduler(fake) as address, frontend_at(address, fake) as running:
        await until(lambda: running.server.engine.is_connected)
        assert (await running.http.get("/live")).status_code == 200
        for response in (
            await running.http.get("/health"),
            await running.http.get("/ping"),
            await running.http.post("/ping"),
            await running.http.get("/ready"),
            await running.http.get("/v1/models"),
            await running.post("/v1/completions", {"prompt": [5]}),
            await running.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ):
            assert response.status_code == 503
            assert response.json()["error"]["message"] == "the worker loads weights"
            assert response.headers["retry-after"]
        fake.set_ready(True)
        await until(lambda: running.server.serving.is_ready)
        await running.complete()
        assert (await running.http.get("/health")).status_code == 200
        fake.set_ready(False, "the worker is lost")
        await until(lambda: not running.server.serving.is_ready)
        assert (await running.http.get("/ready")).status_code == 503
        for path in ("/health", "/ping", "/live"):
            assert (await running.http.get(path)).status_code == 200, "it has served before"


async def test_it_comes_up_before_its_scheduler() -> None:
    port = free_port()
    fake = FakeScheduler()
    async with contextlib.AsyncExitStack() as later, frontend_at(f"127.0.0.1:{port}", fake) as running:
        assert (await running.http.get("/live")).status_code == 200
        assert (await running.http.get("/health")).status_code == 503
        assert (await running.http.get("/ready")).status_code == 503
        assert (await running.http.get("/metrics")).status_code == 200
        await later.enter_async_context(serve_fake_scheduler(fake, port=port))
        await until(lambda: running.server.serving.is_ready)
        await running.complete()


async def test_it_learns_model_and_tokenizer_from_the_scheduler() -> None:
    fake = FakeScheduler()
    fake.model_info.model = "pagoda-tiny"
    async with running_frontend(fake, tokenizer=None, served_model_name=()) as running:
        assert [model.id for model in (await running.openai.models.list()).data] == ["pagoda-tiny"]
        await running.complete(model="pagoda-tiny", prompt="hello")


async def test_a_request_that_meets_a_lost_engine_waits_for_it(frontend: Running) -> None:
    frontend.fake.set_ready(False, "no worker")
    await until(lambda: not frontend.server.serving.is_ready)
    assert (await frontend.http.get("/ready")).status_code == 503
    asked = asyncio.create_task(frontend.complete(max_tokens=2))
    await asyncio.sleep(0.05)
    assert not asked.done()
    frontend.fake.set_ready(True)
    assert (await asked)["usage"]["completion_tokens"] == 2


async def test_a_restarted_scheduler_is_a_pause_not_an_error(frontend: Running) -> None:
    frontend.fake.step_s = 0.002
    asked = asyncio.create_task(frontend.complete(prompt=[5], max_tokens=60, return_token_ids=True))
    await until(lambda: frontend.fake.num_open_sequences == 1)
    await asyncio.sleep(0.03)
    frontend.fake.restart()
    assert (await asked)["choices"][0]["token_ids"] == frontend.fake.tokens([5], 60)


async def test_a_frontend_stays_ready_while_its_scheduler_comes_back() -> None:
    port = free_port()
    fake = FakeScheduler()
    async with contextlib.AsyncExitStack() as after, frontend_at(f"127.0.0.1:{port}", fake) as running:
        async with serve_fake_scheduler(fake, port=port):
            await until(lambda: running.server.serving.is_ready)
            await running.complete()
            watch = health_pb2_grpc.HealthStub(running.channel).Watch(health_pb2.HealthCheckRequest())
            while (await watch.read()).status != health_pb2.HealthCheckResponse.SERVING:
                pass
        changed = asyncio.create_task(watch.read())
        await until(lambda: not running.server.engine.is_connected)
        assert (await running.http.get("/ready")).status_code == 200
        waiting = asyncio.create_task(running.complete(max_tokens=2))
        fake.set_ready(False, "no worker has registered")
        await after.enter_async_context(serve_fake_scheduler(fake, port=port))
        await until(lambda: running.server.engine.is_connected)
        assert (await running.http.get("/ready")).status_code == 200, "workers register with the new one"
        fake.set_ready(True)
        assert (await waiting)["usage"]["completion_tokens"] == 2
        assert not changed.done(), "gRPC says the same as /ready"
        fake.set_ready(False, "no worker")
        await until(lambda: not running.server.serving.is_ready)
        assert (await changed).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()


async def test_a_scheduler_that_stays_away_ends_readiness_and_requests() -> None:
    port = free_port()
    fake = FakeScheduler()
    async with frontend_at(f"127.0.0.1:{port}", fake, recovery_timeout_s=0.2) as running:
        async with serve_fake_scheduler(fake, port=port):
            await until(lambda: running.server.serving.is_ready)
        await until(lambda: not running.server.serving.is_ready)
        answer = await running.http.get("/ready")
        assert answer.status_code == 503
        assert "no connection to the scheduler" in answer.json()["error"]["message"]
        refused = await running.post("/v1/completions", {"prompt": [5]})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")


async def test_a_frontend_that_never_served_is_not_ready_when_its_scheduler_is_lost() -> None:
    port = free_port()
    fake = FakeScheduler()
    fake.load.is_ready = False
    async with frontend_at(f"127.0.0.1:{port}", fake) as running:
        async with serve_fake_scheduler(fake, port=port):
            await until(lambda: running.server.engine.is_connected)
        await until(lambda: not running.server.engine.is_connected)
        assert running.server.engine.lost_for_s is None
        assert (await running.http.get("/ready")).status_code == 503


async def test_draining_finishes_open_streams_and_refuses_new_ones(frontend: Running) -> None:
    frontend.fake.step_s = 0.005
    open_stream = asyncio.create_task(frontend.events("/v1/completions", prompt=[5], max_tokens=80))
    await until(lambda: frontend.fake.num_open_sequences == 1)
    draining = asyncio.create_task(frontend.server.drain(20))
    await asyncio.sleep(0.02)
    assert (await frontend.http.get("/health")).status_code == 200
    assert (await frontend.http.get("/ready")).status_code == 503
    assert (await frontend.post("/v1/completions", {"prompt": [5]})).status_code == 503
    events = await open_stream
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    await draining
    with pytest.raises(httpx.ConnectError):
        await frontend.http.get("/health")


async def test_what_does_not_finish_in_time_ends_with_an_error(frontend: Running) -> None:
    frontend.fake.step_s = 0.02
    open_stream = asyncio.create_task(frontend.events("/v1/completions", prompt=[5], max_tokens=400))
    await until(lambda: frontend.fake.num_open_sequences == 1)
    await asyncio.sleep(0.1)
    await frontend.server.drain(0.1)
    events = await open_stream
    assert events[-1] == "[DONE]"
    assert events[-2]["error"]["code"] == 503


async def test_keys_guard_the_api_and_leave_probes_open() -> None:
    async with running_frontend(api_key=("first", "second")) as running:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "first"}):
            for path in ("/v1/models", "/v1/completions"):
                response = await running.http.get(path, headers=headers)
                assert response.status_code == 401
                assert response.json() == {"error": "Unauthorized"}
        for path in ("/live", "/health", "/ready", "/metrics", "/version", "/docs", "/redoc"):
            assert (await running.http.get(path)).status_code == 200
        for key in ("first", "second"):
            headers = {"Authorization": f"Bearer {key}"}
            assert (await running.http.get("/v1/models", headers=headers)).status_code == 200


async def test_origins_are_allowed_only_when_named(frontend: Running) -> None:
    headers = {"Origin": "https://example.org", "Access-Control-Request-Method": "POST"}
    response = await frontend.http.options("/v1/completions", headers=headers)
    assert "access-control-allow-origin" not in response.headers
    async with running_frontend(allowed_origins=("https://example.org",), api_key=("secret",)) as running:
        response = await running.http.options("/v1/completions", headers=headers)
        assert response.headers["access-control-allow-origin"] == "https://example.org"


async def test_tokens_of_texts_and_conversations_and_back(frontend: Running) -> None:
    plain = (await frontend.post("/tokenize", {"prompt": "hello 🙂", "return_token_strs": True})).json()
    assert plain["count"] == len(plain["tokens"]) == len(plain["token_strs"])
    assert plain["token_strs"][0] == "he"
    assert any(piece.startswith("Ġ") for piece in plain["token_strs"])  # as the vocabulary writes them
    assert plain["max_model_len"] == 512
    text = (await frontend.post("/detokenize", {"tokens": plain["tokens"]})).json()
    assert text == {"prompt": "hello 🙂"}
    messages = [{"role": "user", "content": "hello"}]
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    bare, with_tools = [
        (await frontend.post("/tokenize", {"messages": messages, **more})).json() for more in ({}, {"tools": [tool]})
    ]
    assert bare["token_strs"] is None
    shown = (await frontend.post("/tokenize", {"messages": messages, "return_token_strs": True})).json()["token_strs"]
    assert "".join(shown).startswith("<|im_start|>user\nhello<|im_end|>")
    assert with_tools["count"] > bare["count"]
    for body in ({}, {"prompt": "x", "messages": messages}, {"messages": messages, "chat_template": "{{ 1 }}"}):
        assert (await frontend.post("/tokenize", body)).status_code == 400


async def test_invocations_lead_to_conversations_and_completions(frontend: Running) -> None:
    chat = await frontend.post("/invocations", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1})
    assert chat.json()["object"] == "chat.completion"
    completion = await frontend.post("/invocations", {"prompt": [5], "max_tokens": 1})
    assert completion.json()["object"] == "text_completion"
    streamed = await frontend.post("/invocations", {"prompt": [5], "max_tokens": 1, "stream": True})
    assert streamed.text.endswith("data: [DONE]\n\n")
    embedding = await frontend.post("/invocations", {"input": "x"})
    assert embedding.json()["data"][0]["object"] == "embedding"
    refused = await frontend.post("/invocations", {"output": "x"})
    assert refused.status_code == 400


@pytest.mark.parametrize("page", ["/docs", "/redoc"])
async def test_the_pages_about_the_api_load_nothing_from_elsewhere(page: str) -> None:
    async with running_frontend(root_path="/behind/a/proxy") as running:
        response = await running.http.get(page)
        assert response.status_code == 200
        links = re.findall(r"(?:src|href)=\"([^\"]+)\"", response.text)
        assert len(links) >= 2
        assert [link for link in links if not link.startswith("/behind/a/proxy/docs/assets/")] == []
        assert "http://" not in response.text.replace("http://www.w3.org/", "")
        assert "https://" not in response.text
        assert "/behind/a/proxy/openapi.json" in response.text
        for link in links:
            asset = await running.http.get(link.removeprefix("/behind/a/proxy"))
            assert asset.status_code == 200
            assert len(asset.content) > 1000


async def test_what_is_served_only_when_asked_for(frontend: Running) -> None:
    assert (await frontend.http.get("/tokenizer_info")).status_code == 404
    assert (await frontend.http.get("/docs")).status_code == 200
    async with running_frontend(enable_tokenizer_info_endpoint=True, disable_fastapi_docs=True) as running:
        info = (await running.http.get("/tokenizer_info")).json()
        assert "messages" in info["chat_template"]
        assert info["eos_token"]
        for path in ("/docs", "/redoc", "/openapi.json"):
            assert (await running.http.get(path)).status_code == 404


async def test_the_template_in_use_is_the_one_that_is_told() -> None:
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    async with running_frontend(enable_tokenizer_info_endpoint=True, chat_template=template) as running:
        assert (await running.http.get("/tokenizer_info")).json()["chat_template"] == template
        body = {"messages": [{"role": "user", "content": "hello"}], "add_special_tokens": False}
        shown = (await running.post("/tokenize", body)).json()
        text = (await running.post("/detokenize", {"tokens": shown["tokens"]})).json()
        assert text == {"prompt": "hello"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_an_answer_reports_the_load_to_who_asks(frontend: Running, path: str, stream: bool) -> None:
    frontend.fake.load.num_used_blocks, frontend.fake.load.num_waiting_reqs = 25, 3
    await frontend.complete()  # its end brings the load
    body: dict[str, Any] = (
        {"prompt": [5]} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    )
    body |= {"max_tokens": 1, "stream": stream}
    for form, wanted in (
        ("TEXT", "TEXT named_metrics.kv_cache_usage_perc=0.25, named_metrics.num_requests_waiting=3.0"),
        ("json", 'JSON {"named_metrics": {"kv_cache_usage_perc": 0.25, "num_requests_waiting": 3.0}}'),
        ("BIN", None),
        ("", None),
    ):
        response = await frontend.http.post(path, json=body, headers={"endpoint-load-metrics-format": form})
        assert (response.status_code, response.headers.get("endpoint-load-metrics")) == (200, wanted), form


async def test_metrics_have_vllms_names_and_labels(frontend: Running) -> None:
    frontend.fake.load.num_used_blocks = 25
    frontend.fake.load.prefix_cache_queries = 7
    frontend.fake.load.num_waiting_reqs = 5
    frontend.fake.load.num_worker_losses = 2
    frontend.fake.num_cached_tokens = 1
    frontend.fake.queue_ns = 2_000_000_000
    await frontend.complete(prompt=[5, 6], max_tokens=4)
    frontend.fake.num_cached_tokens = 0
    await frontend.events("/v1/completions", prompt=[5], max_tokens=3)
    frontend.fake.step_s = 0.01
    async with frontend.http.stream(
        "POST", "/v1/completions", json={"prompt": [5], "max_tokens": 400, "stream": True}
    ) as response:
        await anext(response.aiter_lines())
    await until(lambda: frontend.server.serving.num_open == 0)
    text = (await frontend.http.get("/metrics")).text
    samples = {}
    labels = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            label = next(
                (sample.labels[name] for name in ("finished_reason", "reason", "source") if name in sample.labels), None
            )
            samples[sample.name, label] = sample.value
            labels[sample.name] = set(sample.labels)
    for name in ("num_requests_running", "num_requests_waiting"):
        assert labels[f"vllm:{name}"] == {"model_name", "engine"}
    assert samples["vllm:kv_cache_usage_perc", None] == 0.25
    assert samples["vllm:prefix_cache_queries_total", None] == 7
    assert samples["vllm:prompt_tokens_total", None] == 4
    assert samples["vllm:request_num_preemptions_count", None] == 2
    assert samples["vllm:iteration_tokens_total_count", None] == 3  # the scheduler's own, passed on
    assert samples["vllm:generation_tokens_total", None] >= 8
    assert samples["vllm:request_success_total", "length"] == 2
    assert samples["vllm:request_success_total", "abort"] == 1
    assert samples["vllm:prompt_tokens_cached_total", None] == 1
    assert samples["vllm:prompt_tokens_by_source_total", "local_cache_hit"] == 1
    assert samples["vllm:prompt_tokens_by_source_total", "local_compute"] == 3
    assert samples["vllm:num_requests_waiting_by_reason", "capacity"] == samples["vllm:num_requests_waiting", None] == 5
    assert samples["vllm:num_requests_waiting_by_reason", "deferred"] == 0
    assert samples["vllm:request_prefill_kv_computed_tokens_sum", None] == 2
    assert samples["vllm:request_max_num_generation_tokens_sum", None] == 7
    assert samples["vllm:request_queue_time_seconds_sum", None] == pytest.approx(4)
    assert samples["pagoda:worker_groups", None] == 1
    assert samples["pagoda:worker_losses_total", None] == 2
    assert samples["pagoda:engine_steps_total", None] >= 7
    assert labels["vllm:admission_rejections_total"] == {"model_name", "reason"}
    assert labels["vllm:cache_config_info"] == {"block_size", "num_gpu_blocks", "engine"}
    for name in (
        *("time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds"),
        *("e2e_request_latency_seconds", "request_prompt_tokens", "request_generation_tokens"),
        *("request_params_n", "request_params_max_tokens", "request_max_num_generation_tokens"),
        *("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
        *("request_inference_time_seconds", "request_prefill_kv_computed_tokens"),
    ):
        assert samples[f"vllm:{name}_count", None] >= 2, name
        assert labels[f"vllm:{name}_bucket"] == {"model_name", "engine", "le"}
