"""WorkerGroups: follows worker groups from registration to loss: brings each up, lets it serve, requeues its requests
at the end."""

import asyncio
import logging
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Coroutine
from contextlib import aclosing, asynccontextmanager
from typing import Any

from pagoda.v1 import scheduler_pb2, types_pb2
from pagoda_common.config.engine_config import EngineConfig
from pagoda_common.config.lora_config import CAPABILITY as LORA_CAPABILITY
from pagoda_common.config.speculative_config import CAPABILITY
from pagoda_common.engine.convert import weights_source_from_proto
from pagoda_common.errors import Code, InvalidRequest, NotReady, PagodaError
from pagoda_common.params.structured_outputs import HOLD_CAPABILITY
from pagoda_common.process.logging import log_life
from pagoda_scheduler.engine.engine import Engine
from pagoda_scheduler.engine.engine_core import EngineCore
from pagoda_scheduler.groups.group_orders import GroupOrders
from pagoda_scheduler.groups.worker_group import Rank, WorkerGroup
from pagoda_scheduler.observability.timeline import Timeline
from pagoda_scheduler.observability.traces import TracedTimeline
from pagoda_scheduler.rpc import heartbeats
from pagoda_scheduler.rpc.group_client import GroupClient
from pagoda_scheduler.rpc.worker_client import WorkerClient
from pagoda_scheduler.rpc.worker_control import GroupControl, WorkerControl

logger = logging.getLogger(__name__)

REGISTRATION_GRACE_S = 2.0
"""Seconds in which a worker whose registration broke may come back; it continues to compute meanwhile."""
LEAVE_POLL_S = 0.02
RETRY_S = 0.5
"""Seconds before a registered worker is brought up again; doubles up to MAX_RETRY_S."""
MAX_RETRY_S = 10.0


LASTING = ("loading", "standby", "serving", "sleeping", "waking", "reloading")
"""States in which a worker continues while its registration is cut off."""


