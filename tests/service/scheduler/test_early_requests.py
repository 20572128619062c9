"""Requests that reach a scheduler before any worker has loaded the model, as all do after a restart."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from pagoda_common.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from pagoda_common.engine.client import EngineClient, EngineRequest
from pagoda_common.engine.stream import AdoptedRequest, AdoptedSequence
from pagoda_common.params.sampling_params import SamplingParams
from tests.fakes.fake_worker import FakeWorker
from tests.harness.scheduler import RunningScheduler, running_scheduler

END = 15
MAX_MODEL_LEN = 32
NUM_QUEUED = 3
VOCAB_SIZE = 500


@pytest.fixture
async def scheduler() -> AsyncIterator[RunningScheduler]:
    config = EngineConfig(
        cache=CacheConfig(block_size=4), scheduler=SchedulerConfig(max_num_seqs=8, max_num_queued_reqs=NUM_QUEUED)
    )
    async with running_scheduler(config) as running:
        yield running


async def outcome(
    scheduler: RunningScheduler, known: list[int], *, max_tokens: int | None = None, ignore_eos: bool = False
) -> tuple[list[int], str | None]:
    """All tokens and the finish reason of a request that is resumed after `known`; the worker comes later."""
    params = SamplingParams(temperature=0, seed=1, max_tokens=max_tokens, ignore_eos=ignore_eos)
    (found,) = await outcomes(scheduler, [request_behind(known, params, name="a")])
    return found


def request_behind(known: list[int], params: SamplingParams, *, name: str) -> EngineRequest:
    """A request that has `known` already; a new one without any."""
    adopted = AdoptedRequest(
        request_id=name,
        attempt=1,
        prompt_token_ids=[10],
        seed=1,
        arrival_time_ns=1,
        timeout_s=0,
        sequences=[AdoptedSequence(token_ids=known)],
        note=b"",
    )
    return EngineRequest(
        request_id=name, prompt_token_ids=[10], sampling_params=params, adopted=adopted if known else None
    )


async def outcomes(
    scheduler: RunningScheduler, requests: list[EngineRequest], *, num_workers: int = 1
) -> list[tuple[list[int], str | None]]:
    """Tokens and finish reason of each request, or the message of its error; workers come when all are waiting."""
    workers = [
        FakeWorker(eos_token_ids=(END,), max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB_SIZE) for _ in range(num_workers)
    ]
    client = EngineClient(address=scheduler.address)
    await client.start()
    try:
        await scheduler.until(lambda: client.is_connected)
        streams = [client.submit(request) for request in requests]
        await scheduler.until(lambda: scheduler.engine.load().num_waiting_reqs == len(requests))
        for number, worker in enumerate(workers):
            await worker.start(scheduler.address, group=number)
        async with asyncio.timeout(240):
            for stream in streams:
                while not stream.is_finished:
                    await stream.get()
    finally:
        await client.close()
        for worker in workers:
            await worker.stop()
    assert not scheduler.engine.requests
    sequences = [stream.sequences[0] for stream in streams]
    return [
        (sequence.token_ids, sequence.error.message if sequence.error else sequence.finish_reason)
        for sequence in sequences
    ]


@pytest.mark.parametrize("known", [[], [11, 12]])
async def test_the_models_end_token_ends_them(scheduler: RunningScheduler, known: list[int]) -> None:
    assert await outcome(scheduler, known, max_tokens=20) == ([11, 12, 13, 14, END], "stop")


async def test_one_that_has_its_end_token_already_ends_without_another(scheduler: RunningScheduler) -> None:
    known = [11, 12, 13, 14, END]
    assert await outcome(scheduler, known, max_tokens=20) == (known, "stop")


async def test_the_end_token_is_ignored_by_those_that_say_so(scheduler: RunningScheduler) -> None:
    tokens = list(range(11, 20))
    assert await outcome(scheduler, [11], max_tokens=9, ignore_eos=True) == (tokens, "length")


async def test_the_models_context_bounds_them(scheduler: RunningScheduler) -> None:
    tokens = list(range(11, 10 + MAX_MODEL_LEN))
    assert await outcome(scheduler, [], ignore_eos=True) == (tokens, "length")


async def test_a_full_queue_refuses_nobody_who_was_taken_in_before(scheduler: RunningScheduler) -> None:
    params = SamplingParams(temperature=0, seed=1, max_tokens=9, ignore_eos=True)
    requests = [request_behind([11, 12], params, name=str(number)) for number in range(4 * NUM_QUEUED)]
    assert await outcomes(scheduler, requests) == [(list(range(11, 20)), "length")] * len(requests)


@pytest.mark.parametrize("num_workers", [1, 2])
async def test_a_prompt_outside_of_the_vocabulary_fails_alone(scheduler: RunningScheduler, num_workers: int) -> None:
    params = SamplingParams(temperature=0, seed=1, max_tokens=4)
    wrong = [
        EngineRequest(request_id="new", prompt_token_ids=[10, VOCAB_SIZE], sampling_params=params),
        EngineRequest(request_id="highest", prompt_token_ids=[2**32 - 1], sampling_params=params),
        request_behind([11, VOCAB_SIZE + 1], params, name="resumed"),
    ]
    right = [
        EngineRequest(request_id="last", prompt_token_ids=[VOCAB_SIZE - 1], sampling_params=params),
        request_behind([11, 12], params, name="fine"),
    ]
    found = await outcomes(scheduler, [wrong[0], right[0], *wrong[1:], right[1]], num_workers=num_workers)
    bound = f"the vocabulary has {VOCAB_SIZE}"
    assert found == [
        ([], f"prompt_token_ids has token {VOCAB_SIZE}, {bound}"),
        ([0, 1, 2, 3], "length"),
        ([], f"prompt_token_ids has token {2**32 - 1}, {bound}"),
        ([11, VOCAB_SIZE + 1], f"output_token_ids has token {VOCAB_SIZE + 1}, {bound}"),
        ([11, 12, 13, 14], "length"),
    ]
