"""WeightsControl over groups that do as they are told: what each is asked for, and what a fault leaves."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pagoda_common.config.checkpoint.weights_source import WeightsSource
from pagoda_common.errors import Code, InvalidRequest, NotFound, NotReady, PagodaError
from pagoda_scheduler.groups import weights_control
from pagoda_scheduler.groups.group_orders import GroupOrders
from pagoda_scheduler.groups.weights_control import RELOADING, Reloaded, Slept, WeightsControl, Woken
from pagoda_scheduler.groups.worker_group import WorkerGroup
from tests.unit.scheduler.stories import make_request

SECOND = 1.0


class Engine:
    """Calls to the engine."""

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        self.aborted: list[str] = []
        self.num_announcements = 0
        self.not_ready_reason = "no worker has registered yet"

    def abort(self, request_ids: list[str]) -> None:
        self.aborted += request_ids

    def announce(self) -> None:
        self.num_announcements += 1


class Groups:
    """Groups that serve unless they are held, and note what their workers are asked for."""

    def __init__(self, *numbers: int) -> None:
        self.orders = GroupOrders()
        self.groups = {number: WorkerGroup(number, 1, state="serving") for number in numbers}
        self.calls: list[tuple[Any, ...]] = []
        self.fails: dict[tuple[int, str], PagodaError] = {}
        """By group number and call."""
        self.unprepared: set[int] = set()
        self.before: Callable[[int, str], None] = lambda number, call: None
        self.unsettled: dict[int, PagodaError] = {}
        """Groups that cannot serve after a hold."""
        self.tasks = [asyncio.create_task(self._drive(group)) for group in self.groups.values()]

    async def _drive(self, group: WorkerGroup) -> None:
        while True:
            await group.hold.wait_wanted()
            self.calls.append((group.number, "rests", group.hold.reason))
            await group.hold.rest()
            self.calls.append((group.number, "serves"))
            error = self.unsettled.get(group.number)
            group.settle("registered" if error else "serving", error)

    @asynccontextmanager
    async def control(self, group: WorkerGroup) -> AsyncIterator[Any]:
        async def call(name: str, *given: Any) -> None:
            await asyncio.sleep(0)
            self.calls.append((group.number, name, *given))
            self.before(group.number, name)
            if (error := self.fails.get((group.number, name))) is not None:
                raise error

        async def sleep(level: int) -> int:
            await call("sleep", level)
            return 1000 + group.number

        async def prepare(source: WeightsSource | None) -> bool:
            await call("prepare", None if source is None else source.model)
            return group.number not in self.unprepared

        async def wake_up(*, weights_only: bool) -> None:
            await call("wake_up", weights_only)

        async def reload(source: WeightsSource) -> None:
            await call("reload", source.model)

        yield SimpleNamespace(sleep=sleep, prepare=prepare, wake_up=wake_up, reload=reload)
        self.calls.append((group.number, "closed"))

    def take(self, *names: str) -> list[tuple[Any, ...]]:
        """The calls of these names since the last look."""
        found = [call for call in self.calls if call[1] in names]
        self.calls.clear()
        return found


class Time:
    """Each look at the clock is a second later."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        self.now_s += SECOND
        return self.now_s

    def time_ns(self) -> int:
        return 77


