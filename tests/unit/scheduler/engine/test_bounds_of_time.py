"""Bounds of time to the number: the watchdog's, deadlines', and what a group costs a router."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from pagoda_scheduler.engine import router, watchdog
from pagoda_scheduler.engine.deadlines import Deadlines
from pagoda_scheduler.engine.router import PrefixRouter
from pagoda_scheduler.engine.watchdog import StepWatchdog
from pagoda_scheduler.kv.swap_cost import MIN_PREFILL_TOKENS, SwapCost
from tests.unit.scheduler.engine.test_open_requests import Hand
from tests.unit.scheduler.stories import make_request, make_scheduler


def test_the_numbers_are_those_of_the_docs() -> None:
    assert (watchdog.FIRST_STEP_S, watchdog.PATIENCE, watchdog.MAX_TICK_S) == (300.0, 20.0, 0.5)
    assert (MIN_PREFILL_TOKENS, router.MAX_MEMORY, router.DECODE_COST_TOKENS) == (64, 200_000, 16)


def answer(dog: StepWatchdog, num_tokens: int, seconds: float) -> None:
    dog.sent(num_tokens)
    dog.answered(seconds)


def test_a_step_is_overdue_after_its_bound_and_not_at_it() -> None:
    dog = StepWatchdog(min_s=2.0)
    answer(dog, 1, 0.25)  # bound: 20 times as long
    dog.sent(1)
    for _ in range(10):
        dog.tick(0.5)
    assert (dog.bound_s, dog._age_s, dog.is_overdue) == (5.0, 5.0, False)
    dog.tick(0.001)
    assert dog.is_overdue
    dog.answered(5.0)
    assert not dog.is_overdue, "nothing is in flight"


def test_time_without_a_step_does_not_count() -> None:
    dog = StepWatchdog(min_s=1.0)
    dog.tick(0.5)
    dog.sent(1)
    assert dog._age_s == 0.0
    dog.tick(0.5)
    dog.sent(1)
    assert dog._age_s == 0.5, "the oldest step's"
    dog.tick(0.75)
    assert dog._age_s == 1.0, "no more than half a second counts"


def test_the_first_step_may_take_the_longer_of_both_bounds() -> None:
    assert StepWatchdog(min_s=2.0).bound_s == 300.0
    assert StepWatchdog(min_s=400.0).bound_s == 400.0


def test_step_times_are_smoothed_over_eight() -> None:
    dog = StepWatchdog(min_s=0.0)
    answer(dog, 1, 0.8)
    answer(dog, 1, 1.6)
    assert dog._step_s == pytest.approx(0.9)
    answer(dog, 0, 100.0)
    assert dog._step_s == pytest.approx(0.9), "it computed nothing"


def test_the_cost_of_a_prompt_token_is_that_of_large_steps() -> None:
    dog = StepWatchdog(min_s=0.0)
    answer(dog, 63, 6.3)
    assert (dog._token_s, dog._has_prefill_cost) == (pytest.approx(0.1), False)
    answer(dog, 10, 0.5)
    assert dog._token_s == pytest.approx(0.1), "never too little"
    answer(dog, 64, 0.64)
    assert (dog._token_s, dog._has_prefill_cost) == (pytest.approx(0.01), True)
    answer(dog, 100, 9.0)
    assert dog._token_s == pytest.approx((7 * 0.01 + 0.09) / 8)
    before = dog._token_s
    answer(dog, 63, 63.0)
    assert dog._token_s == before
    dog.sent(5000)
    dog.sent(1)
    assert dog.bound_s == pytest.approx(max(20 * dog._step_s, 20 * before * 5000))


@pytest.mark.parametrize(
    ("samples", "is_cheaper"),
    [
        ([(63, 10**9)], [None]),
        ([(64, 64 * 499)], [False]),
        ([(64, 64 * 500)], [False]),
        ([(64, 64 * 501)], [True]),
        ([(100, 100 * 100), (100, 100 * 3400)], [False, True]),
        ([(100, 100 * 100), (100, 100 * 3300)], [False, False]),
    ],
)
def test_swapping_pays_by_the_smoothed_cost_of_a_token(
    samples: list[tuple[int, int]], is_cheaper: list[bool | None]
) -> None:
    cost = SwapCost(swap_block_ns=1000, block_size=4)
    assert [cost.add(forward_ns=forward, num_tokens=count) for count, forward in samples] == is_cheaper


async def test_one_timer_waits_for_the_first_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    hand, expired = Hand(monkeypatch), list[tuple[str, float]]()
    armed: list[float] = []
    loop = asyncio.get_running_loop()
    call_at = loop.call_at

    def note(when: float, *more: Any, **options: Any) -> asyncio.TimerHandle:
        armed.append(when - 1000.0)
        return call_at(when, *more, **options)

    monkeypatch.setattr(loop, "call_at", note)
    deadlines = Deadlines(expire=lambda name, seconds: expired.append((name, seconds)))
    for name, seconds in (("a", 10.0), ("b", 20.0), ("c", 5.0), ("d", 5.0)):
        deadlines.set(name, seconds)
    assert (armed, len(deadlines)) == ([10.0, 5.0], 4)
    deadlines.cancel("c")
    deadlines.set("b", 1.0)
    assert armed == [10.0, 5.0, 1.0]
    await hand.move(1.0)
    assert (expired, armed[3:]) == ([("b", 1.0)], [5.0])
    await hand.move(4.0)
    assert (expired, armed[4:]) == ([("b", 1.0), ("d", 5.0)], [10.0])
    deadlines.compact()
    assert len(deadlines) == 1, "one is open"
    deadlines.cancel("a")
    deadlines.compact()
    assert (deadlines._heap, deadlines._timer) == ([], None)
    await hand.move(100)
    assert len(expired) == 2


async def test_dead_entries_go_when_they_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    Hand(monkeypatch)
    deadlines = Deadlines(expire=lambda name, seconds: None)
    for number in range(70):
        deadlines.set(str(number), 100.0 + number)
    sizes = []
    for number in range(6):
        deadlines.cancel(str(number))
        sizes.append(len(deadlines._heap))
    assert sizes == [70] * 6  # 2 x 64 + 64 are allowed
    for number in range(6, 68):
        deadlines.cancel(str(number))
        sizes.append(len(deadlines._heap))
    assert sizes.count(70) == 67, "two are left: 2 x 2 + 64 are allowed"
    assert deadlines._timer_due_s == 1000.0 + 100.0 + 68


# The cost of a group.


def group(**more: Any) -> Any:
    return SimpleNamespace(scheduler=make_scheduler(**more))


def test_a_group_costs_its_waiting_prompts_and_what_runs() -> None:
    core = group()
    assert router._load(core) == 0
    core.scheduler.add(make_request("waits", 30))
    core.scheduler.add(make_request("waits too", 12))
    assert router._load(core) == 42
    running = make_request("runs", 100)
    running.num_computed_tokens = 60
    decoding = make_request("decodes", 10)
    decoding.num_computed_tokens = 10
    core.scheduler.running += [running, decoding]
    assert router._load(core) == 42 + 39 + 2 * 16


def test_the_cheapest_group_is_chosen_and_of_equals_the_first() -> None:
    groups, routes = [group() for _ in range(3)], PrefixRouter()
    for busy, count in zip(groups, (30, 10, 10), strict=True):
        busy.scheduler.add(make_request(f"busy {count}", count))
    assert routes.choose(make_request("short", 3), groups) is groups[1]
    # A cached block saves its four tokens: five blocks of the first group outweigh 20 tokens.
    assert routes.choose(make_request("x", 21, cache_salt="s"), groups[:1]) is groups[0]
    for block_hash in groups[0].scheduler.kv.prefix_hashes(make_request("y", 21, cache_salt="t")):
        routes._sent[block_hash] = groups[0]
    assert routes.choose(make_request("y", 21, cache_salt="t"), groups) is groups[0], "20 saved, 20 more to wait for"
    groups[0].scheduler.add(make_request("one more", 1))
    routes._sent.clear()
    for block_hash in groups[0].scheduler.kv.prefix_hashes(make_request("z", 21, cache_salt="u")):
        routes._sent[block_hash] = groups[0]
    assert routes.choose(make_request("z", 21, cache_salt="u"), groups) is groups[1]


def test_a_single_group_is_chosen_without_a_look() -> None:
    routes = PrefixRouter()
    only: Any = object()
    assert routes.choose(make_request("a", 3), [only]) is only
    assert not routes._sent
