"""Registration: keeps this worker registered at its scheduler, whichever of the two starts first."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable

import grpc
import grpc.aio

from pagoda.v1 import scheduler_pb2, scheduler_pb2_grpc
from pagoda_common.config.lora_config import CAPABILITY as LORA_CAPABILITY
from pagoda_common.config.security_config import SecurityConfig
from pagoda_common.config.speculative_config import CAPABILITY
from pagoda_common.params.structured_outputs import HOLD_CAPABILITY
from pagoda_common.process.logging import log_life
from pagoda_common.rpc.channels import Connection

logger = logging.getLogger(__name__)

CAPABILITIES = ("swap", CAPABILITY, HOLD_CAPABILITY, LORA_CAPABILITY)
"""Optional features of this worker."""
HEARTBEAT_PERIOD_S = 1.0
RETRY_S = 0.1
"""Seconds before the next attempt; doubles up to MAX_RETRY_S."""
MAX_RETRY_S = 0.3
LEAVE_MARGIN_S = 2.0
"""Seconds beyond the drain timeout for the scheduler to release the worker."""


class Registration:
    """Opens one RegisterWorker stream after another."""

    def __init__(
        self,
        *,
        scheduler: str,
        identity: scheduler_pb2.WorkerIdentity,
        last_step: Callable[[], int],
        refresh: Callable[[scheduler_pb2.WorkerIdentity], None] = lambda identity: None,
        security: SecurityConfig | None = None,
    ) -> None:
        """
        Args:
            refresh: updates the identity before it is sent.

        Raises:
            ConfigError: `security` does not allow the address, or one of its files cannot be used.
        """
        self._scheduler = scheduler
        self._connection = Connection(scheduler, security=security)
        self._identity = identity
        self._last_step = last_step
        self._refresh = refresh
        self._leaving = asyncio.Event()
        self._timeout_s = 0.0
        self._can_leave = False
        """Whether the worker is registered at a scheduler that can release it."""
        self._is_over = asyncio.Event()

    async def leave(self, timeout_s: float) -> None:
        """Ask the scheduler to release this worker; returns when it has, or shortly after `timeout_s`.

        Returns at once if no scheduler would answer.
        """
        if not self._can_leave:
            return
        self._timeout_s = timeout_s
        self._leaving.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s + LEAVE_MARGIN_S):
                await self._is_over.wait()

    async def run(self) -> None:
        """Register, and register again whenever the stream ends, until cancelled or ended by `leave`."""
        pause, was_told = RETRY_S, False
        try:
            while not self._leaving.is_set():
                stub = scheduler_pb2_grpc.SchedulerStub(self._connection.renew())
                try:
                    async for response in stub.RegisterWorker(self._messages()):
                        self._can_leave = response.can_leave
                        log_life(logger, "registered at %s, session epoch %d", self._scheduler, response.session_epoch)
                        pause, was_told = RETRY_S, False
                    reason = ""
                except grpc.aio.AioRpcError as error:
                    reason = f"{error.code().name}: {error.details()}"
                self._can_leave = False
                if self._leaving.is_set():
                    break
                if not reason:  # it is about to end, and we may be, too
                    log_life(logger, "the scheduler at %s has ended; trying again", self._scheduler)
                elif not was_told:
                    logger.warning("not registered at %s (%s); trying again", self._scheduler, reason)
                    was_told = True
                await asyncio.sleep(pause)
                pause = min(2 * pause, MAX_RETRY_S)
        finally:
            self._is_over.set()
            await self._connection.close()

    async def _messages(self) -> AsyncIterator[scheduler_pb2.WorkerRegistration]:
        self._refresh(self._identity)
        yield scheduler_pb2.WorkerRegistration(identity=self._identity)
        while not self._leaving.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_PERIOD_S):
                    await self._leaving.wait()
            heartbeat = scheduler_pb2.WorkerHeartbeat(last_step=self._last_step())
            yield scheduler_pb2.WorkerRegistration(heartbeat=heartbeat)
        yield scheduler_pb2.WorkerRegistration(leaving=scheduler_pb2.WorkerLeaving(timeout_s=self._timeout_s))
        await asyncio.Event().wait()  # ending our half would look like the end of the worker
