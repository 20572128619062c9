"""GroupClient: the client of a worker group, which brings it up and joins its ranks for the step loop."""

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pagoda.v1 import types_pb2
from pagoda_common.config.checkpoint.weights_source import WeightsSource
from pagoda_common.config.engine_config import EngineConfig
from pagoda_common.params.lora_adapter import LoraAdapter
from pagoda_common.params.structured_outputs import StructuredOutputsParams
from pagoda_scheduler.core.step import ModelRunnerOutput, SchedulerOutput
from pagoda_scheduler.kv.cache_group import CacheGroup, CacheSizes, has_states
from pagoda_scheduler.rpc.convert import cache_groups_from_proto
from pagoda_scheduler.rpc.worker_client import WorkerClient

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class BroughtUp:
    """Measurements from the start of a group."""

    model_info: types_pb2.ModelInfo
    cache_groups: tuple[CacheGroup, ...]
    sizes: CacheSizes
    swap_block_ns: int


class GroupClient:
    """The clients of all ranks, rank 0 first (an engine_core.Executor).

    Every rank gets every step, and the result of a step is rank 0's once all ranks have answered: so a rank that fails,
    hangs or disconnects is detected like a group's only worker.
    """

    def __init__(self, ranks: Sequence[WorkerClient]) -> None:
        self._ranks = ranks
        self._leader, *self._others = ranks

    async def bring_up(self, config: EngineConfig, weights: WeightsSource | None = None) -> BroughtUp:
        """InitDevice, LoadModel, DetermineNumAvailableBlocks, InitializeCache on every rank, then the Execute streams.

        Args:
            weights: to load instead of the model's own.

        Raises:
            PagodaError: a rank refused, failed or disconnected.
            ConfigError: the model has cache groups that this scheduler does not know.
        """
        # Rank 0 reports where the ranks meet, which they do in LoadModel.
        rendezvous = await self._leader.init_device(config, weights)
        await _all(rank.init_device(config, weights, rendezvous=rendezvous) for rank in self._others)
        info, *_ = await _all(rank.load_model() for rank in self._ranks)
        groups = cache_groups_from_proto(info)
        available = await _all(rank.determine_num_available_blocks() for rank in self._ranks)
        sizes = _sizes_of_all(available, num_blocks=config.cache.num_blocks_override)
        swap_block_ns = await _all(rank.initialize_cache(sizes) for rank in self._ranks)
        _log_sizes(sizes, groups, block_size=config.cache.block_size)
        for rank in self._ranks:
            rank.open_stream()
        return BroughtUp(info, groups, sizes, max(swap_block_ns))

    @property
    def num_bytes_sent(self) -> int:
        """Counter: bytes of steps, to all ranks."""
        return sum(rank.num_bytes_sent for rank in self._ranks)

    @property
    def num_bytes_received(self) -> int:
        """Counter: bytes of results, of all ranks."""
        return sum(rank.num_bytes_received for rank in self._ranks)

    def send(self, output: SchedulerOutput) -> None:
        """Send a step to every rank; returns at once."""
        for rank in self._ranks:
            rank.send(output)

    async def receive(self) -> ModelRunnerOutput:
        """The next result.

        Raises:
            PagodaError: a rank's stream ended.
        """
        if not self._others:
            return await self._leader.receive()
        result, *_ = await asyncio.gather(*(rank.receive() for rank in self._ranks))
        return result

    async def hold_constraint(self, params: StructuredOutputsParams) -> None:
        """Make rank 0, which samples for all ranks, compile a constraint and keep it.

        Raises:
            InvalidRequest: the constraint cannot be compiled.
            PagodaError: the worker disconnected.
        """
        await self._leader.hold_constraint(params)

    def release_constraint(self, params: StructuredOutputsParams) -> None:
        """Release a constraint."""
        self._leader.release_constraint(params)

    async def add_lora(self, number: int, adapter: LoraAdapter) -> None:
        """Load an adapter in every rank.

        Raises:
            PagodaError: a rank cannot use the adapter, or does not answer.
        """
        await _all(rank.add_lora(number, adapter) for rank in self._ranks)

    async def close(self) -> None:
        """Cancel the streams and close the channels."""
        for rank in self._ranks:
            await rank.close()


def _sizes_of_all(available: Sequence[CacheSizes], *, num_blocks: int | None) -> CacheSizes:
    """The blocks that fit on every rank; `num_blocks` overrides the number."""
    return CacheSizes(
        num_blocks=num_blocks or min(sizes.num_blocks for sizes in available),
        num_host_blocks=min(sizes.num_host_blocks for sizes in available),
        num_state_snapshots=min(sizes.num_state_snapshots for sizes in available),
        num_host_state_snapshots=min(sizes.num_host_state_snapshots for sizes in available),
    )


def _log_sizes(sizes: CacheSizes, groups: Sequence[CacheGroup], *, block_size: int) -> None:
    if len(groups) == 1 and groups[0].has_blocks:
        tokens = sizes.num_blocks * block_size
        logger.info("KV cache: %d blocks of %d tokens, %d tokens in all", sizes.num_blocks, block_size, tokens)
        return
    if any(group.has_blocks for group in groups):
        names = ", ".join(f"{group.kind} ({group.num_layers} layers)" for group in groups)
        logger.info("KV cache: %d blocks of %d tokens, for layers in groups: %s", sizes.num_blocks, block_size, names)
    if has_states(groups):
        logger.info("recurrent states: %d snapshots", sizes.num_state_snapshots)


async def _all(calls: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """All results; the first failure cancels the other calls.

    Raises:
        PagodaError: that failure.
    """
    tasks: list[asyncio.Task[Result]] = []
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
