"""A frontend is gone: its streams go on for a lease, and another one takes them over, token for token."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pagoda_common.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from pagoda_common.engine.client import EngineClient, EngineRequest, EngineStream
from pagoda_common.engine.stream import AdoptedRequest
from pagoda_common.errors import NotFound
from pagoda_common.params.sampling_params import SamplingParams
from tests.fakes.fake_worker import FakeWorker
from tests.harness.scheduler import RunningScheduler, running_scheduler

KEY = "cmpl-7"


@pytest.fixture
async def scheduler() -> AsyncIterator[RunningScheduler]:
    config = EngineConfig(
        cache=CacheConfig(block_size=4), scheduler=SchedulerConfig(max_num_seqs=8, orphan_lease_s=20.0)
    )
    async with running_scheduler(config) as running:
        worker = FakeWorker()
        worker.delay_s = 0.005
        await worker.start(running.address)
        await running.until_ready()
        yield running
        await worker.stop()


@asynccontextmanager
async def client_of(scheduler: RunningScheduler) -> AsyncIterator[EngineClient]:
    client = EngineClient(address=scheduler.address)
    await client.start()
    try:
        await client.wait_until_ready(240)
        yield client
    finally:
        await client.close()


def ask(*, max_tokens: int = 60, n: int = 1, adopted: AdoptedRequest | None = None, **params: object) -> EngineRequest:
    sampling = SamplingParams(max_tokens=max_tokens, n=n, seed=3, ignore_eos=True, **params)  # type: ignore[arg-type]
    return EngineRequest(
        request_id="r", prompt_token_ids=[10], sampling_params=sampling, resume_key=KEY, note=b"note", adopted=adopted
    )


async def read(stream: EngineStream, *, at_least: int | None = None) -> dict[int, list[int]]:
    """Tokens of each sequence, to its end or until sequence 0 has `at_least`."""
    tokens: dict[int, list[int]] = {}
    async with asyncio.timeout(240):
        while not stream.is_finished:
            for output in await stream.get():
                known = tokens.setdefault(output.index, [])
                assert output.offset == len(known)
                known += output.token_ids
            if at_least is not None and len(tokens.get(0, ())) >= at_least:
                break
    return tokens


async def test_another_client_goes_on_where_the_first_one_was(scheduler: RunningScheduler) -> None:
    async with client_of(scheduler) as first:
        seen = await read(first.submit(ask()), at_least=10)
    async with client_of(scheduler) as second:
        (adopted,) = await second.adopt(KEY)
        assert (adopted.request_id, adopted.note, adopted.prompt_token_ids, adopted.seed) == ("r", b"note", [10], 3)
        assert len(adopted.sequences[0].token_ids) >= len(seen[0])
        seen = await read(second.submit(ask(adopted=adopted)), at_least=30)
        assert seen[0] == list(range(11, 11 + len(seen[0])))
    async with client_of(scheduler) as third:  # lost again
        (adopted,) = await third.adopt(KEY)
        assert await read(third.submit(ask(adopted=adopted))) == {0: list(range(11, 71))}
        third.release("r")
        await scheduler.until(lambda: not scheduler.engine.requests)


async def test_what_ended_without_a_frontend_is_kept(scheduler: RunningScheduler) -> None:
    async with client_of(scheduler) as first:
        await read(first.submit(ask(max_tokens=20)), at_least=2)
    await scheduler.until(lambda: not scheduler.engine.requests["r"].unfinished)
    async with client_of(scheduler) as second:
        (adopted,) = await second.adopt(KEY)
        assert adopted.sequences[0].finish_reason == "length"
        stream = second.submit(ask(max_tokens=20, adopted=adopted))
        assert await read(stream) == {0: list(range(11, 31))}
        assert stream.sequences[0].finish_reason == "length"
        second.release("r")
        await scheduler.until(lambda: not scheduler.engine.requests)
        with pytest.raises(NotFound, match="resume_key 'cmpl-7' is unknown"):
            await second.adopt(KEY)


async def test_a_stream_that_ended_is_kept_until_it_is_released(scheduler: RunningScheduler) -> None:
    async with client_of(scheduler) as first:
        await read(first.submit(ask(max_tokens=5)))
        assert scheduler.engine.requests
        first.release("r")
        await scheduler.until(lambda: not scheduler.engine.requests)


async def test_a_sequence_that_had_ended_survives_two_losses(scheduler: RunningScheduler) -> None:
    async with client_of(scheduler) as first:
        stream = first.submit(ask(n=2, max_tokens=60, temperature=1.0))
        await read(stream, at_least=5)
        stream.stop(1)
        await scheduler.until(lambda: scheduler.engine.requests["r"].sequences[1].is_finished)
    for _ in range(2):
        async with client_of(scheduler) as second:
            (adopted,) = await second.adopt(KEY)
            assert len(adopted.sequences) == 2
            stream = second.submit(ask(n=2, max_tokens=60, temperature=1.0, adopted=adopted))
            assert stream.sequences[1].finish_reason == "stop"
            await read(stream, at_least=len(adopted.sequences[0].token_ids) + 1)
    async with client_of(scheduler) as last:
        (adopted,) = await last.adopt(KEY)
        assert (await read(last.submit(ask(n=2, temperature=1.0, adopted=adopted))))[0] == list(range(11, 71))


async def test_logprobs_are_computed_again(scheduler: RunningScheduler) -> None:
    async with client_of(scheduler) as first:
        stream = first.submit(ask(logprobs=1))
        async with asyncio.timeout(240):
            while not scheduler.engine.requests:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert stream.sequences[0].logprobs is not None
    async with client_of(scheduler) as second:
        (adopted,) = await second.adopt(KEY)
        assert adopted.sequences[0].token_ids == []


async def test_the_lease_ends_in_an_abort() -> None:
    config = EngineConfig(
        cache=CacheConfig(block_size=4), scheduler=SchedulerConfig(max_num_seqs=8, orphan_lease_s=0.3)
    )
    async with running_scheduler(config) as scheduler:
        worker = FakeWorker()
        worker.delay_s = 0.02
        await worker.start(scheduler.address)
        await scheduler.until_ready()
        async with client_of(scheduler) as first:
            await read(first.submit(ask(max_tokens=3000)), at_least=2)
        await scheduler.until(lambda: not scheduler.engine.requests)
        assert scheduler.engine.cores[0].scheduler.kv.pool.num_used_blocks == 0
        await worker.stop()


async def test_a_request_without_a_key_ends_with_its_session(scheduler: RunningScheduler) -> None:
    async with client_of(scheduler) as first:
        request = ask()
        request.resume_key = ""
        await read(first.submit(request), at_least=2)
    await scheduler.until(lambda: not scheduler.engine.requests)
