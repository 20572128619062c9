"""StepWatchdog: what counts as too late, from what steps have taken."""

import pytest

from pagoda_scheduler.engine.watchdog import FIRST_STEP_S, MAX_TICK_S, StepWatchdog


def wait(watchdog: StepWatchdog, seconds: float) -> None:
    for _ in range(round(seconds / 0.1)):
        watchdog.tick(0.1)


def test_nothing_in_flight_is_never_overdue() -> None:
    watchdog = StepWatchdog(min_s=2.0)
    wait(watchdog, 1000)
    assert not watchdog.is_overdue


def test_the_first_step_may_take_long() -> None:
    watchdog = StepWatchdog(min_s=2.0)
    watchdog.sent(1)
    wait(watchdog, FIRST_STEP_S - 1)
    assert not watchdog.is_overdue
    wait(watchdog, 2)
    assert watchdog.is_overdue


@pytest.mark.parametrize(("step_s", "bound_s"), [(0.001, 2.0), (0.05, 2.0), (0.5, 10.0)])
def test_the_bound_follows_the_step_time(step_s: float, bound_s: float) -> None:
    watchdog = StepWatchdog(min_s=2.0)
    for _ in range(50):
        watchdog.sent(1)
        watchdog.answered(step_s)
    watchdog.sent(1)
    assert watchdog.bound_s == pytest.approx(bound_s)
    wait(watchdog, bound_s - 0.2)
    assert not watchdog.is_overdue
    wait(watchdog, 0.4)
    assert watchdog.is_overdue


def test_a_prompt_may_take_as_long_as_its_tokens_cost() -> None:
    watchdog = StepWatchdog(min_s=2.0)
    watchdog.sent(1)
    watchdog.answered(0.01)
    watchdog.sent(8192)
    assert watchdog.bound_s == pytest.approx(20 * 0.01 * 8192)  # no prompt was seen yet
    watchdog.answered(8.0)
    watchdog.sent(4096)
    assert watchdog.bound_s == pytest.approx(20 * 4096 * 8.0 / 8192, rel=0.3)


def test_an_answer_starts_the_time_of_the_next_step() -> None:
    watchdog = StepWatchdog(min_s=2.0)
    watchdog.sent(1)
    watchdog.answered(0.01)
    watchdog.sent(1)
    watchdog.sent(1)
    wait(watchdog, 1.5)
    watchdog.answered(0.01)
    wait(watchdog, 1.5)
    assert not watchdog.is_overdue


def test_a_pause_of_this_process_does_not_count() -> None:
    watchdog = StepWatchdog(min_s=2.0)
    watchdog.sent(1)
    watchdog.answered(0.01)
    watchdog.sent(1)
    watchdog.tick(3600.0)
    assert not watchdog.is_overdue
    assert MAX_TICK_S < 2.0


def test_of_several_steps_the_oldest_one_sets_the_bound() -> None:
    watchdog = StepWatchdog(min_s=2.0)
    watchdog.sent(1)
    watchdog.answered(0.01)
    watchdog.sent(1000)
    watchdog.answered(5.0)
    watchdog.sent(4000)
    watchdog.sent(1)  # a decode after a large prompt: the prompt may still take its time
    prompt_s = watchdog.bound_s
    assert prompt_s == pytest.approx(20 * 4000 * 0.005)
    watchdog.answered(20.0)
    assert watchdog.bound_s < prompt_s / 2


def test_a_step_without_tokens_tells_nothing_of_others() -> None:
    watchdog = StepWatchdog(min_s=2.0)
    watchdog.sent(0)
    watchdog.answered(0.0001)
    watchdog.sent(1)
    assert watchdog.bound_s == FIRST_STEP_S
    watchdog.answered(0.5)
    watchdog.sent(0)
    watchdog.answered(0.0001)
    watchdog.sent(1)
    assert watchdog.bound_s == pytest.approx(10.0)
