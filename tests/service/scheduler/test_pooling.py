"""Embeddings through Scheduler.Generate and Session over real sockets, with a fake worker."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
import pytest

from pagoda.v1 import scheduler_pb2, types_pb2
from pagoda_common.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from pagoda_common.engine.client import EngineClient, EngineRequest, EngineStream
from pagoda_common.engine.convert import token_ids_to_bytes
from pagoda_common.errors import Code, DeadlineExceeded, PagodaError, QueueFull
from pagoda_common.params.outputs import EngineOutput
from pagoda_common.params.pooling_params import PoolingParams
from pagoda_common.params.sampling_params import SamplingParams
from tests.fakes.fake_worker import FakeWorker
from tests.harness.scheduler import RunningScheduler, running_scheduler


@pytest.fixture
async def worker(scheduler: RunningScheduler) -> AsyncIterator[FakeWorker]:
    worker = FakeWorker()
    await worker.start(scheduler.address)
    await scheduler.until_ready()
    yield worker
    await worker.stop()


@pytest.fixture
async def client(scheduler: RunningScheduler, worker: FakeWorker) -> AsyncIterator[EngineClient]:
    client = EngineClient(address=scheduler.address)
    await client.start()
    await client.wait_until_ready(240)
    yield client
    await client.close()


def submit(client: EngineClient, name: str, length: int, **fields: Any) -> EngineStream:
    """A prompt of `length` tokens whose embedding is [length, length]."""
    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    prompt = list(range(1, length + 1))
    request = EngineRequest(
        request_id=name, prompt_token_ids=prompt, sampling_params=params, pooling=PoolingParams(), **fields
    )
    return client.submit(request)


async def output_of(stream: EngineStream) -> EngineOutput:
    (output,) = await stream.get()
    assert stream.is_finished
    return output


def check(output: EngineOutput, length: int) -> None:
    assert (output.finish_reason, output.token_ids, output.error) == ("stop", [], None)
    assert output.embedding is not None
    assert output.embedding.tolist() == [length, length]


async def test_embeddings_and_tokens_come_over_one_session(scheduler: RunningScheduler, client: EngineClient) -> None:
    lengths = (1, 3, 4, 5, 63, 64, 65, 200, 1000)
    others = [
        client.submit(
            EngineRequest(
                request_id=f"g{n}", prompt_token_ids=[10 * n], sampling_params=SamplingParams(max_tokens=30, seed=0)
            )
        )
        for n in range(1, 6)
    ]
    streams = [submit(client, f"p{length}", length) for length in lengths]
    for length, stream in zip(lengths, streams, strict=True):
        check(await output_of(stream), length)
    for n, other in enumerate(others, start=1):
        tokens: list[int] = []
        while not other.is_finished:
            tokens += [token for output in await other.get() for token in output.token_ids]
        assert tokens == list(range(10 * n + 1, 10 * n + 31))
    assert (await output_of(submit(client, "again", 1000))).num_cached_tokens == 996
    assert client.num_open_requests == 0
    assert scheduler.engine.requests == {}
    assert scheduler.engine.load().num_used_blocks == 0


async def test_a_lost_worker_is_a_pause(scheduler: RunningScheduler, worker: FakeWorker, client: EngineClient) -> None:
    worker.fail_at_step = 4
    streams = [submit(client, str(length), length) for length in (30, 300, 100)]
    for length, stream in zip((30, 300, 100), streams, strict=True):
        check(await asyncio.wait_for(output_of(stream), 240), length)
    assert scheduler.engine.load().counters.num_worker_losses == 1


async def test_a_lost_session_is_a_pause(scheduler: RunningScheduler, worker: FakeWorker, client: EngineClient) -> None:
    worker.delay_s = 0.05
    stream = submit(client, "a", 300)
    await scheduler.until(lambda: "a" in scheduler.engine.requests)
    scheduler.engine.hand_over()
    check(await asyncio.wait_for(output_of(stream), 240), 300)
    assert (client.num_losses, stream.attempt) == (1, 2)


async def test_it_is_aborted_and_has_a_deadline(
    scheduler: RunningScheduler, worker: FakeWorker, client: EngineClient
) -> None:
    worker.delay_s = 0.2
    stream = submit(client, "a", 500)
    await asyncio.sleep(0.1)
    stream.abort()
    assert (await output_of(stream)).finish_reason == "abort"
    output = await output_of(submit(client, "b", 500, timeout_s=0.3))
    assert isinstance(output.error, PagodaError)
    assert output.error.code is DeadlineExceeded("").code
    await scheduler.until(lambda: scheduler.engine.load().num_used_blocks == 0)


async def test_queue_limits_hold() -> None:
    config = EngineConfig(
        cache=CacheConfig(block_size=4),
        scheduler=SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=64, max_num_queued_reqs=2),
    )
    async with running_scheduler(config) as scheduler:
        worker = FakeWorker()
        await worker.start(scheduler.address)
        await scheduler.until_ready()
        worker.delay_s = 0.2
        client = EngineClient(address=scheduler.address)
        await client.start()
        await client.wait_until_ready(240)
        streams = [submit(client, "first", 500)]
        await scheduler.until(lambda: scheduler.engine.load().num_running_reqs == 1)
        streams += [submit(client, str(n), 500) for n in range(3)]
        with pytest.raises(PagodaError) as raised:
            await streams[-1].get()
        assert raised.value.code is QueueFull("").code
        await client.close()
        await worker.stop()


def message(length: int, **fields: Any) -> scheduler_pb2.SubmitRequest:
    prompt = token_ids_to_bytes(range(1, length + 1))
    return scheduler_pb2.SubmitRequest(prompt_token_ids=prompt, pooling=types_pb2.PoolingParams(), **fields)


async def test_simple_stubs_get_it_in_one_message(scheduler: RunningScheduler, worker: FakeWorker) -> None:
    params = types_pb2.SamplingParams(n=3, temperature=3.0, logprobs=500)  # which mean nothing here
    outputs = [output async for output in scheduler.stub.Generate(message(100, sampling_params=params))]
    assert np.frombuffer(outputs[0].embedding, "<f4").tolist() == [100, 100]
    assert (len(outputs), outputs[0].finish_reason) == (1, types_pb2.FINISH_REASON_STOP)


async def test_bad_requests(scheduler: RunningScheduler, worker: FakeWorker) -> None:
    cases = (
        (message(0), "prompt_token_ids must not be empty"),
        (message(5000), "prompt has 5000 tokens, max_model_len is 4096"),
        (message(5, beam_search=types_pb2.BeamSearchParams()), "a request with pooling cannot have beam_search"),
    )
    for request, fragment in cases:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await scheduler.stub.Generate(request).read()
        assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert fragment in (raised.value.details() or "")


async def test_a_worker_that_does_not_pool_is_not_asked(scheduler: RunningScheduler) -> None:
    worker = FakeWorker(embedding_size=0)
    early = EngineClient(address=scheduler.address)
    await early.start()
    await asyncio.sleep(0.2)
    stream = submit(early, "early", 5)
    await worker.start(scheduler.address)
    await scheduler.until_ready()
    output = await output_of(stream)
    assert isinstance(output.error, PagodaError)
    assert output.error.code is Code.UNIMPLEMENTED
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await scheduler.stub.Generate(message(5)).read()
    assert raised.value.code() == grpc.StatusCode.UNIMPLEMENTED
    await early.close()
    await worker.stop()
