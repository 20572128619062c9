"""VllmEngine on a real scheduler: as a stub sees it, as the smg gateway uses it, and its events on ZMQ."""

import asyncio
import contextlib
import hashlib
import io
import json
import sys
import urllib.error
import urllib.request
import zipfile
from collections.abc import AsyncIterator
from importlib.util import find_spec
from typing import Any

import grpc
import pytest

from pagoda_common.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from pagoda_common.process.children import free_port
from pagoda_common.rpc.service import connect
from pagoda_scheduler.kv.kv_events import BlockStored
from tests.fakes.fake_worker import FakeWorker
from tests.harness.scheduler import RunningScheduler, running_scheduler

pytest.importorskip("smg_grpc_proto")

from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

PROMPT = list(range(100, 110))
BLOCK_SIZE = 4


def engine_config(**events: Any) -> EngineConfig:
    events = {"enable_kv_cache_events": True} | events
    return EngineConfig(
        cache=CacheConfig(block_size=BLOCK_SIZE, kv_events_config=json.dumps(events)),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
    )


@pytest.fixture
async def scheduler() -> AsyncIterator[RunningScheduler]:
    async with running_scheduler(engine_config(), has_vllm_engine=True) as running:
        yield running


@pytest.fixture
async def worker(scheduler: RunningScheduler) -> AsyncIterator[FakeWorker]:
    worker = FakeWorker(vocab_size=3072)
    await worker.start(scheduler.address)
    await scheduler.until_ready()
    yield worker
    await worker.stop()


@pytest.fixture
async def stub(scheduler: RunningScheduler) -> AsyncIterator[Any]:
    async with connect(scheduler.address) as channel:
        yield vllm_engine_pb2_grpc.VllmEngineStub(channel)


def generate_request(
    name: str, *, stream: bool = True, max_tokens: int = 5, **params: Any
) -> vllm_engine_pb2.GenerateRequest:
    return vllm_engine_pb2.GenerateRequest(
        request_id=name,
        tokenized=vllm_engine_pb2.TokenizedInput(input_ids=PROMPT),
        sampling_params=vllm_engine_pb2.SamplingParams(max_tokens=max_tokens, **params),
        stream=stream,
    )


@pytest.mark.usefixtures("worker")
async def test_tokens_come_in_chunks_and_then_whole(stub: Any) -> None:
    responses = [response async for response in stub.Generate(generate_request("a", n=2))]
    completes = {each.complete.index: each.complete for each in responses if each.HasField("complete")}
    assert set(completes) == {0, 1}
    for index, complete in completes.items():
        chunks = [each.chunk for each in responses if each.HasField("chunk") and each.chunk.index == index]
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        assert tokens == list(complete.output_ids) == list(range(110, 115))
        assert [chunk.completion_tokens for chunk in chunks] == [1, 2, 3, 4, 5]
        assert (complete.finish_reason, complete.prompt_tokens) == ("length", len(PROMPT))
    whole = [response async for response in stub.Generate(generate_request("b", stream=False))]
    assert [list(each.complete.output_ids) for each in whole] == [list(range(110, 115))]
    assert whole[0].complete.cached_tokens == 8


@pytest.mark.usefixtures("worker")
async def test_what_is_not_there_is_refused(stub: Any) -> None:
    text = vllm_engine_pb2.GenerateRequest(request_id="t", text="Hello")
    pictures = generate_request("p")
    pictures.mm_inputs.SetInParent()
    for request, fragment in ((text, "token ids"), (pictures, "mm_inputs"), (generate_request("n", top_p=2), "top_p")):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async for _ in stub.Generate(request):
                pass
        assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert fragment in (raised.value.details() or "")


def embed_request(name: str, prompt: list[int]) -> vllm_engine_pb2.EmbedRequest:
    return vllm_engine_pb2.EmbedRequest(request_id=name, tokenized=vllm_engine_pb2.TokenizedInput(input_ids=prompt))


@pytest.mark.usefixtures("worker")
async def test_a_prompt_is_embedded(scheduler: RunningScheduler, stub: Any) -> None:
    answers = await asyncio.gather(*(stub.Embed(embed_request(str(n), PROMPT * n)) for n in (1, 2, 30)))
    for n, answer in zip((1, 2, 30), answers, strict=True):
        assert list(answer.embedding) == [10 * n, 109]  # what a fake worker embeds
        assert (answer.prompt_tokens, answer.embedding_dim) == (10 * n, 2)
    assert scheduler.engine.requests == {}
    assert scheduler.engine.load().num_used_blocks == 0


