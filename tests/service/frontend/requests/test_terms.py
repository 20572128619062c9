"""Deadlines, tenants and priorities over HTTP, and a full queue of a real scheduler."""

import asyncio
import hashlib

import grpc
import pytest
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2, status_pb2

from pagoda.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from pagoda_common.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from tests.fakes.fake_scheduler import FakeScheduler
from tests.fakes.fake_worker import FakeWorker
from tests.harness.scheduler import running_scheduler
from tests.service.frontend.harness import Running, frontend_at, running_frontend, until

COMPLETIONS = "/v1/completions"
ENDLESS = {"prompt": [5], "max_tokens": 400, "ignore_eos": True}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_deadline_before_any_byte_is_a_504(frontend: Running, stream: bool) -> None:
    frontend.fake.is_paused = True
    response = await frontend.post(COMPLETIONS, {**ENDLESS, "stream": stream, "timeout": 0.1})
    assert response.status_code == 504
    assert response.json()["error"]["type"] == "TimeoutError"
    assert 0 < frontend.fake.submits[-1].timeout_s <= 0.1
    await until(lambda: frontend.fake.num_open_sequences == 0)


async def test_a_deadline_in_a_stream_is_an_event(frontend: Running) -> None:
    frontend.fake.step_s = 0.02
    events = await frontend.events(COMPLETIONS, **ENDLESS, timeout=0.2)
    assert len(events) > 2
    assert events[-2]["error"]["code"] == 504
    assert events[-1] == "[DONE]"
    await until(lambda: frontend.fake.num_open_sequences == 0)


async def test_a_deadline_holds_while_the_engine_is_away(frontend: Running) -> None:
    frontend.fake.set_ready(False, "no worker")
    await until(lambda: not frontend.server.serving.is_ready)
    response = await frontend.post(COMPLETIONS, {**ENDLESS, "timeout": 0.1})
    assert response.status_code == 504


async def test_headers_go_before_the_body(frontend: Running) -> None:
    headers = {"X-Request-Timeout": "20", "X-Vllm-Priority": "-3"}
    await frontend.post(COMPLETIONS, {"prompt": [5], "timeout": 1, "priority": 7}, headers=headers)
    submitted = frontend.fake.submits[-1]
    assert 19 < submitted.timeout_s <= 20
    assert submitted.priority == -3
    for name, value, field in (("X-Request-Timeout", "inf", "timeout"), ("X-Vllm-Priority", "high", "priority")):
        response = await frontend.post(COMPLETIONS, {"prompt": [5]}, headers={name: value})
        assert (response.status_code, response.json()["error"]["param"]) == (400, field)


async def test_tenants_are_digests_of_keys_or_what_callers_say(frontend: Running) -> None:
    await frontend.post(COMPLETIONS, {"prompt": [5]}, headers={"X-Tenant-Id": "blue"})
    assert frontend.fake.submits[-1].tenant == "blue"
    stub = inference_pb2_grpc.InferenceStub(frontend.channel)
    await stub.GenerateUnary(inference_pb2.GenerateRequest(text="x"), metadata=(("x-tenant-id", "green"),))
    assert frontend.fake.submits[-1].tenant == "green"
    async with running_frontend(FakeScheduler(), api_key=("secret",)) as keyed:
        headers = {"X-Tenant-Id": "blue", "Authorization": "Bearer secret"}
        assert (await keyed.post(COMPLETIONS, {"prompt": [5]}, headers=headers)).status_code == 200
        assert keyed.fake.submits[-1].tenant == hashlib.sha256(b"secret").hexdigest()[:16]


