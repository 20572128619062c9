"""One frontend in front of two schedulers, whose models have different tokenizers: each request goes to its own."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from pagoda.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from pagoda_common.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from pagoda_common.config.frontend_config import FrontendConfig
from pagoda_common.errors import QueueFull
from pagoda_common.params.lora_adapter import LoraAdapter
from pagoda_common.rpc.service import connect
from pagoda_common.text.tokenizer import Tokenizer
from pagoda_frontend.http.server import FrontendServer
from tests.checkpoints import write_tokenizer
from tests.fakes.fake_scheduler import FakeScheduler
from tests.fakes.fake_worker import FakeWorker
from tests.harness.scheduler import RunningScheduler, running_scheduler
from tests.service.frontend.harness import Running, until

NUM_TOKENS = 40
SLOW_S = 0.02
BODY = {"prompt": "Once upon a time", "max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0}


@dataclass
class Engine:
    """One model's scheduler with its worker."""

    worker: FakeWorker
    scheduler: RunningScheduler
    stack: AsyncExitStack


@dataclass
class Both:
    """The engines of two models, and where the second one's tokenizer is."""

    tiny: Engine
    spelled: Engine
    directory: Path

    @property
    def models(self) -> tuple[str, str]:
        spelled = {"name": "spelled", "scheduler": self.spelled.scheduler.address, "tokenizer": str(self.directory)}
        tiny = {"name": "tiny", "scheduler": self.tiny.scheduler.address, "tokenizer": "pagoda-tiny"}
        return json.dumps(tiny), json.dumps({**spelled, "aliases": ["letters"]})


async def start_engine(*, vocab_size: int, port: int = 0) -> Engine:
    stack = AsyncExitStack()
    config = EngineConfig(
        cache=CacheConfig(block_size=4),
        scheduler=SchedulerConfig(orphan_lease_s=20.0),
    )
    worker = FakeWorker(vocab_size=vocab_size)
    scheduler = await stack.enter_async_context(running_scheduler(config, port=port))
    await worker.start(scheduler.address)
    stack.push_async_callback(worker.stop)
    await scheduler.until_ready()
    return Engine(worker, scheduler, stack)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("spelled")
    write_tokenizer(directory)
    return directory


@pytest.fixture
async def both(directory: Path) -> AsyncIterator[Both]:
    tiny, spelled = await start_engine(vocab_size=3072), await start_engine(vocab_size=259)
    yield Both(tiny, spelled, directory)
    for engine in (tiny, spelled):
        await engine.stack.aclose()


async def start_frontend(models: tuple[str, ...], **config: Any) -> Running:
    server = FrontendServer(config=FrontendConfig(models=models, port=0, grpc_port=0, **config))
    await server.start()
    http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=240, verify=False)
    return Running(FakeScheduler(), server, http, connect(f"127.0.0.1:{server.grpc_port}"))


@pytest.fixture
async def frontend(both: Both) -> AsyncIterator[Running]:
    running = await start_frontend(both.models)
    await until(lambda: running.server.models.is_ready)
    yield running
    await running.close()
    await running.server.close()


def continued(both: Both, model: str, prompt: str = "Once upon a time", num_tokens: int = NUM_TOKENS) -> str:
    """What the model's worker makes of `prompt`: each token is the last one plus one."""
    source, size = ("pagoda-tiny", 3072) if model == "tiny" else (str(both.directory), 259)
    tokenizer = Tokenizer.load(source)
    last = tokenizer.encode(prompt)[-1]
    return tokenizer.decode([(last + 1 + offset) % size for offset in range(num_tokens)], skip_special_tokens=True)


async def test_each_request_goes_to_the_model_that_it_names(frontend: Running, both: Both) -> None:
    for name, model in (("tiny", "tiny"), ("spelled", "spelled"), ("letters", "spelled")):
        answer = await frontend.complete(**BODY, model=name)
        assert answer["choices"][0]["text"] == continued(both, model)
        assert answer["model"] == name
    assert (await frontend.post("/tokenize", {"model": "tiny", "prompt": "abc"})).json()["count"] < 3
    assert (await frontend.post("/tokenize", {"model": "spelled", "prompt": "abc"})).json()["count"] == 3
    listed = (await frontend.http.get("/v1/models")).json()["data"]
    assert [card["id"] for card in listed] == ["tiny", "spelled", "letters"]
    card = (await frontend.http.get("/v1/models/letters")).json()
    assert (card["id"], card["root"]) == ("letters", "spelled")