async def test_an_embedding_that_is_not_there(scheduler: RunningScheduler, worker: FakeWorker, stub: Any) -> None:
    cases = (
        (embed_request("a", []), "tokenized must have token ids"),
        (embed_request("b", [1] * 4097), "prompt has 4097 tokens, max_model_len is 4096"),
        (embed_request("c", [3072]), "prompt_token_ids has token 3072, the vocabulary has 3072"),
    )
    for request, fragment in cases:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.Embed(request)
        assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert fragment in (raised.value.details() or "")
    assert (await stub.Embed(embed_request("whole", [7] * 4096))).prompt_tokens == 4096
    worker.delay_s = 0.5
    waiting = asyncio.ensure_future(stub.Embed(embed_request("long", PROMPT)))
    await scheduler.until(lambda: "long" in scheduler.engine.requests)
    await stub.Abort(vllm_engine_pb2.AbortRequest(request_ids=["long"]))
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await waiting
    assert raised.value.code() == grpc.StatusCode.CANCELLED
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stub.Embed(embed_request("late", PROMPT), timeout=0.1)
    assert raised.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    await scheduler.until(lambda: not scheduler.engine.requests)


async def test_abort_and_loads(scheduler: RunningScheduler, worker: FakeWorker, stub: Any) -> None:
    worker.delay_s = 0.02
    stream = aiter(stub.Generate(generate_request("long", max_tokens=2000)))
    await anext(stream)
    (load,) = (await stub.GetLoads(vllm_engine_pb2.GetLoadsRequest())).loads
    assert (load.num_running_reqs, load.max_running_requests) == (1, 8)
    assert load.num_used_tokens > 0
    assert (await stub.GetServerInfo(vllm_engine_pb2.GetServerInfoRequest())).active_requests == 1
    await stub.Abort(vllm_engine_pb2.AbortRequest(request_ids=["long", "unknown"]))
    responses = [response async for response in stream]
    assert responses[-1].complete.finish_reason == "abort"
    await scheduler.until(lambda: scheduler.engine.load().num_used_blocks == 0)
    left = stub.Generate(generate_request("left", max_tokens=2000))
    await left.read()
    left.cancel()
    await scheduler.until(lambda: not scheduler.engine.requests)