async def test_a_client_is_the_key_or_the_address_whatever_callers_say(frontend: Running) -> None:
    async def clients_of(running: Running, shown: dict[str, str]) -> list[str]:
        answer = await running.post(COMPLETIONS, {"prompt": [5]}, headers={"X-Forwarded-For": "8.8.8.8", **shown})
        assert answer.status_code == 200
        stub = inference_pb2_grpc.InferenceStub(running.channel)
        metadata = [(name.lower(), value) for name, value in shown.items()]
        await stub.GenerateUnary(inference_pb2.GenerateRequest(text="x"), metadata=metadata)
        return [submit.client for submit in running.fake.submits[-2:]]

    assert await clients_of(frontend, {"X-Tenant-Id": "blue"}) == ["127.0.0.1"] * 2
    for proxies, client in (("127.0.0.1", "8.8.8.8"), ("10.0.0.0/8", "127.0.0.1"), ("*", "8.8.8.8")):
        async with running_frontend(FakeScheduler(), forwarded_allow_ips=(proxies,)) as proxied:
            assert await clients_of(proxied, {}) == [client, "127.0.0.1"]
    async with running_frontend(FakeScheduler(), api_key=("secret",)) as keyed:
        expected = hashlib.sha256(b"secret").hexdigest()[:16]
        assert await clients_of(keyed, {"Authorization": "Bearer secret"}) == [expected] * 2


async def test_two_keys_of_the_messages_api_are_two_tenants() -> None:
    body = {"model": "tiny", "max_tokens": 3, "messages": [{"role": "user", "content": "Hi"}]}
    async with running_frontend(FakeScheduler(), api_key=("first", "second")) as keyed:
        for key in ("first", "second"):
            answer = await keyed.post("/v1/messages", body, headers={"x-api-key": key})
            assert answer.status_code == 200, answer.text
            assert keyed.fake.submits[-1].tenant == hashlib.sha256(key.encode()).hexdigest()[:16]
        assert (await keyed.post("/v1/messages", body, headers={"x-api-key": "third"})).status_code == 401
        # Elsewhere that header opens nothing.
        assert (await keyed.post(COMPLETIONS, {"prompt": [5]}, headers={"x-api-key": "first"})).status_code == 401


@pytest.mark.parametrize(("num_places", "status"), [(1, 503), (2, 429)])
async def test_a_full_queue_and_one_clients_part_of_it_are_told_apart(num_places: int, status: int) -> None:
    config = EngineConfig(
        cache=CacheConfig(block_size=4), scheduler=SchedulerConfig(max_num_seqs=1, max_num_queued_reqs=num_places)
    )
    worker = FakeWorker(vocab_size=3072)
    worker.delay_s = 0.02
    async with running_scheduler(config) as scheduler:
        await worker.start(scheduler.address)
        await scheduler.until_ready()
        async with frontend_at(scheduler.address, FakeScheduler()) as running:
            await until(lambda: running.server.serving.is_ready)
            open_requests = []
            for _ in range(2):
                open_requests.append(asyncio.create_task(running.post(COMPLETIONS, ENDLESS)))
                await asyncio.sleep(0.3)
            response = await running.post(COMPLETIONS, ENDLESS)
            assert (response.status_code, response.headers["Retry-After"]) == (status, "1"), response.text
            stub = inference_pb2_grpc.InferenceStub(running.channel)
            params = types_pb2.SamplingParams(max_tokens=10)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.GenerateUnary(inference_pb2.GenerateRequest(text="x", sampling_params=params))
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            trailers = dict(caught.value.trailing_metadata() or ())
            told = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
            retry = error_details_pb2.RetryInfo()
            assert [detail.Unpack(retry) for detail in told.details] == [True]
            assert retry.retry_delay == duration_pb2.Duration(seconds=1)
            metrics = (await running.http.get("/metrics")).text
            reason = "max_num_queued_reqs" if status == 503 else "max_queued_share"
            assert f'vllm:admission_rejections_total{{model_name="tiny",reason="{reason}"}} 2.0' in metrics
            for task in open_requests:
                task.cancel()
        await worker.stop()


async def test_two_keys_of_anthropic_clients_are_two_tenants() -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    async with running_frontend(api_key=("first", "second")) as frontend:
        for key in ("first", "second"):
            response = await frontend.post("/v1/messages", body, headers={"x-api-key": key})
            assert response.status_code == 200, response.text
        await frontend.post("/v1/messages", body, headers={"Authorization": "Bearer second"})
        tenants = [submitted.tenant for submitted in frontend.fake.submits]
    assert tenants == [hashlib.sha256(key.encode()).hexdigest()[:16] for key in ("first", "second", "second")]
