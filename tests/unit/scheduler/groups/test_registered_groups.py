"""Registered groups one by one: their ranks, their numbers, what they are told to do, and how a worker leaves."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pagoda.v1 import scheduler_pb2
from pagoda_common.config.engine_config import EngineConfig
from pagoda_common.errors import NotReady, PagodaError
from pagoda_scheduler.engine.engine import Engine
from pagoda_scheduler.groups import worker_groups as module
from pagoda_scheduler.groups.worker_group import Rank, WorkerGroup
from pagoda_scheduler.groups.worker_groups import LASTING, WorkerGroups
from pagoda_scheduler.observability.timeline import Timeline
from pagoda_scheduler.observability.traces import TracedTimeline, Traces


def identity(incarnation: int = 1, **more: Any) -> scheduler_pb2.WorkerIdentity:
    return scheduler_pb2.WorkerIdentity(address=f"127.0.0.1:{incarnation}", incarnation=incarnation, **more)


def rank(number: int = 0, **more: Any) -> Rank:
    return Rank(identity(number + 1, rank=number, **more), address="")


def make_groups(engine: Engine | None = None, **more: Any) -> WorkerGroups:
    engine = engine or Engine(config=EngineConfig())
    return WorkerGroups(config=engine.config, engine=engine, session_epoch=7, **more)


def test_the_numbers_are_those_of_the_docs() -> None:
    assert (module.REGISTRATION_GRACE_S, module.RETRY_S, module.MAX_RETRY_S, module.LEAVE_POLL_S) == (
        2.0,
        0.5,
        10.0,
        0.02,
    )
    assert set(LASTING) == {"loading", "standby", "serving", "sleeping", "waking", "reloading"}


def test_a_group_is_whole_with_all_its_ranks_and_lost_with_the_last() -> None:
    group, ranks = WorkerGroup(4, 3), [rank(number) for number in range(3)]
    assert group.missing == [0, 1, 2]
    for one in (ranks[2], ranks[0]):
        group.put(one)
    assert (group.missing, group.members, group.changed.is_set()) == ([1], [ranks[0], ranks[2]], True)
    group.changed.clear()
    group.drop(ranks[1])
    assert not group.changed.is_set(), "it was not there"
    group.drop(ranks[0])
    assert (group.members, group.changed.is_set(), group.lost.is_set()) == ([ranks[2]], True, False)
    group.drop(ranks[2])
    assert group.lost.is_set()
    assert (group.name_of(ranks[1]), WorkerGroup(4, 1).name_of(ranks[0])) == ("group 4, rank 1 of 3", "group 4")


def test_a_group_is_idle_when_it_serves_and_has_nothing_to_do() -> None:
    group = WorkerGroup(0, 1)
    assert not group.is_idle
    for has_work in (True, False):
        group.core = cast("Any", SimpleNamespace(scheduler=SimpleNamespace(has_unfinished_requests=has_work)))
        assert group.is_idle is not has_work
    error = PagodaError("why")
    group.settle("registered", error)
    assert (group.state, group.error, group.settled.is_set()) == ("registered", error, True)
    group.settle("serving")
    assert group.error is None


def test_a_worker_is_called_at_its_socket_where_that_is_within_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    for is_near in (True, False):
        monkeypatch.setattr(
            "pagoda_scheduler.groups.worker_group.has_listener",
            lambda address, near=is_near: asked.append(address) or near,
        )
        found = Rank.of(identity(local_address="unix-abstract:w"))
        assert found.address == ("unix-abstract:w" if is_near else "127.0.0.1:1")
    assert asked == ["unix-abstract:w"] * 2


async def test_a_registration_that_is_back_has_no_time_limit_any_more() -> None:
    fired: list[int] = []
    one = rank()
    one.come_back()
    one.grace = asyncio.get_running_loop().call_later(0.001, fired.append, 1)
    one.come_back()
    await asyncio.sleep(0.01)
    assert (fired, one.grace) == ([], None)


@pytest.mark.parametrize("state", ["registered", "waiting", "leaving", "lost", *LASTING])
async def test_what_computes_on_may_come_back(state: str) -> None:
    groups, group, one = make_groups(), WorkerGroup(0, 1), rank()
    group.put(one)
    group.state = state
    groups._lose_sight(group, one, is_cut_off=True)
    assert (group.members == [one]) is (state in LASTING)
    one.come_back()
    groups._lose_sight(group, one, is_cut_off=False)
    assert group.members == []


async def test_a_group_that_is_lost_has_no_grace() -> None:
    groups, group, one = make_groups(), WorkerGroup(0, 1, state="serving"), rank()
    group.put(one)
    group.lost.set()
    groups._lose_sight(group, one, is_cut_off=True)
    assert (group.members, one.grace) == ([], None)


async def test_a_group_of_another_size_or_of_one_rank_takes_the_place_of_the_older() -> None:
    groups = make_groups()
    first = groups._group_for(identity(group=3), 2)
    assert groups._group_for(identity(group=3), 2) is first
    other = groups._group_for(identity(group=3), 4)
    assert (other is first, first.lost.is_set(), groups.groups) == (False, True, {3: other})
    alone = groups._group_for(identity(group=3), 1)
    again = groups._group_for(identity(group=3), 1)
    assert (alone.lost.is_set(), again.lost.is_set(), groups.groups) == (True, False, {3: again})
    lost = groups._group_for(identity(group=5), 2)
    lost.lost.set()
    assert groups._group_for(identity(group=5), 2) is not lost


def test_a_worker_without_a_number_gets_the_lowest_free_one() -> None:
    groups = make_groups()
    assert groups._free_number() == 0
    for number in (0, 1, 3):
        groups.groups[number] = WorkerGroup(number, 1)
    assert groups._free_number() == 2
    assert groups._group_for(identity(), 1).number == 2


def test_the_engine_sleeps_as_deep_as_its_lightest_sleeper() -> None:
    groups = make_groups()
    assert groups.sleep_level == 0
    groups.orders.sleep(2)
    assert groups.sleep_level == 2, "of those that will come"
    for number, level in enumerate((0, 2, 1)):
        groups.groups[number] = WorkerGroup(number, 1, sleep_level=level)
    assert groups.sleep_level == 1
    for group in groups.groups.values():
        group.sleep_level = 0
    assert groups.sleep_level == 0


@pytest.mark.parametrize(("ordered", "told", "level"), [(0, 0, 0), (0, 2, 2), (1, 0, 1), (1, 2, 2)])
def test_a_worker_that_is_to_sleep_is_held(ordered: int, told: int, level: int) -> None:
    groups, group = make_groups(), WorkerGroup(3, 1)
    groups.orders.sleep(ordered, 3)
    given = identity(sleep_level=told)
    given.weights.model, given.weights.version = "new", 5
    groups._learn(group, given)
    assert (group.sleep_level, group.hold.is_wanted) == (level, level > 0)
    weights = groups.orders.weights(3)
    assert weights is not None
    assert weights.model == "new"
    if level:
        assert group.hold.reason.startswith(f"the model sleeps (level {level}): wake it up with")


async def test_a_leaving_worker_gets_nothing_new_and_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    retired: list[tuple[Any, str]] = []
    engine = Engine(config=EngineConfig())
    monkeypatch.setattr(engine, "retire_core", lambda core, reason: retired.append((core, reason)))
    monkeypatch.setattr(module, "LEAVE_POLL_S", 0.0)
    groups = make_groups(engine)
    core = cast("Any", SimpleNamespace(scheduler=SimpleNamespace(has_unfinished_requests=True)))
    group, one = WorkerGroup(2, 1, state="serving", core=core), rank()
    leaving = asyncio.create_task(groups._take_leave(group, one, 1000.0))
    for _ in range(5):
        await asyncio.sleep(0)
    assert (retired, group.state, one.is_leaving) == ([(core, "the worker of group 2 is leaving")], "leaving", True)
    assert groups._has_vacancy.is_set()
    assert not leaving.done()
    core.scheduler.has_unfinished_requests = False
    await asyncio.wait_for(leaving, 240)
    core.scheduler.has_unfinished_requests = True
    again = WorkerGroup(2, 1, state="serving", core=core)
    await asyncio.wait_for(groups._take_leave(again, one, 0.0), 240)
    for state in ("standby", "sleeping", "leaving"):
        await asyncio.wait_for(groups._take_leave(WorkerGroup(2, 1, state=state, core=core), one, 1000.0), 240)
    assert len(retired) == 2
    lost = WorkerGroup(2, 1, state="serving", core=core)
    waiting = asyncio.create_task(groups._take_leave(lost, one, 1000.0))
    await asyncio.sleep(0)
    lost.core = None
    await asyncio.wait_for(waiting, 240)


async def messages(*given: scheduler_pb2.WorkerRegistration, gate: asyncio.Event | None = None) -> AsyncIterator[Any]:
    for message in given:
        yield message
    if gate is not None:
        await gate.wait()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 (what it waits for tells no one)
        await asyncio.sleep(0)


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups that are registered and do no more."""

    async def drive(self: WorkerGroups, group: WorkerGroup) -> None:
        group.state = "serving"
        await group.lost.wait()

    monkeypatch.setattr(WorkerGroups, "_drive", drive)


