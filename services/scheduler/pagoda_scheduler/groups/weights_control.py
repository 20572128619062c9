"""Sleep, wake-up and weight reload of the whole engine while requests are open. Worker groups are held, one after the
other where that keeps the engine serving, and their sequences are requeued like those of a lost group."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pagoda_common.config.checkpoint.weights_source import WeightsSource
from pagoda_common.errors import InvalidRequest, NotFound, NotReady, PagodaError
from pagoda_scheduler.engine.engine import Engine
from pagoda_scheduler.engine.engine_core import EngineCore
from pagoda_scheduler.groups.worker_group import WorkerGroup
from pagoda_scheduler.groups.worker_groups import WorkerGroups, asleep, first_of

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

TAGS = ("weights", "kv_cache")
"""Tags of the memory that a sleeping group frees."""
RELOADING = "new weights take the place of those in use"


@dataclass(frozen=True, slots=True)
class Slept:
    """Result of `sleep`."""

    num_groups: int
    freed_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Woken:
    """Result of `wake_up`."""

    num_groups: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Reloaded:
    """Result of `reload`."""

    num_groups: int
    seconds: float
    pause_s: float
    """Maximum seconds for which one group did not serve."""


class WeightsControl:
    """Runs one operation at a time, each to its end, even if its caller disconnects."""

    def __init__(self, *, engine: Engine, groups: WorkerGroups) -> None:
        self._engine = engine
        self._groups = groups
        self._lock = asyncio.Lock()
        self._running: set[asyncio.Task[Any]] = set()

    async def sleep(self, *, level: int = 1, number: int | None = None, is_abort: bool = False) -> Slept:
        """Let groups free their memory; returns when they sleep.

        Args:
            level: 1 keeps the weights in host memory where the device has its own, 2 drops them.
            number: of one group; None: all groups, including those that register before `wake_up`.
            is_abort: end the requests of these groups; otherwise they continue in another group, or later.

        Raises:
            InvalidRequest: the level does not exist.
            NotFound: there is no such group.
            PagodaError: a worker failed; its group continues to serve.
        """
        if level not in (1, 2):
            raise InvalidRequest(f"level is {level}, must be 1 or 2", field="level")
        return await self._whole(self._sleep(level, number, is_abort))

    async def wake_up(self, *, tags: Sequence[str] = (), number: int | None = None) -> Woken:
        """Let sleeping groups serve again; returns when they do.

        Args:
            tags: weights, kv_cache or both (also if empty); with weights alone, the groups load them and stay asleep.

        Raises:
            InvalidRequest: there is no such tag.
            NotFound: there is no such group.
            PagodaError: the weights cannot be restored; the group stays asleep.
        """
        for tag in tags:
            if tag not in TAGS:
                raise InvalidRequest(f"tags has {tag!r}, must be {' or '.join(TAGS)}", field="tags")
        return await self._whole(self._wake_up(number, weights_only=set(tags) == {"weights"}))

    async def reload(self, *, model: str, revision: str | None = None, number: int | None = None) -> Reloaded:
        """Serve other weights of the same architecture; returns when the last group serves them.

        Raises:
            InvalidRequest: model is empty.
            NotFound: there is no such group.
            NotReady: there is no group at all.
            PagodaError: the weights cannot be read or do not fit; the old ones stay in use.
        """
        if not model:
            raise InvalidRequest("model must name a directory or hub id", field="model")
        source = WeightsSource(
            model=model, revision=revision, version=time.time_ns(), is_for_one_group=number is not None
        )
        return await self._whole(self._reload(source, number))

    async def _whole(self, operation: Coroutine[Any, Any, Result]) -> Result:
        task = asyncio.create_task(self._in_turn(operation))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)

    async def _in_turn(self, operation: Coroutine[Any, Any, Result]) -> Result:
        try:
            async with self._lock:
                return await operation
        finally:
            operation.close()  # in case it never ran

    def _targets(self, number: int | None) -> list[WorkerGroup]:
        """The groups of an operation, standby groups first, so that they are ready when a serving group makes room."""
        groups = self._groups.groups
        if number is None:
            return sorted(groups.values(), key=lambda group: (group.state != "standby", group.number))
        if number not in groups:
            known = ", ".join(map(str, sorted(groups))) or "none"
            raise NotFound(f"group is {number}, must be registered: {known}", field="group")
        return [groups[number]]

    # Sleep.

    async def _sleep(self, level: int, number: int | None, is_abort: bool) -> Slept:
        started = time.monotonic()
        targets = self._targets(number)
        if is_abort:
            self._abort({group.core for group in targets if group.core is not None}, is_all=number is None)
        self._groups.orders.sleep(level, number)
        freed = await _all([self._put_to_sleep(group, level) for group in targets])
        slept = Slept(len(targets), sum(freed), time.monotonic() - started)
        logger.info("%d groups sleep at level %d: %.0f MiB freed", len(targets), level, slept.freed_bytes / 2**20)
        return slept

    def _abort(self, cores: set[EngineCore], *, is_all: bool) -> None:
        open_requests = self._engine.requests.items()
        self._engine.abort([request_id for request_id, each in open_requests if is_all or each.core in cores])

    async def _put_to_sleep(self, group: WorkerGroup, level: int) -> int:
        before = group.sleep_level
        group.sleep_level = max(before, level)
        group.hold.want(asleep(level))  # for all groups, before the first is called
        await first_of(group.hold.wait_at_rest(), group.lost.wait())
        freed = 0
        try:
            async with self._groups.control(group) as control:
                freed = await _unless_lost(group, control.sleep(level))
        except PagodaError:
            if not group.lost.is_set():
                group.sleep_level = before
                self._groups.orders.sleep(before, group.number)
                if not before:
                    group.hold.end()
                raise
        if not group.lost.is_set():
            group.state = "sleeping"
            self._engine.announce()
        return freed

    async def _wake_up(self, number: int | None, *, weights_only: bool) -> Woken:
        started = time.monotonic()
        targets = [group for group in self._targets(number) if group.sleep_level]
        if not weights_only:
            self._groups.orders.sleep(0, number)
        await _all([self._wake(group, weights_only) for group in targets])
        return Woken(len(targets), time.monotonic() - started)

    async def _wake(self, group: WorkerGroup, weights_only: bool) -> None:
        try:
            async with self._groups.control(group) as control:
                await _unless_lost(group, control.wake_up(weights_only=weights_only))
        except PagodaError:
            if not group.lost.is_set():
                self._groups.orders.sleep(group.sleep_level, group.number)
            raise
        if weights_only:
            return
        group.state = "waking"
        try:
            await self._end_hold(group)
        finally:
            group.sleep_level = 0

    # Weights.

    async def _reload(self, source: WeightsSource, number: int | None) -> Reloaded:
        started = time.monotonic()
        targets = self._targets(number)
        if not targets:
            raise NotReady(f"there is no worker: {self._engine.not_ready_reason}", retry_after_s=1)
        try:
            has_model = await _all([self._prepare(group, source) for group in targets])
        except PagodaError:
            await asyncio.gather(*(self._prepare(group, None) for group in targets), return_exceptions=True)
            raise
        before = self._groups.orders.weights_orders()
        self._groups.orders.use_weights(source, number)
        pauses: list[float] = []
        for group, is_prepared in zip(targets, has_model, strict=True):
            try:
                pauses.append(await self._change_over(group, source if is_prepared else None))
            except PagodaError as error:
                if not pauses:
                    self._groups.orders.restore_weights_orders(before)
                await self._end_hold_if_awake(group)
                done = f" ({len(pauses)} of {len(targets)} groups hold the new weights)" if pauses else ""
                raise PagodaError(f"group {group.number}: {error.message}{done}", code=error.code) from error
        reloaded = Reloaded(len(pauses), time.monotonic() - started, max(pauses))
        logger.info("%d groups serve the weights of %s, loaded in %.1f s", len(pauses), source.model, reloaded.seconds)
        return reloaded

    async def _prepare(self, group: WorkerGroup, source: WeightsSource | None) -> bool:
        async with self._groups.control(group) as control:
            return await _unless_lost(group, control.prepare(source))

    async def _change_over(self, group: WorkerGroup, source: WeightsSource | None) -> float:
        """Change one group over to the new weights (None: it gets them when it loads its model); returns the seconds
        for which it did not serve.

        Raises:
            PagodaError: the change failed; the group is still held.
        """
        started = time.monotonic()
        if not group.sleep_level:
            group.hold.want(RELOADING)
            await first_of(group.hold.wait_at_rest(), group.lost.wait())
            group.state = "reloading"
        if source is not None:
            async with self._groups.control(group) as control:
                await _unless_lost(group, control.reload(source))
        if not group.sleep_level:
            await self._end_hold(group)
        return time.monotonic() - started

    async def _end_hold_if_awake(self, group: WorkerGroup) -> None:
        """Let the group serve again after a failure, if it can."""
        if not group.sleep_level and group.hold.is_wanted:
            with contextlib.suppress(PagodaError):
                await self._end_hold(group)

    async def _end_hold(self, group: WorkerGroup) -> None:
        """Let a held group serve, and wait until it does."""
        group.settled.clear()
        group.hold.end()
        await first_of(group.settled.wait(), group.lost.wait())
        if group.lost.is_set():
            raise NotReady(
                f"the worker of group {group.number} was lost; the change takes effect when the worker is back"
            )
        if group.error is not None:
            raise group.error


async def _unless_lost(group: WorkerGroup, call: Coroutine[Any, Any, Result]) -> Result:
    """The result of a call to the group's worker; NotReady as soon as the worker is lost."""
    task = asyncio.create_task(call)
    try:
        await first_of(task, group.lost.wait())
    finally:
        if not task.done():
            task.cancel()
    if not task.done() or task.cancelled():
        raise NotReady(f"the worker of group {group.number} was lost")
    return task.result()


async def _all(operations: list[Coroutine[Any, Any, Result]]) -> list[Result]:
    """All results; after all have ended, the first failure is raised.

    Raises:
        PagodaError: that failure.
    """
    results = await asyncio.gather(*operations, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]