class WorkerGroups:
    """All registered groups, each with one task."""

    def __init__(
        self, *, config: EngineConfig, engine: Engine, session_epoch: int, timeline: Timeline | None = None
    ) -> None:
        self.model_info: types_pb2.ModelInfo | None = None
        """The model, once a group has loaded it."""
        self.groups: dict[int, WorkerGroup] = {}
        self.orders = GroupOrders()
        self._config = config
        self._engine = engine
        self._epoch = session_epoch
        self._timeline = timeline
        self._has_vacancy = asyncio.Event()
        self._registrations: set[asyncio.Timeout] = set()
        """Deadlines of the open streams."""

    async def register(self, messages: AsyncIterable[scheduler_pb2.WorkerRegistration]) -> None:
        """Serve one worker's registration until its stream ends, or the worker has left.

        Raises:
            InvalidRequest: the first message is not an identity, or the group shape is not supported.
            ConfigError: the worker can only be reached in plaintext over a network.
            NotReady: no heartbeat came for too long.
        """
        group: WorkerGroup | None = None
        rank: Rank | None = None
        stream = object()
        is_cut_off = True
        scope = asyncio.timeout(None)

        def is_idle() -> bool:
            return group is not None and group.is_idle

        try:
            async with self._ended_by_close(scope), aclosing(heartbeats.in_time(aiter(messages), is_idle)) as beating:
                async for message in beating:
                    if group is None or rank is None:
                        group, rank = self._enter(message.identity)
                        rank.stream = stream
                    elif message.HasField("leaving"):
                        await self._take_leave(group, rank, message.leaving.timeout_s)
                        is_cut_off = False
                        return
        except NotReady:
            is_cut_off = False
            raise
        finally:
            if group is not None and rank is not None and rank.stream is stream:
                self._lose_sight(group, rank, is_cut_off=is_cut_off)

    @asynccontextmanager
    async def _ended_by_close(self, scope: asyncio.Timeout) -> AsyncIterator[None]:
        """While within, `close` ends the wait without an error, so that the worker sees a regular end."""
        self._registrations.add(scope)
        try:
            async with scope:
                yield
        except TimeoutError:
            if not scope.expired():
                raise
        finally:
            self._registrations.discard(scope)

    def _lose_sight(self, group: WorkerGroup, rank: Rank, *, is_cut_off: bool) -> None:
        """A registration has ended. A worker that continues to compute may only be cut off for a moment."""
        if is_cut_off and group.state in LASTING and not group.lost.is_set():
            rank.grace = asyncio.get_running_loop().call_later(REGISTRATION_GRACE_S, group.drop, rank)
        else:
            group.drop(rank)

    async def _take_leave(self, group: WorkerGroup, rank: Rank, timeout_s: float) -> None:
        """Give the rank's group no new requests, and wait at most `timeout_s` for its running ones."""
        logger.info("%s: worker at %s is leaving", group.name_of(rank), rank.identity.address)
        rank.is_leaving = True
        was_serving, core = group.state == "serving", group.core
        group.state = "leaving"
        if core is None or not was_serving:
            return
        self._engine.retire_core(core, f"the worker of group {group.number} is leaving")
        self._has_vacancy.set()
        deadline = time.monotonic() + timeout_s
        while group.core is core and core.scheduler.has_unfinished_requests and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(LEAVE_POLL_S)

    def _enter(self, identity: scheduler_pb2.WorkerIdentity) -> tuple[WorkerGroup, Rank]:
        if not identity.address:
            raise InvalidRequest("the first message must be an identity with an address", field="identity")
        self._config.security.check_dial(identity.address, name="identity.address")
        world_size = max(1, identity.world_size)
        if identity.rank >= world_size:
            raise InvalidRequest(f"rank is {identity.rank}, must be below world_size, {world_size}", field="rank")
        if world_size > 1 and not identity.HasField("group"):
            raise InvalidRequest(f"group is not set, must be the same for all {world_size} ranks", field="group")
        for group in self.groups.values():
            for rank in group.members:
                if _is_same(rank.identity, identity) and not group.lost.is_set():
                    logger.info("%s: worker at %s is registered again", group.name_of(rank), identity.address)
                    rank.come_back()
                    return group, rank
        rank = Rank.of(identity)
        group = self._group_for(identity, world_size)
        group.put(rank)
        self._learn(group, identity)
        name, device = group.name_of(rank), identity.device
        log_life(logger, "%s: worker at %s (%s) has registered", name, identity.address, device)
        if rank.address != identity.address:
            log_life(logger, "%s: the scheduler reaches the worker at %s", name, rank.address)
        if group.task is None:
            group.task = asyncio.create_task(self._drive(group))
            group.task.add_done_callback(lambda _: self._remove(group))
        return group, rank

    def _group_for(self, identity: scheduler_pb2.WorkerIdentity, world_size: int) -> WorkerGroup:
        """The group of a worker: that of its other ranks, else a new one that replaces an older one."""
        number = identity.group if identity.HasField("group") else self._free_number()
        group = self.groups.get(number)
        if group is not None:
            if group.world_size == world_size > 1 and not group.lost.is_set():
                return group
            logger.warning("group %d: worker %s replaces an older one", number, identity.address)
            group.lost.set()
        group = self.groups[number] = WorkerGroup(number, world_size)
        return group

    @property
    def sleep_level(self) -> int:
        """0 unless a group sleeps; 1 if one of the sleeping groups keeps its weights in host memory."""
        levels = [group.sleep_level for group in self.groups.values() if group.sleep_level]
        return min(levels, default=0 if self.groups else self.orders.sleep_level_of_all)

    def _learn(self, group: WorkerGroup, identity: scheduler_pb2.WorkerIdentity) -> None:
        """Take over orders that the worker knows, and apply the group's orders."""
        number = group.number
        weights = weights_source_from_proto(identity.weights) if identity.HasField("weights") else None
        self.orders.learn(number, incarnation=identity.incarnation, sleep_level=identity.sleep_level, weights=weights)
        group.sleep_level = self.orders.sleep_level(number)
        if group.sleep_level:
            group.hold.want(asleep(group.sleep_level))

    def control(self, group: WorkerGroup) -> GroupControl:
        """A client for calls to the group's workers outside of steps; the caller closes it."""
        return GroupControl(
            [
                WorkerControl(
                    config=self._config,
                    weights=self.orders.weights(group.number),
                    address=rank.address,
                    incarnation=rank.identity.incarnation,
                    session_epoch=self._epoch,
                    security=self._config.security,
                )
                for rank in group.members
            ]
        )

    def _free_number(self) -> int:
        return next(number for number in range(len(self.groups) + 1) if number not in self.groups)

    def _remove(self, group: WorkerGroup) -> None:
        for rank in group.members:
            group.drop(rank)
        if self.groups.get(group.number) is group:
            del self.groups[group.number]

    async def _drive(self, group: WorkerGroup) -> None:
        """Bring a group up and let it serve, again and again until it is lost."""
        pause = RETRY_S
        while not group.lost.is_set():
            has_new_ranks = group.changed.is_set()
            group.changed.clear()
            if has_new_ranks and group.sleep_level:
                await self._stay_asleep(group)
            if group.hold.is_wanted:
                if group.sleep_level:
                    group.state = "sleeping"
                self._note(group.hold.reason)
                await first_of(group.hold.rest(), group.lost.wait(), group.changed.wait())
                continue
            if group.missing:
                await self._wait_for_ranks(group)
                continue
            serve = asyncio.create_task(self._serve(group))
            await first_of(serve, group.lost.wait(), group.changed.wait(), group.hold.wait_wanted())
            was_serving = group.state == "serving"
            if not serve.done():
                serve.cancel()
            await asyncio.wait([serve])
            error = None if serve.cancelled() else serve.exception()
            for rank in group.members:  # ranks that are cut off in both directions, or leaving
                if (rank.grace is not None and not group.hold.is_wanted) or rank.is_leaving:
                    group.drop(rank)
            group.state = "lost" if group.lost.is_set() else "registered"
            if group.lost.is_set():
                return
            if group.hold.is_wanted or group.missing:
                continue
            pause = RETRY_S if was_serving else min(2 * pause, MAX_RETRY_S)
            reason = error or f"worker group {group.number} has a new rank"
            logger.warning("group %d: %s; trying again in %.1f s", group.number, reason, pause)
            group.settle(group.state, reason if isinstance(reason, PagodaError) else PagodaError(str(reason)))
            await first_of(group.lost.wait(), group.hold.wait_wanted(), timeout_s=pause)

    async def _wait_for_ranks(self, group: WorkerGroup) -> None:
        """Return when a rank was added or lost, or the group is held."""
        ranks = ", ".join(map(str, group.missing))
        reason = f"worker group {group.number} waits for rank {ranks} of {group.world_size}"
        logger.info("%s", reason)
        self._note(reason)
        group.settle("waiting", NotReady(reason))
        await first_of(group.changed.wait(), group.lost.wait(), group.hold.wait_wanted())

    async def _stay_asleep(self, group: WorkerGroup) -> None:
        """Put a worker that joins a sleeping group to sleep."""
        try:
            async with self.control(group) as control:
                await first_of(control.sleep(group.sleep_level), group.lost.wait())
        except PagodaError as error:
            logger.warning("group %d: %s", group.number, error.message)

    async def _serve(self, group: WorkerGroup) -> None:
        """Bring the group up and step until something fails.

        Raises:
            PagodaError: the reason why it no longer serves.
        """
        client = GroupClient(
            [
                WorkerClient(
                    address=rank.address,
                    incarnation=rank.identity.incarnation,
                    session_epoch=self._epoch,
                    security=self._config.security,
                )
                for rank in group.members
            ]
        )
        core: EngineCore | None = None
        run: asyncio.Task[None] | None = None
        reason, is_fault = f"worker group {group.number} was lost", True
        try:
            group.state = "loading"
            self._note("the model is being loaded")
            brought_up = await client.bring_up(self._config, self.orders.weights(group.number))
            longest = brought_up.model_info.max_model_len
            core = EngineCore(
                config=self._config,
                executor=client,
                sizes=brought_up.sizes,
                groups=brought_up.cache_groups,
                swap_block_ns=brought_up.swap_block_ns,
                can_speculate=all(CAPABILITY in rank.identity.capabilities for rank in group.members),
                compiler=client if HOLD_CAPABILITY in group.members[0].identity.capabilities else None,
                can_adapt=all(LORA_CAPABILITY in rank.identity.capabilities for rank in group.members),
                max_model_len=brought_up.model_info.max_model_len,
                eos_token_ids=brought_up.model_info.eos_token_ids,
                vocab_size=brought_up.model_info.vocab_size,
                deliver=self._engine.deliver,
                timeline=self._timeline_of_group(),
            )
            group.core = core
            run = asyncio.create_task(core.run())
            await _first(core.warm_up(), run)
            self.model_info = brought_up.model_info
            self.model_info.max_model_len = core.scheduler.max_model_len
            await _first(self._wait_for_place(group), run)
            if self._config.model.fits_max_model_len:
                fitting = core.scheduler.max_model_len
                logger.info("max_model_len auto: %d of the checkpoint's %d tokens of context fit", fitting, longest)
            group.settle("serving")
            logger.info("group %d: serving %s", group.number, self.model_info.model)
            self._engine.add_core(core)
            await run
        except PagodaError as error:
            reason = error.message if core is None else f"worker group {group.number} was lost: {error.message}"
            raise
        except asyncio.CancelledError:
            if group.hold.is_wanted and not group.lost.is_set():
                reason, is_fault = group.hold.reason, False
            raise
        except ExceptionGroup as errors:
            reason = f"worker group {group.number} was lost: {errors.exceptions[0]}"
            if not isinstance(errors.exceptions[0], PagodaError):
                logger.exception("group %d: the step loop failed", group.number, exc_info=errors)
            raise PagodaError(reason, code=Code.UNAVAILABLE) from errors
        finally:
            # Do what must not be lost before the first await: this task may be cancelled again at any await.
            group.core = None
            if run is not None:
                run.cancel()
            if core is not None:
                self._engine.remove_core(core, reason, is_fault=is_fault and group.state != "leaving")
                self._has_vacancy.set()
            self._note(reason)
            if run is not None:
                await asyncio.wait([run])
            await client.close()

    def _timeline_of_group(self) -> Timeline | None:
        """The timeline of one group: steps are numbered per group."""
        traces = self._engine.traces
        return self._timeline if traces is None else TracedTimeline(inner=self._timeline or Timeline(), traces=traces)

    async def _wait_for_place(self, group: WorkerGroup) -> None:
        """Wait in standby while as many groups serve as max_serving_groups allows."""
        bound = self._config.scheduler.max_serving_groups
        while bound is not None and len(self._engine.cores) >= bound:
            if group.state != "standby":
                group.settle("standby")
                logger.info("group %d: standing by", group.number)
            self._has_vacancy.clear()
            await self._has_vacancy.wait()

    def _note(self, reason: str) -> None:
        if not self._engine.cores:
            self._engine.not_ready_reason = reason
            self._engine.announce()

    async def close(self) -> None:
        """Close all groups."""
        groups = list(self.groups.values())
        for group in groups:
            group.lost.set()
        for scope in self._registrations:
            scope.reschedule(asyncio.get_running_loop().time())
        tasks = [group.task for group in groups if group.task is not None]
        if tasks:
            await asyncio.wait(tasks)


