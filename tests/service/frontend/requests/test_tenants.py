"""Two tenants behind one proxy: what each has started is its own, whatever other headers a call has."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from pagoda.v1 import inference_pb2, inference_pb2_grpc
from pagoda_common.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from pagoda_common.rpc.bearer import key_id
from tests.fakes.fake_scheduler import FakeScheduler
from tests.fakes.fake_worker import FakeWorker
from tests.harness.scheduler import running_scheduler
from tests.service.frontend.harness import Running, frontend_at, running_frontend, until

KEYS = ("key-of-a", "key-of-b")
PROXY = ("Authorization", "Basic cHJveHk6c2VjcmV0")
"""What a proxy that asks for a password of its own leaves in every call."""
MESSAGES = "/v1/messages"
BODY: dict[str, Any] = {"max_tokens": 400, "messages": [{"role": "user", "content": "hi"}], "ignore_eos": True}


@pytest.fixture
async def keyed() -> AsyncIterator[Running]:
    async with running_frontend(api_key=KEYS) as running:
        yield running


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(
    "others",
    [
        [PROXY],
        [("Authorization", "Bearer of-the-proxy")],
        [PROXY, ("Authorization", "Bearer junk"), ("X-Tenant-Id", "someone")],
        [("authorization", "")],
    ],
)
async def test_the_tenant_is_the_key_that_opened(keyed: Running, key: str, others: list[tuple[str, str]]) -> None:
    by_header = [[*others, ("X-Api-Key", key)], [("x-api-key", key), *others]]
    by_token = [[*others, ("Authorization", f"Bearer {key}")], [("authorization", f"bearer  {key}"), *others]]
    for headers in (*by_header, *by_token):
        answer = await keyed.http.post(MESSAGES, json={**BODY, "max_tokens": 2}, headers=headers)
        assert answer.status_code == 200, answer.text
        assert keyed.fake.submits[-1].tenant == key_id(key)
    for headers in by_token:
        answer = await keyed.http.post("/v1/completions", json={"prompt": [5], "max_tokens": 2}, headers=headers)
        assert answer.status_code == 200, answer.text
        assert keyed.fake.submits[-1].tenant == key_id(key)


async def test_the_same_over_grpc(keyed: Running) -> None:
    stub: Any = inference_pb2_grpc.InferenceStub(keyed.channel)
    proxy = ("authorization", PROXY[1])
    for key in KEYS:
        shown = ("authorization", f"bearer {key}")
        for metadata in ((proxy, shown), (shown, proxy), (shown, ("x-tenant-id", "someone"), ("x-api-key", "junk"))):
            await stub.GenerateUnary(inference_pb2.GenerateRequest(text="x"), metadata=metadata)
            assert keyed.fake.submits[-1].tenant == key_id(key)


async def test_junk_in_another_header_makes_no_tenant(keyed: Running) -> None:
    for number in range(5):
        headers = {"Authorization": f"Digest junk-{number}", "x-api-key": KEYS[0], "X-Tenant-Id": f"t{number}"}
        assert (await keyed.post(MESSAGES, {**BODY, "max_tokens": 1}, headers=headers)).status_code == 200
    assert {submit.tenant for submit in keyed.fake.submits} == {key_id(KEYS[0])}


@pytest.fixture
async def frontends() -> AsyncIterator[tuple[Running, Running]]:
    """Two frontends with keys, of one scheduler whose worker takes 20 ms a step."""
    config = EngineConfig(cache=CacheConfig(block_size=4), scheduler=SchedulerConfig(orphan_lease_s=60.0))
    worker, fake = FakeWorker(vocab_size=3072), FakeScheduler()
    worker.delay_s = 0.02
    async with running_scheduler(config) as scheduler:
        await worker.start(scheduler.address)
        await scheduler.until_ready()
        keys = {"api_key": KEYS}
        async with (
            frontend_at(scheduler.address, fake, **keys) as one,
            frontend_at(scheduler.address, fake, **keys) as two,
        ):
            for frontend in (one, two):
                await until(lambda frontend=frontend: frontend.server.serving.is_ready)
            yield one, two
        await worker.stop()


def headers_of(key: str, path: str) -> list[tuple[str, str]]:
    shown = ("x-api-key", key) if path == MESSAGES else ("Authorization", f"Bearer {key}")
    return [PROXY, shown]


STREAMS: dict[str, dict[str, Any]] = {
    MESSAGES: BODY,
    "/v1/chat/completions": BODY,
    "/v1/completions": {"prompt": "Once", "max_tokens": 400, "ignore_eos": True},
    "/v1/responses": {"input": "hi", "max_output_tokens": 400, "ignore_eos": True},
}


async def first_id(lines: AsyncIterator[str]) -> str:
    async for line in lines:
        if line.startswith("id: "):
            return line.removeprefix("id: ")
    raise AssertionError("the stream has no ids")


@pytest.mark.parametrize("path", STREAMS)
async def test_no_one_else_resumes_a_stream_by_its_id(frontends: tuple[Running, Running], path: str) -> None:
    one, two = frontends
    body = {**STREAMS[path], "stream": True}
    async with one.http.stream("POST", path, json=body, headers=headers_of(KEYS[0], path)) as stream:
        lines = stream.aiter_lines()  # held: its end would be that of the stream
        last_id = ("Last-Event-ID", await first_id(lines))
        for frontend in frontends:
            refused = await frontend.http.post(path, json=body, headers=[*headers_of(KEYS[1], path), last_id])
            assert refused.status_code == 404, refused.text
        async with two.http.stream("POST", path, json=body, headers=[*headers_of(KEYS[0], path), last_id]) as resumed:
            assert resumed.status_code == 200, await resumed.aread()
            assert await first_id(resumed.aiter_lines())


async def test_no_one_else_aborts_or_resumes_over_grpc(frontends: tuple[Running, Running]) -> None:
    one, two = frontends
    a, b = ([("authorization", PROXY[1]), ("authorization", f"Bearer {key}")] for key in KEYS)
    stub: Any = inference_pb2_grpc.InferenceStub(one.channel)
    other: Any = inference_pb2_grpc.InferenceStub(two.channel)
    request = inference_pb2.GenerateRequest(text="Once", request_id="mine")
    request.sampling_params.max_tokens, request.sampling_params.ignore_eos = 400, True
    call = stub.Generate(request, metadata=a)
    await call.read()
    place = inference_pb2.ResumeFrom(request_id="mine", received=[inference_pb2.ReceivedSequence()])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await other.Generate(inference_pb2.GenerateRequest(resume_from=place), metadata=b).read()
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Abort(inference_pb2.AbortGenerationRequest(request_ids=["mine"]), metadata=b)
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    assert (await call.read()).token_ids
    await stub.Abort(inference_pb2.AbortGenerationRequest(request_ids=["mine"]), metadata=a)


async def test_stored_answers_are_one_tenants(frontends: tuple[Running, Running]) -> None:
    one, _ = frontends
    a, b = (headers_of(key, "/v1/responses") for key in KEYS)
    asked = {"input": "hi", "max_output_tokens": 400, "ignore_eos": True, "background": True, "stream": False}
    kept = (await one.http.post("/v1/responses", json=asked, headers=a)).json()["id"]
    path = f"/v1/responses/{kept}"
    for method, target in (
        ("GET", path),
        ("GET", f"{path}?stream=true"),
        ("GET", f"{path}/input_items"),
        ("POST", f"{path}/cancel"),
        ("DELETE", path),
    ):
        assert (await one.http.request(method, target, headers=b)).status_code == 404, target
    follows = {"input": "go on", "previous_response_id": kept}
    assert (await one.http.post("/v1/responses", json=follows, headers=b)).status_code == 404
    assert (await one.http.get(path, headers=a)).json()["status"] in ("queued", "in_progress")
    assert (await one.http.post(f"{path}/cancel", headers=a)).json()["status"] == "cancelled"


async def test_without_keys_stored_answers_are_those_of_a_tenant_id() -> None:
    async with running_frontend() as running:
        asked = {"input": "hi", "max_output_tokens": 2}
        kept = (await running.post("/v1/responses", asked, headers={"X-Tenant-Id": "blue"})).json()["id"]
        assert (await running.http.get(f"/v1/responses/{kept}")).status_code == 404
        answer = await running.http.get(f"/v1/responses/{kept}", headers={"X-Tenant-Id": "blue"})
        assert answer.status_code == 200


HI = [{"role": "user", "content": "Tell me a long story about a dog, a cat and a bird."}]
CACHED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    MESSAGES: ({"max_tokens": 2, "messages": HI}, ("usage", "cache_read_input_tokens")),
    "/v1/chat/completions": (
        {"max_tokens": 2, "messages": HI},
        ("usage", "prompt_tokens_details", "cached_tokens"),
    ),
    "/v1/completions": (
        {"max_tokens": 2, "prompt": "Once upon a time there was a little dog who"},
        ("usage", "prompt_tokens_details", "cached_tokens"),
    ),
    "/v1/responses": (
        {"max_output_tokens": 2, "input": "Tell me a long story about a dog, a cat and a bird."},
        ("usage", "input_tokens_details", "cached_tokens"),
    ),
}


async def num_cached(frontend: Running, path: str, key: str, **more: Any) -> int:
    """Tokens of the prompt that were in the cache, as the answer tells."""
    body, where = CACHED[path]
    answer = await frontend.http.post(path, json={**body, **more}, headers=headers_of(key, path))
    assert answer.status_code == 200, answer.text
    value = answer.json()
    for name in where:
        value = value[name]
    return int(value)


async def frontend_with_cache(**config: Any) -> AsyncIterator[Running]:
    worker = FakeWorker(vocab_size=3072)
    async with running_scheduler(EngineConfig(cache=CacheConfig(block_size=4))) as scheduler:
        await worker.start(scheduler.address)
        await scheduler.until_ready()
        details = {"enable_prompt_tokens_details": True, "api_key": KEYS, **config}
        async with frontend_at(scheduler.address, FakeScheduler(), **details) as frontend:
            await until(lambda: frontend.server.serving.is_ready)
            yield frontend
        await worker.stop()


@pytest.mark.parametrize("path", CACHED)
async def test_what_another_tenant_has_cached_is_not_found(path: str) -> None:
    async for frontend in frontend_with_cache():
        assert await num_cached(frontend, path, KEYS[0]) == 0
        own = await num_cached(frontend, path, KEYS[0])
        assert own > 0
        assert await num_cached(frontend, path, KEYS[1]) == 0
        assert await num_cached(frontend, path, KEYS[1]) == own


async def test_isolation_is_a_choice_and_a_single_key_needs_none() -> None:
    path = "/v1/completions"
    async for frontend in frontend_with_cache(prefix_cache_isolation="none"):
        assert await num_cached(frontend, path, KEYS[0]) == 0
        assert await num_cached(frontend, path, KEYS[1]) > 0
        assert await num_cached(frontend, path, KEYS[1], cache_salt="own") == 0


@pytest.mark.parametrize(
    ("config", "salt"),
    [
        ({}, "own"),
        ({"api_key": KEYS[:1]}, "own"),
        ({"api_key": KEYS}, f"{key_id(KEYS[0])}/own"),
        ({"api_key": KEYS, "prefix_cache_isolation": "none"}, "own"),
        ({"api_key": KEYS[:1], "prefix_cache_isolation": "tenant"}, f"{key_id(KEYS[0])}/own"),
        ({"prefix_cache_isolation": "tenant"}, "blue/own"),
    ],
)
async def test_the_salt_of_every_call(config: dict[str, Any], salt: str) -> None:
    shown = (("authorization", f"Bearer {KEYS[0]}"), ("x-tenant-id", "blue"))
    async with running_frontend(**config) as running:
        for path, body in (
            ("/v1/completions", {"prompt": [5], "max_tokens": 1}),
            ("/v1/chat/completions", {"messages": HI, "max_tokens": 1}),
            (MESSAGES, {"messages": HI, "max_tokens": 1}),
            ("/v1/responses", {"input": "hi", "max_output_tokens": 1}),
            ("/v1/embeddings", {"input": "hi"}),
        ):
            await running.http.post(path, json={**body, "cache_salt": "own"}, headers=list(shown))
            assert running.fake.submits[-1].cache_salt == salt, path
        stub: Any = inference_pb2_grpc.InferenceStub(running.channel)
        message = inference_pb2.ChatMessage(role="user", content="hi")
        await stub.GenerateUnary(inference_pb2.GenerateRequest(text="x", cache_salt="own"), metadata=shown)
        await stub.ChatUnary(inference_pb2.ChatRequest(messages=[message], cache_salt="own"), metadata=shown)
        assert {submit.cache_salt for submit in running.fake.submits} == {salt}
        slash = inference_pb2.GenerateRequest(text="x", cache_salt=f"{key_id(KEYS[1])}/own")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GenerateUnary(slash, metadata=shown)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_the_prompts_of_one_body_are_one_group_and_a_single_one_is_none(keyed: Running) -> None:
    headers = [("Authorization", f"Bearer {KEYS[0]}")]
    for prompts, path in (([[5], [6], [7]], "/v1/completions"), ([[5]], "/v1/completions")):
        before = len(keyed.fake.submits)
        answer = await keyed.http.post(path, json={"prompt": prompts, "max_tokens": 2}, headers=headers)
        assert answer.status_code == 200, answer.text
        groups = [submit.group for submit in keyed.fake.submits[before:]]
        assert len(groups) == len(prompts)
        assert len(set(groups)) == 1
        assert bool(groups[0]) == (len(prompts) > 1)
