"""Ranks of a group as one: every call on each of them, what is true of all, and the first fault of any."""

import asyncio
from typing import Any, cast

import pytest

from pagoda.v1 import types_pb2
from pagoda_common.config.checkpoint.weights_source import WeightsSource
from pagoda_common.config.engine_config import CacheConfig, EngineConfig
from pagoda_common.errors import NotReady, PagodaError
from pagoda_common.params.lora_adapter import LoraAdapter
from pagoda_common.params.structured_outputs import StructuredOutputsParams
from pagoda_scheduler.core.step import SchedulerOutput
from pagoda_scheduler.kv.cache_group import CacheGroup, CacheSizes
from pagoda_scheduler.rpc.group_client import BroughtUp, GroupClient

WEIGHTS = WeightsSource(model="m")
INFO = types_pb2.ModelInfo(model="m")
INFO.cache_groups.add(kind=types_pb2.CACHE_KIND_FULL, num_layers=3)
CONSTRAINT = StructuredOutputsParams(regex="a")


class Rank:
    """A worker's client that notes what it is asked; the call `fails` fails, and `waits` never ends."""

    def __init__(self, number: int, sizes: CacheSizes, *, fails: str = "", waits: str = "") -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.cancelled: list[str] = []
        self.num_bytes_sent, self.num_bytes_received = 10 + number, 100 + number
        self._number = number
        self._sizes = sizes
        self._fails, self._waits = fails, waits

    async def _call(self, name: str, *given: Any) -> None:
        self.asked.append((name, *given))
        if name == self._fails:
            raise NotReady(f"rank {self._number} has no {name}")
        if name == self._waits:
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled.append(name)

    async def init_device(self, config: EngineConfig, weights: Any = None, *, rendezvous: str = "") -> str:
        await self._call("init_device", weights, rendezvous)
        return f"meet at {self._number}"

    async def load_model(self) -> types_pb2.ModelInfo:
        await self._call("load_model")
        return INFO

    async def determine_num_available_blocks(self) -> CacheSizes:
        await self._call("determine")
        return self._sizes

    async def initialize_cache(self, sizes: CacheSizes) -> int:
        await self._call("initialize_cache", sizes)
        return 100 - self._number

    async def receive(self) -> Any:
        await self._call("receive")
        return f"result of {self._number}"

    async def hold_constraint(self, params: Any) -> None:
        await self._call("hold", params)

    async def add_lora(self, number: int, adapter: LoraAdapter) -> None:
        await self._call("add_lora", number, adapter)

    async def close(self) -> None:
        await self._call("close")

    def open_stream(self) -> None:
        self.asked.append(("open_stream",))

    def send(self, output: Any) -> None:
        self.asked.append(("send", output))

    def release_constraint(self, params: Any) -> None:
        self.asked.append(("release", params))


def group_of(*ranks: Rank) -> GroupClient:
    return GroupClient(cast("Any", ranks))


def three(**more: Any) -> list[Rank]:
    """Each has least of something."""
    sizes = (CacheSizes(10, 22, 33, 44), CacheSizes(11, 20, 30, 44), CacheSizes(12, 22, 31, 40))
    return [Rank(number, size, **(more if number == 1 else {})) for number, size in enumerate(sizes)]


@pytest.mark.parametrize(("override", "num_blocks"), [(None, 10), (7, 7)])
async def test_a_group_is_brought_up_with_what_fits_on_every_rank(override: int | None, num_blocks: int) -> None:
    ranks = three()
    config = EngineConfig(cache=CacheConfig(num_blocks_override=override))
    sizes = CacheSizes(num_blocks, 20, 30, 40)
    assert await group_of(*ranks).bring_up(config, WEIGHTS) == BroughtUp(INFO, (CacheGroup("full", 3),), sizes, 100)
    for number, rank in enumerate(ranks):
        assert rank.asked == [
            ("init_device", WEIGHTS, "meet at 0" if number else ""),
            ("load_model",),
            ("determine",),
            ("initialize_cache", sizes),
            ("open_stream",),
        ]


async def test_a_rank_that_fails_fails_the_group_and_no_call_goes_on() -> None:
    first, second = Rank(0, CacheSizes(1), waits="load_model"), Rank(1, CacheSizes(1), fails="load_model")
    with pytest.raises(NotReady, match="rank 1 has no load_model"):
        await group_of(first, second).bring_up(EngineConfig())
    assert first.cancelled == ["load_model"]
    assert ("open_stream",) not in first.asked


async def test_every_rank_gets_a_step_and_rank_0_s_result_counts_when_all_have_answered() -> None:
    ranks = three()
    group, output = group_of(*ranks), cast("SchedulerOutput", object())
    group.send(output)
    assert await group.receive() == "result of 0"
    assert [rank.asked for rank in ranks] == [[("send", output), ("receive",)]] * 3
    assert await group_of(ranks[2]).receive() == "result of 2"
    waiting = asyncio.create_task(group_of(*three(waits="receive")).receive())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done()
    waiting.cancel()
    with pytest.raises(PagodaError, match="rank 1 has no receive"):
        await group_of(*three(fails="receive")).receive()


async def test_constraints_are_rank_0_s_and_adapters_everyone_s() -> None:
    ranks, adapter = three(), LoraAdapter(name="a", path="/p")
    group = group_of(*ranks)
    await group.hold_constraint(CONSTRAINT)
    group.release_constraint(CONSTRAINT)
    await group.add_lora(4, adapter)
    await group.close()
    everyone = [("add_lora", 4, adapter), ("close",)]
    assert [rank.asked for rank in ranks] == [
        [("hold", CONSTRAINT), ("release", CONSTRAINT), *everyone],
        everyone,
        everyone,
    ]
    with pytest.raises(NotReady, match="rank 1 has no add_lora"):
        await group_of(*three(fails="add_lora")).add_lora(4, adapter)


def test_bytes_are_of_all_ranks() -> None:
    group = group_of(*three())
    assert (group.num_bytes_sent, group.num_bytes_received) == (33, 303)
