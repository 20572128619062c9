"""Registered workers: who is whose rank, who takes whose place, and how long a failed group pauses."""

import asyncio
from typing import Any

import pytest

from pagoda.v1 import scheduler_pb2
from pagoda_common.config.engine_config import EngineConfig
from pagoda_common.errors import InvalidRequest, PagodaError
from pagoda_scheduler.engine.engine import Engine
from pagoda_scheduler.groups import worker_groups
from pagoda_scheduler.groups.worker_group import WorkerGroup
from pagoda_scheduler.groups.worker_groups import WorkerGroups


def identity(number: int, *, port: int = 1, **more: Any) -> scheduler_pb2.WorkerIdentity:
    return scheduler_pb2.WorkerIdentity(address=f"127.0.0.1:{port}", incarnation=number, **more)


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> WorkerGroups:
    """Groups that load forever."""

    async def serve(self: WorkerGroups, group: WorkerGroup) -> None:
        group.state = "loading"
        await asyncio.Event().wait()

    monkeypatch.setattr(WorkerGroups, "_serve", serve)
    config = EngineConfig()
    return WorkerGroups(config=config, engine=Engine(config=config), session_epoch=7)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_the_same_process_registers_again_as_the_same_rank(groups: WorkerGroups) -> None:
    group, rank = groups._enter(identity(1))
    await settle()
    assert groups._enter(identity(1)) == (group, rank)
    assert list(groups.groups) == [0]
    await groups.close()


async def test_a_worker_that_was_restarted_at_its_address_is_another_one(groups: WorkerGroups) -> None:
    old, old_rank = groups._enter(identity(1, group=3))
    await settle()
    new, new_rank = groups._enter(identity(2, group=3))
    assert new is not old
    assert new_rank is not old_rank
    assert (groups.groups, old.lost.is_set(), new.lost.is_set()) == ({3: new}, True, False)
    await settle()
    assert groups.groups == {3: new}, "the end of the old one does not take the new one along"
    await groups.close()


async def test_without_a_number_a_restarted_worker_gets_the_lowest_free_one(groups: WorkerGroups) -> None:
    for number in range(3):
        groups._enter(identity(number, port=number))
    assert list(groups.groups) == [0, 1, 2]
    groups.groups[1].drop(groups.groups[1].members[0])
    await settle()
    assert sorted(groups.groups) == [0, 2]
    group, _ = groups._enter(identity(9, port=1))
    assert group.number == 1
    await groups.close()