async def test_a_request_that_names_none_or_another_is_refused(frontend: Running) -> None:
    body = dict(BODY)
    refused = await frontend.post("/v1/completions", body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
    assert refused.json()["error"]["message"] == "model must be one of tiny, spelled"
    unknown = await frontend.post("/v1/completions", {**body, "model": "other"})
    assert (unknown.status_code, unknown.json()["error"]["message"]) == (404, "The model `other` does not exist.")
    not_text = await frontend.post("/v1/completions", {**body, "model": 5})
    assert (not_text.status_code, not_text.json()["error"]["param"]) == (400, "model")
    broken = await frontend.post("/v1/completions", content=b"{", headers={"content-type": "application/json"})
    assert broken.json()["error"]["message"].startswith("request body is not valid JSON")
    claude = await frontend.post("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4})
    assert claude.json()["error"]["type"] == "invalid_request_error"


def text_of(line: str) -> str:
    """The text in a line of a stream."""
    if not line.startswith("data: {"):
        return ""
    event = json.loads(line.removeprefix("data: "))
    assert "error" not in event, event
    text: str = event["choices"][0]["text"]
    return text


async def streamed(frontend: Running, model: str, seen: dict[str, str], path: str = "/v1/completions") -> None:
    """Read a whole stream; `seen` has the text so far by model."""
    seen[model] = ""
    body = {**BODY, "model": model, "stream": True}
    async with frontend.http.stream("POST", path, json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            seen[model] += text_of(line)


async def test_streams_of_both_continue_while_one_scheduler_is_replaced(frontend: Running, both: Both) -> None:
    both.tiny.worker.delay_s = both.spelled.worker.delay_s = SLOW_S
    seen: dict[str, str] = {}
    reading = [asyncio.create_task(streamed(frontend, model, seen)) for model in ("tiny", "spelled")]
    await until(lambda: len(seen) == 2 and all(seen.values()))
    port = int(both.spelled.scheduler.address.rpartition(":")[2])
    await both.spelled.stack.aclose()
    await until(lambda: not frontend.server.engines[1].is_connected)
    assert (await frontend.http.get("/ready")).status_code == 200
    answer = await frontend.complete(**{**BODY, "max_tokens": 2}, model="tiny")  # at once
    assert answer["usage"]["completion_tokens"] == 2
    both.spelled = await start_engine(vocab_size=259, port=port)
    await asyncio.gather(*reading)
    assert seen == {model: continued(both, model) for model in ("tiny", "spelled")}


async def test_a_dead_model_refuses_its_own_requests_alone(both: Both) -> None:
    frontend = await start_frontend(both.models, recovery_timeout_s=0.2)
    await until(lambda: frontend.server.models.is_ready)
    await both.spelled.stack.aclose()
    await until(lambda: not frontend.server.engines[1].is_connected)
    refused = await frontend.post("/v1/completions", {**BODY, "model": "spelled"})
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert (await frontend.complete(**BODY, model="tiny"))["choices"][0]["text"] == continued(both, "tiny")
    await until(lambda: not frontend.server.models.servings[1].is_ready)
    assert (await frontend.http.get("/ready")).status_code == 200
    await both.tiny.stack.aclose()
    await until(lambda: not frontend.server.models.is_ready)
    reason = (await frontend.http.get("/ready")).json()["error"]["message"]
    assert "tiny: no connection" in reason
    assert "spelled: no connection" in reason
    await frontend.close()
    await frontend.server.close()


async def test_it_is_ready_when_every_model_was_known_once(both: Both) -> None:
    port = int(both.spelled.scheduler.address.rpartition(":")[2])
    await both.spelled.stack.aclose()
    frontend = await start_frontend(both.models)
    await until(lambda: frontend.server.serving.is_ready)
    for path in ("/health", "/ready"):
        refused = await frontend.http.get(path)
        assert refused.status_code == 503
        assert refused.json()["error"]["message"].startswith("spelled: ")
    assert (await frontend.complete(**BODY, model="tiny"))["choices"][0]["text"] == continued(both, "tiny")
    for name in ("spelled", "perhaps-an-adapter-of-it"):
        refused = await frontend.post("/v1/completions", {**BODY, "model": name})
        assert refused.status_code == 503
    assert [card["id"] for card in (await frontend.http.get("/v1/models")).json()["data"]] == ["tiny"]
    both.spelled = await start_engine(vocab_size=259, port=port)
    await until(lambda: frontend.server.models.is_ready)
    for path in ("/health", "/ready"):
        assert (await frontend.http.get(path)).status_code == 200
    assert (await frontend.post("/v1/completions", {**BODY, "model": "perhaps-an-adapter-of-it"})).status_code == 404
    await frontend.close()
    await frontend.server.close()


@pytest.mark.parametrize("again", [{"json": {"model": "spelled"}}, {}, {"json": {}}], ids=["named", "nothing", "empty"])
async def test_a_stream_resumes_at_another_frontend_of_the_same_models(
    frontend: Running, both: Both, again: dict[str, Any]
) -> None:
    both.spelled.worker.delay_s = SLOW_S
    other = await start_frontend(both.models)
    await until(lambda: other.server.models.is_ready)
    text, last_id = "", ""
    body = {**BODY, "model": "spelled", "stream": True}
    async with frontend.http.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            last_id = line.removeprefix("id: ") if line.startswith("id: ") else last_id
            text += text_of(line)
            if len(text) == 10:
                break
        for engine in frontend.server.engines:  # as good as dead: its schedulers hear no more of it
            await engine.close()
    both.spelled.worker.delay_s = 0.0
    async with other.http.stream("POST", "/v1/completions", headers={"last-event-id": last_id}, **again) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            text += text_of(line)
    assert text == continued(both, "spelled")
    lost = {"last-event-id": last_id.replace("cmpl-", "cmpl-x")}
    assert (await other.http.post("/v1/completions", headers=lost, **again)).status_code == 404
    await other.close()
    await other.server.close()


async def test_grpc_goes_by_the_field_model(frontend: Running, both: Both) -> None:
    stub = inference_pb2_grpc.InferenceStub(frontend.channel)
    params = types_pb2.SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)

    def asked(model: str, **fields: Any) -> inference_pb2.GenerateRequest:
        return inference_pb2.GenerateRequest(text="Once upon a time", model=model, sampling_params=params, **fields)

    for model in ("tiny", "spelled"):
        whole = await stub.GenerateUnary(asked(model))
        assert whole.outputs[0].text == continued(both, model)
        assert "".join([part.text async for part in stub.Generate(asked(model))]) == continued(both, model)
        info = await stub.GetModelInfo(inference_pb2.GetModelInfoRequest(model=model))
        assert info.served_model_names[0] == model
    for call in (stub.GenerateUnary(asked("")), stub.GetModelInfo(inference_pb2.GetModelInfoRequest())):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "model must be one of tiny, spelled" in (caught.value.details() or "")
    both.spelled.worker.delay_s = SLOW_S
    stream = aiter(stub.Generate(asked("spelled", request_id="mine")))
    first = await anext(stream)
    assert first.request_id == "mine"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Abort(inference_pb2.AbortGenerationRequest(request_ids=["mine", "other"]))
    assert "'other' is not open at this frontend" in (caught.value.details() or "")
    rest = [part async for part in stream]
    assert rest[-1].finish_reason == types_pb2.FINISH_REASON_ABORT
    load = (await stub.GetServerInfo(inference_pb2.GetServerInfoRequest())).load
    each = [engine.load.num_total_blocks for engine in frontend.server.engines]
    assert load.num_total_blocks == sum(each)


async def test_a_stream_of_grpc_resumes_with_and_without_its_model(frontend: Running, both: Both) -> None:
    both.spelled.worker.delay_s = SLOW_S
    params = types_pb2.SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    other = await start_frontend(both.models)
    await until(lambda: other.server.models.is_ready)
    for model in ("spelled", ""):
        stream = inference_pb2_grpc.InferenceStub(frontend.channel).Generate(
            inference_pb2.GenerateRequest(text="Once upon a time", model="spelled", sampling_params=params)
        )
        first = await stream.read()
        received = [inference_pb2.ReceivedSequence(num_tokens=len(first.token_ids))]
        place = inference_pb2.ResumeFrom(request_id=first.request_id, received=received)
        again = inference_pb2.GenerateRequest(model=model, resume_from=place)
        parts = [part.text async for part in inference_pb2_grpc.InferenceStub(other.channel).Generate(again)]
        assert first.text + "".join(parts) == continued(both, "spelled")
        stream.cancel()
    await other.close()
    await other.server.close()


async def test_answers_are_found_by_id_whatever_model_made_them(frontend: Running, both: Both) -> None:
    asked = {"model": "spelled", "input": "abc", "max_output_tokens": 8}
    made = (await frontend.post("/v1/responses", asked)).json()
    found = (await frontend.http.get(f"/v1/responses/{made['id']}")).json()
    assert (found["id"], found["model"], found["output"]) == (made["id"], "spelled", made["output"])
    next_asked = {"model": "tiny", "input": "d", "previous_response_id": made["id"], "max_output_tokens": 4}
    assert (await frontend.post("/v1/responses", next_asked)).json()["status"] in ("completed", "incomplete")
    assert (await frontend.http.get(f"/v1/responses/{made['id']}/input_items")).json()["data"]
    assert (await frontend.http.delete(f"/v1/responses/{made['id']}")).json()["deleted"]
    assert (await frontend.http.get(f"/v1/responses/{made['id']}")).status_code == 404


async def test_metrics_of_both_are_one_text(frontend: Running) -> None:
    await frontend.complete(**BODY, model="tiny")
    await frontend.complete(**BODY, model="spelled")
    text = (await frontend.http.get("/metrics")).text
    for model in ("tiny", "spelled"):
        assert f'vllm:generation_tokens_total{{model_name="{model}",engine="0"}} {NUM_TOKENS}.0' in text
        assert f'pagoda:scheduler_connected{{model_name="{model}"}} 1.0' in text
    helps = [line.split()[2] for line in text.splitlines() if line.startswith("# HELP")]
    assert len(helps) == len(set(helps))
    samples = [line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")]
    assert len(samples) == len(set(samples))
    assert text.count("python_info{") == 1


async def test_operators_name_the_model_in_the_query(both: Both) -> None:
    frontend = await start_frontend(both.models, enable_sleep_mode=True)
    await until(lambda: frontend.server.models.is_ready)
    refused = await frontend.post("/sleep", {})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
    assert (await frontend.post("/sleep?model=spelled", {})).status_code == 200
    for model, sleeps in (("tiny", False), ("spelled", True)):
        asked = await frontend.http.get(f"/is_sleeping?model={model}")
        assert asked.json() == {"is_sleeping": sleeps}
    assert (both.tiny.worker.sleep_level, both.spelled.worker.sleep_level) == (0, 1)
    assert (await frontend.complete(**BODY, model="tiny"))["choices"][0]["text"] == continued(both, "tiny")
    described = (await frontend.http.get("/openapi.json")).json()["paths"]
    for path, method in (("/sleep", "post"), ("/is_sleeping", "get"), ("/reload_weights", "post")):
        assert {"name": "model", "in": "query", "required": True, "schema": {"type": "string"}} in described[path][
            method
        ]["parameters"]
    assert (await frontend.post("/wake_up?model=letters", {})).status_code == 200
    assert (await frontend.complete(**BODY, model="spelled"))["choices"][0]["text"] == continued(both, "spelled")
    await frontend.close()
    await frontend.server.close()


async def test_adapters_lead_to_their_model(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    frontend = await start_frontend(both.models, enable_runtime_lora_updating=True, allowed_weights=("*",))
    await until(lambda: frontend.server.models.is_ready)
    first, second = frontend.server.engines
    added: list[LoraAdapter] = []

    async def add(adapter: LoraAdapter, *, load_inplace: bool) -> None:
        added.append(adapter)
        second._loras[adapter.name] = adapter

    monkeypatch.setattr(second, "add_lora", add)
    load = "/v1/load_lora_adapter?model=spelled"
    assert (await frontend.post(load, {"lora_name": "fine", "lora_path": "/a"})).status_code == 200
    assert [adapter.name for adapter in added] == ["fine"]
    assert (await frontend.post("/tokenize", {"model": "fine", "prompt": "abc"})).json()["count"] == 3
    cards = {card["id"]: card["parent"] for card in (await frontend.http.get("/v1/models")).json()["data"]}
    assert cards == {"tiny": None, "spelled": None, "letters": None, "fine": "spelled"}
    for name, other in (("tiny", "tiny"), ("fine", "spelled")):
        at = "/v1/load_lora_adapter?model=" + ("spelled" if name == "tiny" else "tiny")
        refused = await frontend.post(at, {"lora_name": name, "lora_path": "/a"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "lora_name")
        assert refused.json()["error"]["message"] == f"lora_name is '{name}', which is a name of the model {other}"
    first._loras["fine"] = added[0]
    refused = await frontend.post("/v1/completions", {**BODY, "model": "fine"})
    message = "model is 'fine', an adapter of tiny and spelled: unload one of them"
    assert (refused.status_code, refused.json()["error"]["message"]) == (400, message)
    await frontend.close()
    await frontend.server.close()


async def test_the_status_page_shows_one_model_at_a_time(frontend: Running) -> None:
    await frontend.complete(**BODY, model="spelled")
    for query, name in (("", "tiny"), ("?model=spelled", "spelled"), ("?model=letters", "spelled")):
        facts = (await frontend.http.get(f"/status/facts{query}")).json()
        assert (facts["several"], facts["models"][0]) == (["tiny", "spelled"], name)
        assert (await frontend.http.get(f"/status/history{query}")).status_code == 200
    alone = (await frontend.http.get("/metrics?model=letters")).text
    assert f'vllm:generation_tokens_total{{engine="0",model_name="spelled"}} {NUM_TOKENS}.0' in alone
    assert "tiny" not in alone
    for path in ("/metrics", "/status/facts", "/status/history"):
        assert (await frontend.http.get(f"{path}?model=other")).status_code == 404
    ended = (await frontend.http.get("/status/requests")).json()["ended"]
    assert [call["output_tokens"] for call in ended] == [NUM_TOKENS]


async def test_load_is_reported_for_the_model_of_a_call_or_for_all(frontend: Running) -> None:
    for number, engine in enumerate(frontend.server.engines, start=1):
        engine._load = types_pb2.EngineLoad(is_ready=True, num_waiting_reqs=number, num_total_blocks=8)
    asked = {"endpoint-load-metrics-format": "TEXT"}
    for path, body, waiting in (
        ("/tokenize", {"model": "tiny", "prompt": "a"}, 1),
        ("/tokenize", {"model": "spelled", "prompt": "a"}, 2),
        ("/tokenize", {"prompt": "a"}, 3),
    ):
        answer = await frontend.http.post(path, json=body, headers=asked)
        assert f"num_requests_waiting={waiting}.0" in answer.headers["endpoint-load-metrics"]


async def test_a_drain_waits_for_the_streams_of_all_models(frontend: Running, both: Both) -> None:
    both.tiny.worker.delay_s = both.spelled.worker.delay_s = SLOW_S
    seen: dict[str, str] = {}
    reading = [asyncio.create_task(streamed(frontend, model, seen)) for model in ("tiny", "spelled")]
    await until(lambda: len(seen) == 2 and all(seen.values()))
    assert (await frontend.http.get("/load")).json() == {"server_load": 2}
    draining = asyncio.create_task(frontend.server.drain(240.0))
    await until(lambda: frontend.server.models.is_draining)
    for name in ("tiny", "spelled", "other", "letters"):
        refused = await frontend.post("/v1/completions", {**BODY, "model": name})
        assert (refused.status_code, refused.json()["error"]["message"]) == (503, "the frontend is shutting down")
    await asyncio.gather(*reading)
    assert seen == {model: continued(both, model) for model in ("tiny", "spelled")}
    await draining


async def test_the_bound_of_a_body_is_one_for_all(both: Both) -> None:
    frontend = await start_frontend(both.models, max_request_body_bytes=2000)
    await until(lambda: frontend.server.models.is_ready)
    refused = await frontend.post("/v1/completions", {**BODY, "model": "spelled", "prompt": "a" * 2000})
    assert refused.status_code == 413
    assert (await frontend.complete(**BODY, model="spelled"))["usage"]["completion_tokens"] == NUM_TOKENS
    assert frontend.server.serving.held_memory.num_bytes == 0
    memory = {id(serving.held_memory) for serving in frontend.server.models.servings}
    assert len(memory) == 1
    await frontend.close()
    await frontend.server.close()


async def test_neither_prefixes_nor_queues_are_shared(both: Both) -> None:
    frontend = await start_frontend(both.models, enable_prompt_tokens_details=True)
    await until(lambda: frontend.server.models.is_ready)

    async def cached(model: str) -> int:
        body = {"model": model, "prompt": list(range(5, 25)), "max_tokens": 1}  # the same ids for both
        usage = (await frontend.post("/v1/completions", body)).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert [await cached(model) for model in ("tiny", "spelled", "tiny", "spelled")] == [0, 0, 16, 16]
    both.spelled.worker.delay_s = SLOW_S
    full = QueueFull("max_num_queued_reqs", retry_after_s=1)
    with pytest.MonkeyPatch.context() as patch:

        def refuse(*_: Any, **__: Any) -> None:
            raise full

        patch.setattr(frontend.server.engines[1], "submit", refuse)
        refused = await frontend.post("/v1/completions", {**BODY, "model": "spelled"})
        assert refused.status_code == 503
        assert (await frontend.complete(**BODY, model="tiny"))["choices"][0]["text"] == continued(both, "tiny")
    rejections = (await frontend.http.get("/metrics")).text
    assert 'vllm:admission_rejections_total{model_name="tiny",reason="max_num_queued_reqs"} 0.0' in rejections
    await frontend.close()
    await frontend.server.close()