async def test_a_gateway_waits_until_there_is_a_model(scheduler: RunningScheduler, stub: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stub.HealthCheck(vllm_engine_pb2.HealthCheckRequest())
    assert raised.value.code() == grpc.StatusCode.UNAVAILABLE
    worker = FakeWorker(vocab_size=3072)
    await worker.start(scheduler.address)
    await scheduler.until_ready()
    assert (await stub.HealthCheck(vllm_engine_pb2.HealthCheckRequest())).healthy
    info = await stub.GetModelInfo(vllm_engine_pb2.GetModelInfoRequest())
    assert (info.vocab_size, info.max_context_length, info.is_generation) == (3072, 4096, True)
    await worker.stop()
    await scheduler.until(lambda: not scheduler.engine.is_ready)
    health = await stub.HealthCheck(vllm_engine_pb2.HealthCheckRequest())
    assert not health.healthy
    assert health.message


async def test_the_tokenizer_comes_as_an_archive(stub: Any) -> None:
    chunks = [chunk async for chunk in stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
    data = b"".join(chunk.data for chunk in chunks)
    assert [chunk.sha256 for chunk in chunks[:-1]] == [""] * (len(chunks) - 1)
    assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
    assert {"tokenizer.json", "config.json"} <= set(zipfile.ZipFile(io.BytesIO(data)).namelist())


@pytest.mark.usefixtures("worker")
async def test_events_tell_what_is_cached_now_and_later(stub: Any) -> None:
    async def next_events(stream: Any) -> list[Any]:
        while True:
            batch = await stream.read()
            if batch.events:
                return [(batch.sequence_number, event) for event in batch.events]

    early = stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
    await early.initial_metadata()
    _ = [response async for response in stub.Generate(generate_request("a"))]
    stored = await next_events(early)
    blocks = [event.stored for _, event in stored]
    assert [token for block in blocks for token in block.blocks[0].token_ids] == PROMPT[:8]
    assert not blocks[0].HasField("parent_block_hash")
    assert blocks[1].parent_block_hash == blocks[0].blocks[0].block_hash
    late = stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
    snapshot = await next_events(late)
    assert snapshot[0][1].HasField("cleared")
    assert [event.stored.blocks[0].block_hash for _, event in snapshot[1:3]] == [
        block.blocks[0].block_hash for block in blocks
    ]
    again = stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(start_sequence_number=stored[0][0]))
    assert [event for _, event in await next_events(again)] == [event for _, event in stored]
    await stub.FlushCache(common_pb2.FlushCacheRequest())
    kinds: list[str] = []
    while "cleared" not in kinds:
        kinds += [event.WhichOneof("data") for _, event in await next_events(early)]
    for stream in (early, late, again):
        stream.cancel()


async def repeated(dealer: Any) -> list[int]:
    """Numbers of the batches that come until the end of a replay."""
    numbers = []
    async with asyncio.timeout(240):
        while (number := int.from_bytes((await dealer.recv_multipart())[1], "big", signed=True)) >= 0:
            numbers.append(number)
    return numbers


async def test_events_are_published_on_zmq_and_repeated() -> None:
    zmq = pytest.importorskip("zmq")
    import zmq.asyncio as zmq_asyncio

    msgspec = pytest.importorskip("msgspec")
    endpoint, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    config = engine_config(publisher="zmq", endpoint=endpoint, replay_endpoint=replay, topic="kv")
    context = zmq_asyncio.Context()
    try:
        async with running_scheduler(config, has_vllm_engine=True) as scheduler:
            worker = FakeWorker(vocab_size=3072)
            await worker.start(scheduler.address)
            await scheduler.until_ready()
            async with connect(scheduler.address) as channel:
                stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
                _ = [response async for response in stub.Generate(generate_request("a"))]
            dealer = context.socket(zmq.DEALER)
            dealer.connect(replay)
            await dealer.send_multipart((b"", (0).to_bytes(8, "big")))
            empty, number, payload = await asyncio.wait_for(dealer.recv_multipart(), 240)
            assert (empty, number) == (b"", (0).to_bytes(8, "big"))
            timestamp, events, rank = msgspec.msgpack.decode(payload)
            assert timestamp > 0
            assert rank == 0
            name, (block_hash,), parent, tokens, block_size, lora_id, medium = events[0]
            assert (name, parent, tokens, block_size, lora_id, medium) == (
                *("BlockStored", None, PROMPT[:4], BLOCK_SIZE, None),
                "GPU",
            )
            assert events[1][2] == block_hash
            for number in range(1, 4):  # further batches
                scheduler.engine.kv_events.stored(BlockStored(bytes([number]) * 16, None, tuple(PROMPT[:4])))
                scheduler.engine.kv_events.flush()
            last = scheduler.engine.kv_events.last_sequence
            await repeated(dealer)
            await dealer.send_multipart((b"", (last - 2).to_bytes(8, "big")))
            assert await repeated(dealer) == [last - 2, last - 1], "from the one asked for on, counted from 0"
            await worker.stop()
    finally:
        context.destroy(linger=0)


@pytest.mark.skipif(find_spec("smg") is None, reason="the smg gateway is not installed")
async def test_the_smg_gateway_serves_what_it_serves_of_vllm(scheduler: RunningScheduler, worker: FakeWorker) -> None:
    port = free_port()
    words = ("launch", "--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware")
    words = (*words, "--prometheus-port", str(free_port()))  # it ends at once where its own default is taken
    gateway = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "smg", *words, "--worker-urls", f"grpc://{scheduler.address}"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )

    def post(path: str, body: dict[str, Any]) -> str:
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=240) as response:
            return str(response.read().decode())

    def is_ready() -> bool:
        """It lists the model a little before it routes to it."""
        try:
            post("/v1/completions", {"model": "pagoda-tiny", "max_tokens": 1, "prompt": "Hello"})
        except OSError:
            return False
        return True

    try:
        async with asyncio.timeout(240):
            while not await asyncio.to_thread(is_ready):
                assert gateway.returncode is None, "the gateway has ended"
                await asyncio.sleep(0.2)
        body = {"model": "pagoda-tiny", "max_tokens": 6, "temperature": 0}
        chat = body | {"messages": [{"role": "user", "content": "Hello"}]}
        answer = json.loads(await asyncio.to_thread(post, "/v1/chat/completions", chat))
        assert answer["usage"]["completion_tokens"] == 6
        assert answer["choices"][0]["finish_reason"] == "length"
        text = await asyncio.to_thread(post, "/v1/completions", body | {"prompt": "Hello", "stream": True})
        assert text.rstrip().endswith("data: [DONE]")
        assert text.count("data: {") >= 6
        vector = {"model": "pagoda-tiny", "input": "Once upon a time"}
        answer = json.loads(await asyncio.to_thread(post, "/v1/embeddings", vector))
        assert answer["data"][0]["embedding"][0] == answer["usage"]["prompt_tokens"] > 1  # what a fake worker embeds
        await scheduler.until(lambda: not scheduler.engine.requests)
    finally:
        with contextlib.suppress(ProcessLookupError):
            gateway.terminate()
        await gateway.wait()
    assert worker.num_loads == 1
