"""How many steps are sent before the first of them is answered."""

import asyncio

import pytest

from pagoda_common.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_scheduler.core.request import Request
from pagoda_scheduler.core.step import ModelRunnerOutput, SchedulerOutput, StepTimings
from pagoda_scheduler.engine.engine_core import SHORT_STEP_NS, EngineCore
from pagoda_scheduler.kv.cache_group import CacheSizes
from pagoda_scheduler.observability.timeline import Timeline


class Answering:
    """A worker whose steps all take the same time, answered when the test says so."""

    def __init__(self, compute_ns: int) -> None:
        self._timings = StepTimings(prepare_ns=1, forward_ns=compute_ns - 2, sample_ns=1)
        self._answers: asyncio.Queue[ModelRunnerOutput] = asyncio.Queue()
        self.waiting: list[SchedulerOutput] = []

    def send(self, output: SchedulerOutput) -> None:
        self.waiting.append(output)

    async def receive(self) -> ModelRunnerOutput:
        return await self._answers.get()

    async def asked(self) -> None:
        """A step waits for its answer."""
        for _ in range(1000):
            if self.waiting:
                return
            await asyncio.sleep(0)
        raise AssertionError("no step was sent")

    async def answer(self) -> None:
        """The oldest step is done, and what follows from it as well."""
        step = self.waiting.pop(0)
        self._answers.put_nowait(
            ModelRunnerOutput(step=step.step, num_sampled_tokens=None, token_ids=[7], timings=self._timings)
        )
        for _ in range(5):
            await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("compute_ns", "is_async", "expected"),
    [
        (SHORT_STEP_NS - 1, True, [2, 3, 3, 3]),
        (SHORT_STEP_NS, True, [2, 2, 2, 2]),
        (SHORT_STEP_NS - 1, False, [1, 1, 1, 1]),
    ],
)
async def test_one_more_step_is_sent_ahead_of_short_ones(compute_ns: int, is_async: bool, expected: list[int]) -> None:
    worker = Answering(compute_ns)
    config = EngineConfig(cache=CacheConfig(block_size=4), scheduler=SchedulerConfig(async_scheduling=is_async))
    core = EngineCore(
        config=config, executor=worker, sizes=CacheSizes(100), max_model_len=64, deliver=lambda result: None
    )
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    core.add(Request(request_id="one", prompt_token_ids=[1, 2], sampling_params=params, max_model_len=64))
    running = asyncio.create_task(core.run())
    await asyncio.sleep(0.01)
    counts = [len(worker.waiting)]
    for _ in expected[1:]:
        await worker.answer()
        counts.append(len(worker.waiting))
    running.cancel()
    assert counts == expected


class Counting(Timeline):
    """Notes the tokens of each step."""

    def __init__(self) -> None:
        self.num_tokens: list[int] = []

    def scheduled(self, output: SchedulerOutput, schedule_ns: int) -> None:
        self.num_tokens.append(output.num_tokens)


async def test_the_step_that_warms_up_is_not_in_the_metrics() -> None:
    worker, timeline = Answering(SHORT_STEP_NS), Counting()
    core = EngineCore(
        config=EngineConfig(cache=CacheConfig(block_size=4)),
        executor=worker,
        sizes=CacheSizes(100),
        max_model_len=64,
        deliver=lambda result: None,
        timeline=timeline,
    )
    running = asyncio.create_task(core.run())
    warming = asyncio.create_task(core.warm_up())
    await worker.asked()
    await worker.answer()
    await warming
    params = SamplingParams(max_tokens=1)
    core.add(Request(request_id="one", prompt_token_ids=[1, 2], sampling_params=params, max_model_len=64))
    await worker.asked()
    running.cancel()
    assert timeline.num_tokens == [2]
