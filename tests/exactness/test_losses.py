"""Models whose layers keep different things of a sequence: streams outlive a lost worker, a lost scheduler and sleep.

In one process, where a service is lost with its sockets; tests/process/failures kills processes.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from pagoda_common.config.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from pagoda_common.engine.client import EngineClient, EngineRequest
from pagoda_common.params.sampling_params import SamplingParams
from tests.exactness.conftest import NUM_TOKENS as NUM_REFERENCE_TOKENS
from tests.exactness.conftest import Reference
from tests.harness.engine import running_worker
from tests.harness.scheduler import running_scheduler

FAMILIES = (
    *("DeepseekV3ForCausalLM", "FalconH1ForCausalLM", "Lfm2MoeForCausalLM", "Llama4ForCausalLM"),
    *("Gemma3nForCausalLM", "Mamba2ForCausalLM"),
)
"""Latents, Mamba-2 beside attention, short convolutions, chunks, caches of other layers, states alone. Windows with
sinks and the delta rule are those of tests/process/failures/test_cache_groups.py."""
NUM_TOKENS = 150
ASKED = ((4, 0.0), (5, 0.0), (3, 1.0), (5, 1.0))
"""Numbers of prompts of 33, 300, 17 and 300 tokens, and temperatures."""


class Services:
    """A scheduler on one port and its worker, each of which can be lost and replaced."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._scheduler, self._worker = AsyncExitStack(), AsyncExitStack()
        self.address = ""

    async def start_scheduler(self) -> None:
        port = int(self.address.rpartition(":")[2] or 0)
        running = await self._scheduler.enter_async_context(running_scheduler(self._config, port=port))
        self.address = running.address

    async def start_worker(self) -> None:
        await self._worker.enter_async_context(running_worker(self.address))

    async def replace_scheduler(self) -> None:
        await self._scheduler.aclose()
        await self.start_scheduler()

    async def replace_worker(self) -> None:
        await self._worker.aclose()
        await self.start_worker()

    async def close(self) -> None:
        await self._worker.aclose()
        await self._scheduler.aclose()


@asynccontextmanager
async def running_services(reference: Reference) -> AsyncIterator[tuple[Services, EngineClient]]:
    config = EngineConfig(
        model=ModelConfig(model=str(reference.directory), dtype="float32", device="cpu"),
        cache=CacheConfig(kv_cache_memory_bytes=64 * 2**20, snapshot_interval=64),
        scheduler=SchedulerConfig(max_num_seqs=8),
    )
    services = Services(config)
    await services.start_scheduler()
    await services.start_worker()
    client = EngineClient(address=services.address)
    await client.start()
    try:
        await client.wait_until_ready(240)
        yield services, client
    finally:
        await client.close()
        await services.close()


class Streams:
    """A request of each of ASKED, at once."""

    def __init__(self, client: EngineClient, prompts: list[list[int]], name: str) -> None:
        self.tokens: list[list[int]] = [[] for _ in ASKED]
        self._client = client
        self._tasks = [
            asyncio.create_task(self._follow(f"{name}-{place}", place, prompts[number], temperature))
            for place, (number, temperature) in enumerate(ASKED)
        ]

    async def _follow(self, name: str, place: int, prompt: list[int], temperature: float) -> None:
        params = SamplingParams(temperature=temperature, seed=5, max_tokens=NUM_TOKENS, ignore_eos=True)
        request = EngineRequest(request_id=name, prompt_token_ids=prompt, sampling_params=params, eos_token_ids=())
        stream = self._client.submit(request)
        while not stream.is_finished:
            for output in await stream.get():
                assert output.offset == len(self.tokens[place]) or not output.token_ids
                self.tokens[place] += output.token_ids

    async def reach(self, num_tokens: int) -> None:
        """Return when each has so many tokens, and none has all."""
        async with asyncio.timeout(240):
            while min(map(len, self.tokens)) < num_tokens:
                await asyncio.sleep(0)
                for task in self._tasks:
                    if task.done():
                        task.result()
        assert max(map(len, self.tokens)) < NUM_TOKENS, "they are not done yet"

    async def end(self) -> list[list[int]]:
        async with asyncio.timeout(240):
            await asyncio.gather(*self._tasks)
        return self.tokens


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, reference_of: Callable[..., Reference]) -> Reference:
    return reference_of(request.param)


async def test_streams_go_on_where_they_were(family: Reference) -> None:
    async with running_services(family) as (services, client):

        async def sleep() -> None:
            await client.control.sleep()
            await client.control.wake_up()

        undisturbed = await Streams(client, family.prompts, "undisturbed").end()
        for place, (number, temperature) in enumerate(ASKED):
            if temperature == 0:
                assert undisturbed[place][:NUM_REFERENCE_TOKENS] == family.outputs[number]
        streams = Streams(client, family.prompts, "disturbed")
        for num_tokens, disturb in ((20, services.replace_worker), (60, sleep), (100, services.replace_scheduler)):
            await streams.reach(num_tokens)
            for tokens, right in zip(map(list, streams.tokens), undisturbed, strict=True):
                assert tokens == right[: len(tokens)], f"before token {num_tokens}"
            await disturb()
        assert await streams.end() == undisturbed
        assert client.num_losses == 1