@pytest.fixture
async def groups() -> AsyncIterator[Groups]:
    groups = Groups(0, 1)
    yield groups
    for task in groups.tasks:
        task.cancel()
    await asyncio.wait(groups.tasks)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def control(groups: Groups, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> WeightsControl:
    monkeypatch.setattr(weights_control, "time", Time())
    return WeightsControl(engine=cast("Any", engine), groups=cast("Any", groups))


async def test_groups_rest_before_their_workers_sleep(control: WeightsControl, groups: Groups, engine: Engine) -> None:
    assert await control.sleep() == Slept(num_groups=2, freed_bytes=2001, seconds=1.0)
    reason = "the model sleeps (level 1): wake it up with POST /wake_up or Scheduler.WakeUp"
    calls = groups.take("rests", "sleep", "closed")
    assert sorted(call for call in calls if call[0] == 1) == [(1, "closed"), (1, "rests", reason), (1, "sleep", 1)]
    assert [call[1] for call in calls if call[0] == 0] == ["rests", "sleep", "closed"]
    assert [(group.sleep_level, group.state, group.hold.is_wanted) for group in groups.groups.values()] == [
        (1, "sleeping", True)
    ] * 2
    assert [groups.orders.sleep_level(number) for number in (0, 1, 9)] == [1, 1, 1]
    assert (engine.num_announcements, engine.aborted) == (2, [])
    assert await control.wake_up() == Woken(num_groups=2, seconds=1.0)
    assert sorted(groups.take("wake_up", "serves")) == [
        (0, "serves"),
        (0, "wake_up", False),
        (1, "serves"),
        (1, "wake_up", False),
    ]
    assert [(group.sleep_level, group.state) for group in groups.groups.values()] == [(0, "serving")] * 2
    assert [groups.orders.sleep_level(number) for number in (0, 9)] == [0, 0]
    assert (await control.wake_up()).num_groups == 0, "they are awake"
    assert groups.take("wake_up") == []


async def test_one_group_sleeps_by_its_number_and_deeper_but_not_less_deep(
    control: WeightsControl, groups: Groups
) -> None:
    for level in (2, 1):
        assert await control.sleep(level=level, number=1) == Slept(1, 1001, 1.0)
    assert [group.sleep_level for group in groups.groups.values()] == [0, 2]
    assert [groups.orders.sleep_level(number) for number in (0, 9)] == [0, 0]
    assert groups.take("sleep") == [(1, "sleep", 2), (1, "sleep", 1)]
    assert (await control.wake_up(number=0)).num_groups == 0
    assert (await control.wake_up(number=1)).num_groups == 1
    assert groups.take("wake_up") == [(1, "wake_up", False)]


async def test_weights_alone_come_back_and_the_groups_sleep_on(control: WeightsControl, groups: Groups) -> None:
    await control.sleep(level=2)
    groups.calls.clear()
    assert (await control.wake_up(tags=["weights", "weights"])).num_groups == 2
    assert sorted(groups.take("wake_up", "serves")) == [(0, "wake_up", True), (1, "wake_up", True)]
    assert [(group.sleep_level, group.state) for group in groups.groups.values()] == [(2, "sleeping")] * 2
    assert groups.orders.sleep_level(9) == 2
    await control.wake_up(tags=["kv_cache"])
    assert sorted(groups.take("wake_up", "serves"))[1::2] == [(0, "wake_up", False), (1, "wake_up", False)]


@pytest.mark.parametrize(
    ("tags", "weights_only"), [((), False), (("weights", "kv_cache"), False), (("weights",), True)]
)
async def test_tags_say_what_comes_back(
    control: WeightsControl, groups: Groups, tags: tuple[str, ...], weights_only: bool
) -> None:
    await control.sleep()
    await control.wake_up(tags=tags)
    assert {call[2] for call in groups.take("wake_up")} == {weights_only}


async def test_wrong_arguments_are_named(control: WeightsControl, groups: Groups) -> None:
    for level in (0, 3):
        with pytest.raises(InvalidRequest, match=f"level is {level}, must be 1 or 2") as caught:
            await control.sleep(level=level)
        assert caught.value.field == "level"
    with pytest.raises(InvalidRequest, match="tags has 'cache', must be weights or kv_cache") as caught:
        await control.wake_up(tags=["weights", "cache"])
    assert caught.value.field == "tags"
    with pytest.raises(InvalidRequest, match="model must name a directory or hub id") as caught:
        await control.reload(model="")
    assert caught.value.field == "model"
    for call in (control.sleep(number=4), control.wake_up(number=4), control.reload(model="m", number=4)):
        with pytest.raises(NotFound, match="group is 4, must be registered: 0, 1") as not_found:
            await call
        assert not_found.value.field == "group"
    assert groups.calls == []
    groups.groups.clear()
    with pytest.raises(NotFound, match="must be registered: none"):
        await control.sleep(number=4)
    with pytest.raises(NotReady, match="there is no worker: no worker has registered yet") as not_ready:
        await control.reload(model="m")
    assert not_ready.value.retry_after_s == 1
    assert await control.sleep() == Slept(0, 0, 1.0)
    assert groups.orders.sleep_level(9) == 1


async def test_a_sleep_with_abort_ends_the_requests_of_its_groups(
    control: WeightsControl, groups: Groups, engine: Engine
) -> None:
    cores = [cast("Any", object()) for _ in range(2)]
    for group, core in zip(groups.groups.values(), cores, strict=True):
        group.core = core
    for name, core in (("a", cores[0]), ("b", cores[1]), ("c", cores[1]), ("homeless", None)):
        engine.requests[name] = SimpleNamespace(core=core, sequences=[make_request(name, 5)])
    await control.sleep(number=1)
    assert engine.aborted == []
    await control.sleep(number=1, is_abort=True)
    assert engine.aborted == ["b", "c"]
    engine.aborted.clear()
    await control.sleep(is_abort=True)
    assert engine.aborted == ["a", "b", "c", "homeless"]


async def test_a_worker_that_cannot_sleep_serves_on(control: WeightsControl, groups: Groups) -> None:
    groups.fails[0, "sleep"] = PagodaError("no host memory")
    with pytest.raises(PagodaError, match="no host memory"):
        await control.sleep()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    first, second = groups.groups.values()
    assert (first.sleep_level, first.hold.is_wanted, groups.orders.sleep_level(0)) == (0, False, 0)
    assert (second.sleep_level, second.state, groups.orders.sleep_level(1)) == (1, "sleeping", 1)


async def test_a_worker_that_cannot_sleep_deeper_sleeps_on(control: WeightsControl, groups: Groups) -> None:
    await control.sleep(number=0)
    groups.fails[0, "sleep"] = PagodaError("cannot")
    with pytest.raises(PagodaError, match="cannot"):
        await control.sleep(level=2, number=0)
    group = groups.groups[0]
    assert (group.sleep_level, group.hold.is_wanted, groups.orders.sleep_level(0)) == (1, True, 1)


async def test_a_worker_that_is_lost_in_its_sleep_comes_back_to_it(control: WeightsControl, groups: Groups) -> None:
    groups.before = lambda number, call: groups.groups[number].lost.set() if number == 0 else None
    groups.fails[0, "sleep"] = NotReady("gone")
    assert await control.sleep() == Slept(2, 1001, 1.0)
    assert (groups.groups[0].sleep_level, groups.orders.sleep_level(0), groups.groups[0].state) == (1, 1, "serving")


async def test_weights_that_cannot_come_back_leave_the_group_asleep(control: WeightsControl, groups: Groups) -> None:
    await control.sleep()
    groups.fails[1, "wake_up"] = PagodaError("no memory")
    with pytest.raises(PagodaError, match="no memory"):
        await control.wake_up()
    first, second = groups.groups.values()
    assert (first.sleep_level, first.state) == (0, "serving")
    assert (second.sleep_level, second.state, second.hold.is_wanted) == (1, "sleeping", True)
    assert [groups.orders.sleep_level(number) for number in (0, 1)] == [0, 1]


async def test_a_group_that_does_not_serve_after_its_sleep_says_why(control: WeightsControl, groups: Groups) -> None:
    await control.sleep(number=0)
    groups.unsettled[0] = NotReady("rank 1 is missing")
    with pytest.raises(NotReady, match="rank 1 is missing"):
        await control.wake_up(number=0)
    assert groups.groups[0].sleep_level == 0


async def test_groups_change_over_one_after_the_other_with_what_they_have_read(
    control: WeightsControl, groups: Groups
) -> None:
    reloaded = await control.reload(model="new", revision="r")
    assert reloaded == Reloaded(num_groups=2, seconds=5.0, pause_s=1.0)
    calls = groups.take("prepare", "rests", "reload", "serves")
    assert sorted(calls[:2]) == [(0, "prepare", "new"), (1, "prepare", "new")]
    assert calls[2:] == [
        (number, *call) for number in (0, 1) for call in (("rests", RELOADING), ("reload", "new"), ("serves",))
    ]
    source = WeightsSource(model="new", revision="r", version=77, is_for_one_group=False)
    assert [groups.orders.weights(number) for number in (0, 1, 9)] == [source] * 3


async def test_one_group_alone_changes_over(control: WeightsControl, groups: Groups) -> None:
    assert (await control.reload(model="new", number=1)).num_groups == 1
    assert {call[0] for call in groups.take("prepare", "rests", "reload", "serves")} == {1}
    source = WeightsSource(model="new", version=77, is_for_one_group=True)
    assert [groups.orders.weights(number) for number in (0, 1)] == [None, source]


async def test_standby_groups_change_over_first(control: WeightsControl, groups: Groups) -> None:
    groups.groups[1].state = "standby"
    await control.reload(model="new")
    assert [call[0] for call in groups.take("reload")] == [1, 0]


async def test_a_group_that_sleeps_is_given_weights_in_its_sleep(control: WeightsControl, groups: Groups) -> None:
    await control.sleep(number=0)
    groups.calls.clear()
    await control.reload(model="new")
    assert groups.take("reload", "rests", "serves") == [
        (0, "reload", "new"),
        (1, "rests", RELOADING),
        (1, "reload", "new"),
        (1, "serves"),
    ]
    assert (groups.groups[0].sleep_level, groups.groups[0].state) == (1, "sleeping")


async def test_a_worker_without_a_model_loads_the_new_weights_as_its_model(
    control: WeightsControl, groups: Groups
) -> None:
    groups.unprepared.add(0)
    assert (await control.reload(model="new")).num_groups == 2
    assert groups.take("rests", "reload", "serves") == [
        (0, "rests", RELOADING),
        (0, "serves"),
        (1, "rests", RELOADING),
        (1, "reload", "new"),
        (1, "serves"),
    ]


async def test_weights_that_cannot_be_read_are_forgotten_by_all(control: WeightsControl, groups: Groups) -> None:
    groups.fails[1, "prepare"] = InvalidRequest("they do not fit")
    with pytest.raises(InvalidRequest, match="they do not fit"):
        await control.reload(model="new")
    calls = groups.take("prepare", "rests", "reload")
    assert sorted(calls[:2]) == [(0, "prepare", "new"), (1, "prepare", "new")]
    assert sorted(calls[2:]) == [(0, "prepare", None), (1, "prepare", None)]
    assert groups.orders.weights(0) is None


async def test_a_change_over_that_fails_first_changes_no_order(control: WeightsControl, groups: Groups) -> None:
    groups.fails[0, "reload"] = PagodaError("no memory", code=Code.RESOURCE_EXHAUSTED)
    with pytest.raises(PagodaError, match=r"^group 0: no memory$") as caught:
        await control.reload(model="new")
    assert caught.value.code is Code.RESOURCE_EXHAUSTED
    assert groups.orders.weights(0) is None
    assert groups.take("reload", "rests", "serves") == [(0, "rests", RELOADING), (0, "reload", "new"), (0, "serves")]
    assert not groups.groups[0].hold.is_wanted


async def test_a_change_over_that_fails_later_says_who_has_the_new_weights(
    control: WeightsControl, groups: Groups
) -> None:
    groups.fails[1, "reload"] = PagodaError("no memory")
    with pytest.raises(PagodaError, match=r"^group 1: no memory \(1 of 2 groups hold the new weights\)$"):
        await control.reload(model="new")
    source = groups.orders.weights(1)
    assert source is not None
    assert source.model == "new", "the group takes them when it is brought up again"
    assert not groups.groups[1].hold.is_wanted


async def test_a_worker_that_is_lost_meanwhile_is_waited_for_no_longer(control: WeightsControl, groups: Groups) -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def forever() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    group = groups.groups[0]
    waiting = asyncio.create_task(weights_control._unless_lost(group, forever()))
    await started.wait()
    group.lost.set()
    with pytest.raises(NotReady, match="the worker of group 0 was lost"):
        await waiting
    await asyncio.wait_for(ended.wait(), 240)
    with pytest.raises(
        NotReady, match="the worker of group 0 was lost; the change takes effect when the worker is back"
    ):
        await control._end_hold(group)


async def test_operations_take_turns_and_outlive_their_callers(control: WeightsControl, groups: Groups) -> None:
    first = asyncio.create_task(control.sleep())
    second = asyncio.create_task(control.wake_up())
    third = asyncio.create_task(control.sleep(number=1))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).num_groups == 2
    await third
    assert [group.sleep_level for group in groups.groups.values()] == [0, 1]
    names = [call[1] for call in groups.calls if call[0] == 0]
    assert names == ["rests", "sleep", "closed", "wake_up", "closed", "serves"]
    assert control._running == set()


async def test_the_first_failure_is_the_error_when_all_are_over() -> None:
    done: list[str] = []

    async def run(name: str, error: PagodaError | None = None) -> str:
        for _ in range(len(name)):
            await asyncio.sleep(0)
        done.append(name)
        if error is not None:
            raise error
        return name

    assert await weights_control._all([run("long"), run("b")]) == ["long", "b"]
    done.clear()
    with pytest.raises(PagodaError, match="first"):
        await weights_control._all([run("longest", PagodaError("first")), run("a", PagodaError("second")), run("bcd")])
    assert done == ["a", "bcd", "longest"]