def _is_same(one: scheduler_pb2.WorkerIdentity, other: scheduler_pb2.WorkerIdentity) -> bool:
    """Whether both are the same process, which may have been put to sleep or given other weights in between."""
    return (one.incarnation, one.address) == (other.incarnation, other.address)


def asleep(level: int) -> str:
    """The reason why a sleeping group does not serve."""
    return f"the model sleeps (level {level}): wake it up with POST /wake_up or Scheduler.WakeUp"


async def first_of(*awaitables: Awaitable[Any], timeout_s: float | None = None) -> None:
    """Return when one of the awaitables is done, and cancel the other coroutines; tasks stay their owner's.

    Raises:
        Whatever the finished coroutine raises.
    """
    tasks = {asyncio.ensure_future(one): one for one in awaitables}
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED, timeout=timeout_s)
    finally:
        for task, one in tasks.items():
            if task is not one:
                task.cancel()
    for task, one in tasks.items():
        if task is not one and task.done():
            task.result()


async def _first(coroutine: Coroutine[Any, Any, None], run: asyncio.Task[None]) -> None:
    """Await `coroutine`, unless `run` fails first. Cancelling the caller cancels `coroutine`, but not `run`."""
    task = asyncio.ensure_future(coroutine)
    try:
        await asyncio.wait([task, run], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            await run
    finally:
        task.cancel()
    await task
