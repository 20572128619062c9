"""Requests that reach a scheduler before any worker has loaded the model, as all do behind a restart."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from pagoda.v1 import scheduler_pb2, types_pb2
from pagoda_common.config import CacheConfig, EngineConfig, SchedulerConfig
from pagoda_common.convert import token_ids_to_bytes
from tests.fakes.fake_worker import FakeWorker
from tests.harness.scheduler import RunningScheduler, running_scheduler

END = 15
MAX_MODEL_LEN = 32


@pytest.fixture
async def scheduler() -> AsyncIterator[RunningScheduler]:
    config = EngineConfig(cache=CacheConfig(block_size=4), scheduler=SchedulerConfig(max_num_seqs=8))
    async with running_scheduler(config) as running:
        yield running


async def outcome(
    scheduler: RunningScheduler, known: list[int], *, max_tokens: int | None = None, ignore_eos: bool = False
) -> tuple[list[int], int]:
    """New tokens and finish reason of a request that a frontend goes on with; the worker comes only behind it."""
    request = scheduler_pb2.SubmitRequest(
        request_id="a",
        prompt_token_ids=token_ids_to_bytes([10]),
        sampling_params=types_pb2.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=ignore_eos),
    )
    if known:
        request.resume.sequences.add(output_token_ids=token_ids_to_bytes(known))

    async def read() -> tuple[list[int], int]:
        tokens: list[int] = []
        reason = 0
        async for output in scheduler.stub.Generate(request):
            tokens += output.token_ids
            reason = output.finish_reason or reason
        return tokens, reason

    reading = asyncio.create_task(read())
    await scheduler.until(lambda: scheduler.engine.load().num_waiting_reqs == 1)
    worker = FakeWorker(eos_token_ids=(END,), max_model_len=MAX_MODEL_LEN)
    await worker.start(scheduler.address)
    try:
        return await asyncio.wait_for(reading, 60)
    finally:
        await worker.stop()


@pytest.mark.parametrize("known", [[], [11, 12]])
async def test_the_models_end_token_ends_them(scheduler: RunningScheduler, known: list[int]) -> None:
    tokens, reason = await outcome(scheduler, known, max_tokens=20)
    assert [*known, *tokens] == [11, 12, 13, 14, END]
    assert reason == types_pb2.FINISH_REASON_STOP


async def test_one_that_has_its_end_token_already_ends_without_another(scheduler: RunningScheduler) -> None:
    assert await outcome(scheduler, [11, 12, 13, 14, END], max_tokens=20) == ([], types_pb2.FINISH_REASON_STOP)


async def test_the_end_token_is_ignored_by_those_that_say_so(scheduler: RunningScheduler) -> None:
    tokens, reason = await outcome(scheduler, [11], max_tokens=9, ignore_eos=True)
    assert tokens == [12, 13, 14, 15, 16, 17, 18, 19]
    assert reason == types_pb2.FINISH_REASON_LENGTH


async def test_the_models_context_bounds_them(scheduler: RunningScheduler) -> None:
    tokens, reason = await outcome(scheduler, [], ignore_eos=True)
    assert tokens == list(range(11, 10 + MAX_MODEL_LEN))
    assert reason == types_pb2.FINISH_REASON_LENGTH
