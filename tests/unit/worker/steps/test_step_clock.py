"""Where the time of a step goes; the clock is a list of numbers."""

import pytest

from pagoda_worker.steps import step_clock
from pagoda_worker.steps.step import StepTimings
from pagoda_worker.steps.step_clock import StepClock


def ticks(monkeypatch: pytest.MonkeyPatch, *times: int) -> None:
    remaining = list(times)
    monkeypatch.setattr(step_clock.time, "perf_counter_ns", lambda: remaining.pop(0))


def test_each_lap_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks(monkeypatch, 100, 103, 110, 125)
    clock = StepClock(arrived_ns=60)
    clock.prepared()
    clock.computed()
    assert clock.timings() == StepTimings(queue_ns=40, prepare_ns=3, forward_ns=7, sample_ns=15)


def test_a_step_that_is_prepared_twice_took_both(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks(monkeypatch, 100, 103, 110, 125, 126)
    clock = StepClock(arrived_ns=0)
    clock.prepared()
    clock.prepared()
    clock.computed()
    assert clock.timings() == StepTimings(queue_ns=0, prepare_ns=10, forward_ns=15, sample_ns=1)