@pytest.mark.usefixtures("still")
async def test_a_worker_is_registered_for_as_long_as_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REGISTRATION_GRACE_S", 0.01)
    groups, gate = make_groups(), asyncio.Event()
    first = scheduler_pb2.WorkerRegistration(identity=identity())
    registered = asyncio.create_task(groups.register(messages(first, gate=gate)))
    await until(lambda: bool(groups.groups))
    (group,) = groups.groups.values()
    assert (group.members[0].identity, group.lost.is_set()) == (identity(), False)
    gate.set()
    await asyncio.wait_for(registered, 240)
    assert not group.lost.is_set(), "it may have been cut off"
    await asyncio.wait_for(group.lost.wait(), 240)


@pytest.mark.usefixtures("still")
async def test_a_worker_that_leaves_is_gone_at_once_and_a_newer_stream_counts() -> None:
    groups, gate = make_groups(), asyncio.Event()
    first = scheduler_pb2.WorkerRegistration(identity=identity())
    older = asyncio.create_task(groups.register(messages(first, gate=gate)))
    await until(lambda: bool(groups.groups))
    (group,) = groups.groups.values()
    stream = group.members[0].stream
    leaving = scheduler_pb2.WorkerRegistration(leaving=scheduler_pb2.WorkerLeaving(timeout_s=0.0))
    newer_gate = asyncio.Event()
    newer = asyncio.create_task(groups.register(messages(first, gate=newer_gate)))
    await until(lambda: group.members[0].stream is not stream)
    gate.set()
    await asyncio.wait_for(older, 240)
    assert group.members[0].grace is None, "the newer stream is there"
    await asyncio.wait_for(groups.register(messages(first, leaving)), 240)
    assert group.lost.is_set()
    newer_gate.set()
    await asyncio.wait_for(newer, 240)


