"""Places, shares and victims by number: turns, running calls and room at their bounds."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pagoda_common.config.engine_config import SchedulerConfig
from pagoda_scheduler.core import turns as turns_module
from pagoda_scheduler.core.request import Request
from pagoda_scheduler.core.room import Room
from pagoda_scheduler.core.running_calls import RunningCalls
from pagoda_scheduler.core.turns import ADMISSIONS_A_TURN, CLIENT_TURN, MAX_CLIENTS, TURN, Turns


def of(group: str = "", client: str = "", **more: Any) -> Request:
    return SimpleNamespace(group=group, client=client, **more)  # type: ignore[return-value]  # what these ask of it


def test_the_sizes_of_turns() -> None:
    assert (TURN, ADMISSIONS_A_TURN, CLIENT_TURN, MAX_CLIENTS) == (16, 64, 64, 4096)


def test_each_later_one_of_a_call_comes_a_part_of_a_turn_later() -> None:
    turns = Turns()
    call, other = of("call"), of("other")
    times = [turns.last(call)[0] for _ in range(18)]
    assert times == [0.0] * 16 + [1.0, 1.0 + 1 / 16]
    assert turns.is_large(call)
    assert turns.last(other) == (0.0, 18)
    assert not turns.is_large(other)
    assert turns.num_calls == 2


@pytest.mark.parametrize(("count", "is_large"), [(16, False), (17, True)])
def test_a_call_is_large_after_its_first_turn(count: int, is_large: bool) -> None:
    turns = Turns()
    for _ in range(count):
        turns.last(of("call"))
    assert turns.is_large(of("call")) is is_large


def test_a_call_is_forgotten_with_its_last_one_that_waits() -> None:
    turns, call = Turns(), of("call")
    for _ in range(17):
        turns.last(call)
    for _ in range(16):
        turns.leave(call)
    assert turns.num_calls == 1
    assert turns.is_large(call), "one still waits"
    turns.leave(call)
    assert turns.num_calls == 0
    turns.last(call)
    assert not turns.is_large(call)


def test_a_late_one_waits_a_turn_and_the_rest_of_its_call_with_it() -> None:
    turns, call = Turns(), of("call")
    turns.now = 2.0
    assert turns.late(call) == (3.0, 0)
    assert turns.last(call) == (3.0, 1), "the first turn of its call is over"
    assert turns.last(call) == (3.0 + 1 / 16, 2)
    for _ in range(3):
        turns.leave(call)
    assert turns.num_calls == 0


def test_a_place_ahead_is_before_all_that_were_taken_before() -> None:
    turns = Turns()
    usual, first, second = turns.last(of("a")), turns.first(of("b")), turns.first(of("c"))
    assert (first, second) == ((-1.0, -1), (-1.0, -2))
    assert second < first < usual
    turns.leave(of("b"))
    assert turns.num_calls == 2


def test_time_goes_with_admissions() -> None:
    turns = Turns()
    turns.admit((-1.0, -1))
    assert turns.now == 0.0, "one that comes back is no news"
    turns.admit((0.0, 1))
    assert turns.now == 1 / 64
    turns.admit((2.5, 2))
    assert turns.now == 2.5
    turns.admit((2.5, 3))
    turns.admit((1.0, 3))
    assert turns.now == 2.5 + 2 / 64


def test_a_client_takes_turns_after_its_first() -> None:
    turns = Turns()
    times = [turns.last(of(str(number), "client"))[0] for number in range(66)]
    assert times[:64] == [0.0] * 64
    assert times[64:] == [1 + 1 / 64, 1 + 2 / 64]
    assert turns.last(of("one", "other"))[0] == 0.0
    assert turns.last(of("two"))[0] == 0.0, "of no known client"
    turns.now = 1 + 1 / 64
    assert turns.last(of("three", "client"))[0] == 1 + 3 / 64, "until it has caught up"
    turns.now = 1 + 3 / 64
    assert turns.last(of("four", "client"))[0] == 1 + 3 / 64


def test_clients_that_owe_nothing_are_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns_module, "MAX_CLIENTS", 2)
    turns = Turns()
    for name in "abcd":
        turns.last(of(name, name))
    assert list(turns._clients) == list("abcd"), "up to twice as many"
    turns.last(of("e", "e"))
    assert list(turns._clients) == ["d", "e"]
    turns.now = 1 / 64
    for name in "fgh":
        turns.last(of(name, name))
    assert list(turns._clients) == ["g", "h"]


def calls_of(counts: dict[str, int], *, blocks: int = 0, num_slots: int = 40, num_blocks: int = 100) -> RunningCalls:
    running = [
        of(group, num_blocks=blocks, name=f"{group}{number}")
        for group, count in counts.items()
        for number in range(count)
    ]
    return RunningCalls(running, num_slots=num_slots, num_blocks=num_blocks)


@pytest.mark.parametrize(
    ("counts", "options", "borrower"),
    [
        ({}, {}, None),
        ({"a": 16}, {}, None),
        ({"a": 17}, {}, None),  # it is large, and uses less than its half
        ({"a": 20}, {}, None),
        ({"a": 21}, {}, "a20"),
        ({"a": 3}, {"num_slots": 5}, "a2"),
        ({"a": 2}, {"num_slots": 4}, None),  # a half is no more than a half
        ({"a": 1}, {"num_slots": 1}, None),  # one sequence is no call to divide
        ({"a": 2}, {"num_slots": 40, "blocks": 25}, None),
        ({"a": 2}, {"num_slots": 40, "blocks": 26}, "a1"),
        ({"a": 2}, {"num_slots": 40, "blocks": 1, "num_blocks": 0}, "a1"),
        ({"a": 19, "b": 17}, {}, "a18"),  # a third each, and one for the others
        ({"b": 17, "a": 19}, {}, "a18"),
        ({"a": 17, "b": 17}, {"num_slots": 51}, None),
    ],
)
def test_who_has_borrowed_gives_way(counts: dict[str, int], options: dict[str, int], borrower: str | None) -> None:
    found: Any = calls_of(counts, **options).borrower
    assert (found and found.name) == borrower


@pytest.mark.parametrize(
    ("counts", "has_its_share"),
    [({"a": 16}, False), ({"a": 19}, False), ({"a": 20}, True), ({"a": 14, "b": 25}, False)],
)
def test_a_large_call_has_its_share_from_there_on(counts: dict[str, int], has_its_share: bool) -> None:
    assert calls_of(counts).has_its_share(of("a")) is has_its_share
    assert not calls_of(counts).has_its_share(of("unknown"))


class Queue:
    """Waiting sequences, the next one first."""

    def __init__(self, *waiting: Request, num_late: int = 0, passes: bool = True) -> None:
        self.waiting = list(waiting)
        self.num_late = num_late
        self.passes = passes
        self.passed: list[Request] = []

    @property
    def has_next(self) -> bool:
        return bool(self.waiting)

    def peek(self) -> Request:
        return self.waiting[0]

    def pass_turn(self, request: Request) -> bool:
        self.passed.append(request)
        return self.passes


def waiting(name: str, *, priority: int = 0, arrival_ns: int = 0, num_pending: int = 0, group: str = "") -> Request:
    return of(group or name, name=name, priority=priority, arrival_ns=arrival_ns, num_pending=num_pending, num_blocks=1)


def make_room(
    queue: Queue,
    running: list[Request],
    *,
    policy: Any = "priority",
    has_place: Callable[[Request], bool] = lambda request: False,
    is_prepared: bool = True,
    max_num_seqs: int = 4,
) -> tuple[Room, list[tuple[str, bool]]]:
    preempted: list[tuple[str, bool]] = []

    def preempt(request: Any, *, at_front: bool = True) -> None:
        preempted.append((request.name, at_front))
        running.remove(request)

    room = Room(
        config=SchedulerConfig(max_num_seqs=max_num_seqs, policy=policy),
        waiting=queue,  # type: ignore[arg-type]  # what it asks of a queue
        running=running,
        has_place=has_place,
        is_prepared=lambda request: is_prepared,
        preempt=preempt,
        num_blocks=100,
    )
    return room, preempted


def test_the_victim_is_the_least_urgent_and_of_these_the_last_to_come() -> None:
    running = [
        waiting("a", priority=2, arrival_ns=1),
        waiting("b", priority=2, arrival_ns=3),
        waiting("c", priority=2, arrival_ns=2),
        waiting("d", priority=1, arrival_ns=9),
    ]
    assert make_room(Queue(), running)[0].victim is running[1]
    assert make_room(Queue(), running, policy="fcfs")[0].victim is running[3]


@pytest.mark.parametrize(
    ("urgent", "options", "names"),
    [
        (waiting("x", priority=0), {}, ["c", "b"]),
        (waiting("x", priority=1), {}, ["c", "b"]),
        (waiting("x", priority=2), {}, ["c"]),
        (waiting("x", priority=3), {}, []),
        (waiting("x", priority=-1), {}, ["c", "b", "a"]),
        (waiting("x", priority=-1, num_pending=1), {}, []),
        (waiting("x", priority=-1), {"is_prepared": False}, []),
        (waiting("x", priority=-1), {"has_place": lambda request: True}, []),
    ],
)
def test_less_urgent_ones_give_way(urgent: Request, options: dict[str, Any], names: list[str]) -> None:
    running = [waiting("a", priority=0), waiting("b", priority=2), waiting("c", priority=3)]
    room, preempted = make_room(Queue(urgent), running, **options)
    room.make()
    assert preempted == [(name, True) for name in names]


def test_no_more_give_way_than_are_needed() -> None:
    running = [waiting("a", priority=1), waiting("b", priority=1), waiting("c", priority=1)]
    room, preempted = make_room(Queue(waiting("x")), running, has_place=lambda request: len(running) < 2)
    room.make()
    assert len(preempted) == 2


def test_nobody_gives_way_to_nobody() -> None:
    room, preempted = make_room(Queue(), [waiting("a")])
    room.make()
    room, others = make_room(Queue(num_late=1), [waiting("a", group="g"), waiting("b", group="g")], policy="fcfs")
    room.make()
    assert preempted == others == []


@pytest.mark.parametrize(
    ("first", "num_late", "options", "names"),
    [
        (waiting("x"), 1, {}, ["c"]),  # two of four slots are its share
        (waiting("x"), 0, {}, []),
        (waiting("x", num_pending=1), 1, {}, []),
        (waiting("x"), 1, {"is_prepared": False}, []),
        (waiting("x"), 1, {"has_place": lambda request: True}, []),
    ],
)
def test_what_is_borrowed_is_taken_back(
    first: Request, num_late: int, options: dict[str, Any], names: list[str]
) -> None:
    running = [waiting(name, group="call") for name in "abc"]
    queue = Queue(first, num_late=num_late)
    room, preempted = make_room(queue, running, policy="fcfs", **options)
    room.make()
    assert preempted == [(name, False) for name in names]
    assert queue.passed == []


@pytest.mark.parametrize(("passes", "count"), [(True, 16), (False, 1)])
def test_a_call_with_its_share_lets_others_pass_for_a_turn(passes: bool, count: int) -> None:
    running = [waiting(name, group="call") for name in "abc"]
    queue = Queue(waiting("x", group="call"), num_late=1, passes=passes)
    room, preempted = make_room(queue, running, policy="fcfs")
    room.make()
    assert preempted == []
    assert queue.passed == [queue.waiting[0]] * count


def test_a_call_with_its_share_goes_first_while_there_is_room() -> None:
    running = [waiting(name, group="call") for name in "abc"]
    queue = Queue(waiting("x", group="call"), num_late=1)
    room, preempted = make_room(queue, running, policy="fcfs", has_place=lambda request: True)
    room.make()
    assert preempted == []
    assert queue.passed == [], "a turn that it gives up helps no one"
