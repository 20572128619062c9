"""Registration: keeps this worker announced at its scheduler, for ever, whoever starts first."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

import grpc
import grpc.aio

from pagoda.v1 import scheduler_pb2, scheduler_pb2_grpc
from pagoda_common.channels import Connection
from pagoda_common.security_config import SecurityConfig

logger = logging.getLogger(__name__)

HEARTBEAT_PERIOD_S = 1.0
RETRY_S = 0.1
"""First pause before the next attempt; doubles up to MAX_RETRY_S."""
MAX_RETRY_S = 0.3


class Registration:
    """One RegisterWorker stream after another."""

    def __init__(
        self,
        *,
        scheduler: str,
        identity: scheduler_pb2.WorkerIdentity,
        last_step: Callable[[], int],
        security: SecurityConfig | None = None,
    ) -> None:
        """Raises ConfigError when `security` does not allow the address, or a file of its cannot be used."""
        self._scheduler = scheduler
        self._connection = Connection(scheduler, security=security)
        self._identity = identity
        self._last_step = last_step

    async def run(self) -> None:
        """Register, stay registered, and begin again whenever the stream ends. Until cancelled."""
        pause, was_told = RETRY_S, False
        try:
            while True:
                stub = scheduler_pb2_grpc.SchedulerStub(self._connection.renew())
                try:
                    async for response in stub.RegisterWorker(self._messages()):
                        logger.info("registered at %s, session epoch %d", self._scheduler, response.session_epoch)
                        pause, was_told = RETRY_S, False
                    reason = "the scheduler ended the stream"
                except grpc.aio.AioRpcError as error:
                    reason = f"{error.code().name}: {error.details()}"
                if not was_told:
                    logger.warning("not registered at %s (%s); trying again", self._scheduler, reason)
                    was_told = True
                await asyncio.sleep(pause)
                pause = min(2 * pause, MAX_RETRY_S)
        finally:
            await self._connection.close()

    async def _messages(self) -> AsyncIterator[scheduler_pb2.WorkerRegistration]:
        yield scheduler_pb2.WorkerRegistration(identity=self._identity)
        while True:
            await asyncio.sleep(HEARTBEAT_PERIOD_S)
            heartbeat = scheduler_pb2.WorkerHeartbeat(last_step=self._last_step())
            yield scheduler_pb2.WorkerRegistration(heartbeat=heartbeat)