@pytest.mark.usefixtures("still")
async def test_close_ends_all_registrations_without_an_error() -> None:
    groups = make_groups()
    first = scheduler_pb2.WorkerRegistration(identity=identity())
    registered = asyncio.create_task(groups.register(messages(first, gate=asyncio.Event())))
    await until(lambda: bool(groups.groups))
    await asyncio.wait_for(groups.close(), 240)
    await asyncio.wait_for(registered, 240)
    assert groups._registrations == set()


async def test_a_reason_is_told_while_no_group_serves() -> None:
    engine = Engine(config=EngineConfig())
    groups = make_groups(engine)
    told: list[str] = []
    engine.announce = lambda: told.append(engine.not_ready_reason)  # type: ignore[method-assign]  # a recorder
    groups._note("the model is being loaded")
    engine.cores.append(cast("Any", object()))
    groups._note("another one fails")
    assert engine.not_ready_reason == "the model is being loaded"
    assert told == ["the model is being loaded"], "frontends hear it at once"


async def test_a_group_says_which_ranks_it_waits_for() -> None:
    engine = Engine(config=EngineConfig())
    groups, group = make_groups(engine), WorkerGroup(6, 4)
    group.put(rank(1))
    waiting = asyncio.create_task(groups._wait_for_ranks(group))
    group.changed.clear()
    await asyncio.sleep(0)
    assert engine.not_ready_reason == "worker group 6 waits for rank 0, 2, 3 of 4"
    assert (group.state, type(group.error)) == ("waiting", NotReady)
    assert not waiting.done()
    group.changed.set()
    await asyncio.wait_for(waiting, 240)


async def test_groups_beyond_the_bound_stand_by_until_there_is_a_vacancy() -> None:
    engine = Engine(config=EngineConfig())
    groups = make_groups(engine)
    groups._config = replace(engine.config, scheduler=replace(engine.config.scheduler, max_serving_groups=2))
    group = WorkerGroup(0, 1, state="loading")
    engine.cores.append(cast("Any", object()))
    await asyncio.wait_for(groups._wait_for_place(group), 240)
    assert group.state == "loading", "there is a place"
    engine.cores.append(cast("Any", object()))
    waiting = asyncio.create_task(groups._wait_for_place(group))
    await asyncio.sleep(0)
    assert (group.state, waiting.done()) == ("standby", False)
    groups._has_vacancy.set()
    for _ in range(3):
        await asyncio.sleep(0)
    assert not waiting.done(), "another one was faster"
    engine.cores.pop()
    groups._has_vacancy.set()
    await asyncio.wait_for(waiting, 240)
    groups._config = engine.config
    engine.cores += [cast("Any", object())] * 5
    await asyncio.wait_for(groups._wait_for_place(group), 240)


def test_traces_want_a_timeline_for_each_group() -> None:
    engine, timeline = Engine(config=EngineConfig()), Timeline()
    groups = make_groups(engine, timeline=timeline)
    assert groups._timeline_of_group() is timeline
    engine.traces = Traces(on_end=lambda trace: None)
    one, other = groups._timeline_of_group(), groups._timeline_of_group()
    assert isinstance(one, TracedTimeline)
    assert one is not other
    assert one._inner is timeline
