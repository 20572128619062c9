"""Drafts over the wire: workers with and without the capability, streams with several tokens a step, losses."""

import asyncio

import pytest

from pagoda.v1 import scheduler_pb2, types_pb2
from pagoda_common.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from pagoda_common.config.speculative_config import CAPABILITY, SpeculativeConfig
from pagoda_common.engine.convert import token_ids_to_bytes
from tests.fakes.fake_worker import FakeWorker
from tests.harness.scheduler import RunningScheduler, running_scheduler


def make_config(*, async_scheduling: bool = True) -> EngineConfig:
    return EngineConfig(
        cache=CacheConfig(block_size=4),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, async_scheduling=async_scheduling),
        speculative=SpeculativeConfig(num_speculative_tokens=3),
    )


async def generate(scheduler: RunningScheduler, name: str, prompt: list[int], max_tokens: int) -> list[int]:
    """Output tokens, whose offsets leave no gap."""
    params = types_pb2.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    request = scheduler_pb2.SubmitRequest(
        request_id=name, prompt_token_ids=token_ids_to_bytes(prompt), sampling_params=params, slots=[0]
    )
    tokens: list[int] = []
    async for output in scheduler.stub.Generate(request):
        assert output.offset == len(tokens)
        tokens += output.token_ids
    return tokens


@pytest.mark.parametrize("async_scheduling", [True, False])
async def test_a_stream_gets_every_token_once(async_scheduling: bool) -> None:
    async with running_scheduler(make_config(async_scheduling=async_scheduling)) as scheduler:
        worker = FakeWorker(capabilities=(CAPABILITY,))
        worker.num_right = 2
        await worker.start(scheduler.address)
        await scheduler.until_ready()
        answers = await asyncio.gather(*(generate(scheduler, f"r{n}", [100 * n], 10 + n) for n in range(6)))
        assert answers == [list(range(100 * n + 1, 100 * n + 11 + n)) for n in range(6)]
        load = scheduler.engine.load()
        assert load.counters.speculation.num_accepted_tokens > 30
        assert load.counters.speculation.num_accepted_tokens_per_pos[2:] == [0]
        assert (load.num_used_blocks, load.counters.num_worker_losses) == (0, 0)
        await worker.stop()


async def test_a_worker_without_the_capability_is_never_asked() -> None:
    async with running_scheduler(make_config()) as scheduler:
        worker = FakeWorker()
        worker.keep_requests = True
        await worker.start(scheduler.address)
        await scheduler.until_ready()
        assert await generate(scheduler, "r", [5], 12) == list(range(6, 18))
        assert not any(step.num_lookahead_slots or step.num_lookahead_tokens for step in worker.requests)
        await worker.stop()


async def test_a_worker_that_makes_no_drafts_is_as_good() -> None:
    """The step allows them; a worker of an older version takes no notice."""
    async with running_scheduler(make_config()) as scheduler:
        worker = FakeWorker(capabilities=(CAPABILITY,))
        worker.keep_requests = True
        await worker.start(scheduler.address)
        await scheduler.until_ready()
        assert await generate(scheduler, "r", [5], 12) == list(range(6, 18))
        assert any(step.num_lookahead_slots == 3 for step in worker.requests)
        await worker.stop()


async def test_requests_go_on_where_they_were_when_the_worker_fails() -> None:
    async with running_scheduler(make_config()) as scheduler:
        worker = FakeWorker(capabilities=(CAPABILITY,))
        worker.num_right, worker.fail_at_step = 1, 12
        await worker.start(scheduler.address)
        await scheduler.until_ready()
        answers = await asyncio.gather(*(generate(scheduler, f"r{n}", [100 * n], 40) for n in range(4)))
        assert answers == [list(range(100 * n + 1, 100 * n + 41)) for n in range(4)]
        counters = scheduler.engine.load().counters
        assert counters.num_worker_losses == 1
        assert counters.speculation.num_accepted_tokens > 20, "those of before the loss count"
        await worker.stop()
