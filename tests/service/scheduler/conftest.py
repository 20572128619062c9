"""A small scheduler for each test, with and without asynchronous scheduling."""

from collections.abc import AsyncIterator

import pytest

from pagoda_common.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from tests.harness.scheduler import RunningScheduler, running_scheduler


@pytest.fixture(params=[True, False], ids=["async", "sync"])
async def scheduler(request: pytest.FixtureRequest) -> AsyncIterator[RunningScheduler]:
    """A small scheduler, with and without asynchronous scheduling."""
    config = EngineConfig(
        cache=CacheConfig(block_size=4),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, async_scheduling=request.param),
    )
    async with running_scheduler(config) as running:
        yield running
