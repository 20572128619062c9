"""Clients of a worker's calls outside of steps: sleep, wake up, other weights."""

import asyncio
import logging
from collections.abc import AsyncIterable, Coroutine, Iterable, Sequence
from typing import Any, Self, TypeVar

import grpc
import grpc.aio

from pagoda.v1 import worker_pb2, worker_pb2_grpc
from pagoda_common.config.checkpoint.weights_source import WeightsSource
from pagoda_common.config.engine_config import EngineConfig
from pagoda_common.config.security_config import SecurityConfig
from pagoda_common.engine.convert import weights_source_to_proto
from pagoda_common.errors import NotReady
from pagoda_common.rpc.channels import connect
from pagoda_common.rpc.service import error_from_rpc
from pagoda_scheduler.rpc.convert import init_device_to_proto
from pagoda_scheduler.rpc.loading_bar import LoadingBar

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

INIT_TIMEOUT_S = 60.0
MOVE_TIMEOUT_S = 600.0
"""Timeout of moving weights to host memory or back, or of reading them from disk."""


class WorkerControl:
    """A client of one worker for one operation (`async with`). Calls raise PagodaError with the worker's reason."""

    def __init__(
        self,
        *,
        config: EngineConfig,
        weights: WeightsSource | None,
        address: str,
        incarnation: int,
        session_epoch: int,
        security: SecurityConfig | None = None,
    ) -> None:
        """`weights`: ordered for the worker, if any."""
        self._config = config
        self._weights = weights
        self._address = address
        self._incarnation = incarnation
        self._epoch = session_epoch
        self._channel = connect(address, security=security)
        self._stub = worker_pb2_grpc.WorkerStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def sleep(self, level: int) -> int:
        """Free memory; returns the bytes freed on the device."""
        request = worker_pb2.WorkerSleepRequest(
            session_epoch=self._epoch, worker_incarnation=self._incarnation, level=level
        )
        try:
            await self._claim()
            return int((await self._stub.Sleep(request, timeout=MOVE_TIMEOUT_S)).freed_bytes)
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error

    async def wake_up(self, *, weights_only: bool) -> None:
        """Restore the weights."""
        request = worker_pb2.WorkerWakeUpRequest(
            session_epoch=self._epoch, worker_incarnation=self._incarnation, weights_only=weights_only
        )
        try:
            await self._claim()
            await self._stub.WakeUp(request, timeout=MOVE_TIMEOUT_S)
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error

    async def prepare(self, source: WeightsSource | None) -> bool:
        """Read weights concurrently with steps; None drops them. False: the worker has no model yet."""
        request = worker_pb2.PrepareWeightsRequest(session_epoch=self._epoch, worker_incarnation=self._incarnation)
        if source is not None:
            request.weights.CopyFrom(weights_source_to_proto(source))
        try:
            status = await self._stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=INIT_TIMEOUT_S)
            if status.session_epoch != self._epoch or not status.HasField("model_info"):
                return False
            await self._follow(self._stub.PrepareWeights(request))
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error
        return True

    async def reload(self, source: WeightsSource) -> None:
        """Change to other weights, at once if they were prepared."""
        request = worker_pb2.WorkerReloadWeightsRequest(
            session_epoch=self._epoch,
            worker_incarnation=self._incarnation,
            weights=weights_source_to_proto(source),
        )
        try:
            await self._follow(self._stub.ReloadWeights(request))
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error

    async def _claim(self) -> None:
        """Claim the worker, which may have registered without an InitDevice call yet."""
        request = init_device_to_proto(self._config, session_epoch=self._epoch, weights=self._weights)
        device = await self._stub.InitDevice(request, timeout=INIT_TIMEOUT_S)
        if device.worker_incarnation != self._incarnation:
            raise NotReady(f"worker at {self._address} was restarted; waiting for its registration")

    async def _follow(self, messages: AsyncIterable[worker_pb2.LoadModelProgress]) -> None:
        bar = LoadingBar()
        async for progress in messages:
            line = bar.advance(progress.loaded_bytes, progress.total_bytes)
            if line is not None:
                logger.info("worker %s: loading weights %s", self._address, line)


class GroupControl:
    """A client of all ranks of a group for one operation (`async with`). Every rank is called, even if others fail.

    Every call raises the PagodaError of the first rank that failed. Ranks then may have different weights until the
    group's next bring-up, which gives all of them the same.
    """

    def __init__(self, ranks: Sequence[WorkerControl]) -> None:
        self._ranks = ranks

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for rank in self._ranks:
            await rank.__aexit__()

    async def sleep(self, level: int) -> int:
        """Free memory; returns the bytes freed on the devices."""
        return sum(await _all(rank.sleep(level) for rank in self._ranks))

    async def wake_up(self, *, weights_only: bool) -> None:
        """Restore the weights."""
        await _all(rank.wake_up(weights_only=weights_only) for rank in self._ranks)

    async def prepare(self, source: WeightsSource | None) -> bool:
        """Read weights concurrently with steps; None drops them. False: a worker has no model yet."""
        return all(await _all(rank.prepare(source) for rank in self._ranks))

    async def reload(self, source: WeightsSource) -> None:
        """Change to other weights, at once if they were prepared."""
        await _all(rank.reload(source) for rank in self._ranks)


async def _all(calls: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """All results; after all have ended, the first failure is raised."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]
