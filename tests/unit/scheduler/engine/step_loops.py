"""A group that is only asked, its step loop, and answers to the steps that it was sent."""

import asyncio
from typing import Any

from pagoda_common.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from pagoda_common.config.lora_config import LoraConfig
from pagoda_common.errors import PagodaError
from pagoda_common.params.lora_adapter import LoraAdapter
from pagoda_scheduler.core.step import ModelRunnerOutput, SchedulerOutput, StepTimings
from pagoda_scheduler.core.step_result import StepResult
from pagoda_scheduler.engine.engine_core import EngineCore
from pagoda_scheduler.kv.cache_group import CacheSizes


class Group:
    """A worker group whose answers the test releases."""

    def __init__(self) -> None:
        self.sent: list[SchedulerOutput] = []
        self.answers: asyncio.Queue[ModelRunnerOutput] = asyncio.Queue()
        self.read: list[tuple[int, str]] = []
        self.errors: list[PagodaError] = []
        """What reading an adapter fails with, one after the other."""
        self.gate = asyncio.Event()
        self.gate.set()

    def send(self, output: SchedulerOutput) -> None:
        self.sent.append(output)

    async def receive(self) -> ModelRunnerOutput:
        return await self.answers.get()

    async def add_lora(self, number: int, adapter: LoraAdapter) -> None:
        self.read.append((number, adapter.name))
        await self.gate.wait()
        if self.errors:
            raise self.errors.pop(0)


def core_of(
    group: Group, delivered: list[StepResult] | None = None, *, config: EngineConfig | None = None, **more: Any
) -> EngineCore:
    return EngineCore(
        config=config or config_of(),
        executor=group,
        sizes=CacheSizes(100),
        max_model_len=64,
        deliver=(delivered if delivered is not None else []).append,
        **more,
    )


def config_of(*, lora: LoraConfig | None = None, **scheduler: Any) -> EngineConfig:
    return EngineConfig(
        cache=CacheConfig(block_size=4), scheduler=SchedulerConfig(**scheduler), lora=lora or LoraConfig()
    )


def answer(output: SchedulerOutput, *, compute_ns: int | None = None, token: int = 5) -> ModelRunnerOutput:
    timings = None if compute_ns is None else StepTimings(prepare_ns=1, forward_ns=compute_ns - 3, sample_ns=2)
    return ModelRunnerOutput(output.step, None, [token] * len(output.slots), timings=timings)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def answer_all(core: EngineCore, group: Group) -> None:
    """Answer every step that is in flight, until the group rests."""
    while len(group.sent) > core.num_steps:
        group.answers.put_nowait(answer(group.sent[core.num_steps]))
        await settle()
