"""The calls of AsyncLLM that free the engine's memory, restore it, and load other weights."""

import asyncio
import contextlib
from abc import ABC, abstractmethod
from os import PathLike

import grpc.aio

from pagoda.v1 import scheduler_pb2, scheduler_pb2_grpc
from pagoda_common.config.engine_config import EngineConfig
from pagoda_common.engine.client import EngineClient
from pagoda_common.rpc.channels import connect
from pagoda_common.rpc.service import error_from_rpc

CONNECT_TIMEOUT_S = 60.0
"""Seconds for a scheduler to become ready: a running one (`address`), or one that was woken up."""
RPC_TIMEOUT_S = 10.0
"""Seconds for a call that the scheduler answers at once."""
SETTLE_TIMEOUT_S = 2.0
"""Seconds for the engine's load to say that it sleeps."""


class AsyncMemoryCalls(ABC):
    """For a class that has an engine and its configuration."""

    config: EngineConfig

    @property
    @abstractmethod
    def engine(self) -> EngineClient:
        """The engine, once it is started."""

    async def reset_prefix_cache(self) -> int:
        """Drop every cached prefix that no request uses; returns the number of freed blocks.

        Raises:
            PagodaError: the scheduler does not answer.
        """
        async with connect(self.engine.address, security=self.config.security) as channel:
            stub = scheduler_pb2_grpc.SchedulerStub(channel)
            try:
                reply = await stub.ResetPrefixCache(scheduler_pb2.ResetPrefixCacheRequest(), timeout=RPC_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                raise error_from_rpc(error) from None
        return reply.num_blocks

    async def sleep(self, level: int = 1, mode: str = "keep") -> None:
        """Free the engine's memory until `wake_up`; requests wait meanwhile.

        Args:
            level: 1 moves the weights of a GPU to host memory; 2 drops them, and `wake_up` reads them again.
            mode: keep lets open requests continue after `wake_up`, abort ends them.

        Raises:
            PagodaError: a worker failed to sleep; it still serves.
        """
        await self.engine.control.sleep(level=level, mode=mode)
        with contextlib.suppress(TimeoutError):  # until the load says so, too; someone may have woken it already
            async with asyncio.timeout(SETTLE_TIMEOUT_S):
                while not self.engine.is_sleeping:  # noqa: ASYNC110 (the load comes with the next message)
                    await asyncio.sleep(0.005)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Wake up after `sleep`. With the tags ["weights"] only the weights return, and the engine keeps sleeping.

        Raises:
            PagodaError: the weights cannot be restored; the engine keeps sleeping.
        """
        await self.engine.control.wake_up(tags=tags or ())
        if not tags or "kv_cache" in tags:
            await self.engine.wait_until_ready(CONNECT_TIMEOUT_S)

    async def is_sleeping(self) -> bool:
        """Whether requests wait because the engine sleeps."""
        return await self.engine.control.is_sleeping()

    async def reload_weights(self, model: str | PathLike[str], revision: str | None = None) -> None:
        """Serve other weights of the same architecture; open requests continue with them.

        Args:
            model: directory or hub id of the checkpoint, as the workers reach it.

        Raises:
            PagodaError: they cannot be read or do not fit; the old ones still serve.
        """
        await self.engine.control.reload_weights(str(model), revision=revision)