async def test_one_rank_of_two_that_was_restarted_takes_its_own_place(groups: WorkerGroups) -> None:
    group, _ = groups._enter(identity(1, port=1, group=0, rank=0, world_size=2))
    assert group.missing == [1]
    same, second = groups._enter(identity(2, port=2, group=0, rank=1, world_size=2))
    assert (same, group.missing) == (group, [])
    group.changed.clear()
    again, third = groups._enter(identity(3, port=2, group=0, rank=1, world_size=2))
    assert again is group
    assert [rank.identity.incarnation for rank in group.members] == [1, 3]
    assert group.changed.is_set()
    group.drop(second)  # its registration ends later
    assert [rank.identity.incarnation for rank in group.members] == [1, 3]
    assert not group.lost.is_set()
    group.drop(third)
    assert not group.lost.is_set()
    group.drop(group.members[0])
    assert group.lost.is_set()
    await settle()
    assert groups.groups == {}


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (scheduler_pb2.WorkerIdentity(), "identity"),
        (identity(1, group=0, rank=2, world_size=2), "rank"),
        (identity(1, rank=1), "rank"),
        (identity(1, world_size=2), "group"),
    ],
)
async def test_a_wrong_identity_is_refused(
    groups: WorkerGroups, wrong: scheduler_pb2.WorkerIdentity, field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        groups._enter(wrong)
    assert (caught.value.field, groups.groups) == (field, {})


async def test_pauses_between_attempts_double_up_to_a_bound_and_begin_anew_once_it_has_served(
    groups: WorkerGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    first_of = worker_groups.first_of

    async def note(*awaitables: Any, timeout_s: float | None = None) -> None:
        if timeout_s is not None:
            pauses.append(timeout_s)
        await first_of(*awaitables, timeout_s=None if timeout_s is None else 0.0)

    async def serve(self: WorkerGroups, group: WorkerGroup) -> None:
        if len(pauses) == 8:
            group.lost.set()
        group.state = "serving" if len(pauses) == 6 else "loading"
        raise PagodaError("out of memory")

    monkeypatch.setattr(worker_groups, "first_of", note)
    monkeypatch.setattr(WorkerGroups, "_serve", serve)
    group, _ = groups._enter(identity(1))
    assert group.task is not None
    await asyncio.wait_for(group.task, 240)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0, 0.5, 1.0]
    assert isinstance(group.error, PagodaError)


async def test_a_group_that_gets_another_rank_says_so_while_it_begins_anew(groups: WorkerGroups) -> None:
    group, _ = groups._enter(identity(1))
    await settle()
    assert group.state == "loading"
    group.settled.clear()
    group.changed.set()
    await asyncio.wait_for(group.settled.wait(), 240)
    assert (group.state, str(group.error)) == ("registered", "worker group 0 has a new rank")
    group.lost.set()
    assert group.task is not None
    await asyncio.wait_for(group.task, 240)


async def test_a_registration_that_was_cut_off_has_two_seconds_to_come_back(
    groups: WorkerGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert worker_groups.REGISTRATION_GRACE_S == 2.0
    monkeypatch.setattr(worker_groups, "REGISTRATION_GRACE_S", 0.05)
    group, rank = groups._enter(identity(1))
    await settle()
    groups._lose_sight(group, rank, is_cut_off=True)
    assert not group.lost.is_set()
    groups._enter(identity(1))
    await asyncio.sleep(0.1)
    assert not group.lost.is_set()
    groups._lose_sight(group, rank, is_cut_off=True)
    await asyncio.wait_for(group.lost.wait(), 240)


async def test_a_worker_that_was_silent_has_no_grace(groups: WorkerGroups) -> None:
    group, rank = groups._enter(identity(1))
    await settle()
    groups._lose_sight(group, rank, is_cut_off=False)
    assert group.lost.is_set()


async def test_a_group_that_was_not_loading_yet_has_no_grace(groups: WorkerGroups) -> None:
    group, rank = groups._enter(identity(1, group=0, rank=0, world_size=2))
    await settle()
    assert group.state == "waiting"
    groups._lose_sight(group, rank, is_cut_off=True)
    assert group.lost.is_set()


class Waits:
    """A coroutine that waits until the test ends it, and records whether it was cancelled."""

    def __init__(self) -> None:
        self.end = asyncio.Event()
        self.state = "new"

    async def run(self) -> None:
        self.state = "waits"
        try:
            await self.end.wait()
        except asyncio.CancelledError:
            self.state = "cancelled"
            raise
        self.state = "done"


async def test_what_is_waited_for_ends_with_the_task_that_fails() -> None:
    async def fails() -> None:
        await asyncio.sleep(0)
        raise PagodaError("the worker is lost")

    waits = Waits()
    with pytest.raises(PagodaError, match="the worker is lost"):
        await worker_groups._first(waits.run(), asyncio.create_task(fails()))
    await settle()
    assert waits.state == "cancelled"


async def test_what_is_done_first_is_done_and_the_task_stays() -> None:
    waits, runs = Waits(), Waits()
    run = asyncio.create_task(runs.run())
    waits.end.set()
    await worker_groups._first(waits.run(), run)
    await settle()
    assert (waits.state, runs.state) == ("done", "waits")
    run.cancel()


async def test_what_is_waited_for_ends_with_who_waits() -> None:
    waits, runs = Waits(), Waits()
    run = asyncio.create_task(runs.run())
    caller = asyncio.create_task(worker_groups._first(waits.run(), run))
    await settle()
    caller.cancel()
    await settle()
    assert (waits.state, runs.state, caller.cancelled()) == ("cancelled", "waits", True)
    run.cancel()


async def test_of_several_the_first_ends_the_coroutines_alone() -> None:
    one, other, owned = Waits(), Waits(), Waits()
    task = asyncio.create_task(owned.run())
    one.end.set()
    await worker_groups.first_of(one.run(), other.run(), task)
    await settle()
    assert (one.state, other.state, owned.state) == ("done", "cancelled", "waits")
    await worker_groups.first_of(other.run(), task, timeout_s=0)
    await settle()
    assert (other.state, owned.state) == ("cancelled", "waits"), "and so does the time"
    task.cancel()


async def test_of_several_the_one_that_fails_is_the_error() -> None:
    async def fails() -> None:
        raise PagodaError("that went wrong")

    other = Waits()
    with pytest.raises(PagodaError, match="that went wrong"):
        await worker_groups.first_of(other.run(), fails())
    await settle()
    assert other.state == "cancelled"
