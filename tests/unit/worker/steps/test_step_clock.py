"""Where the time of a step goes; the clock is a list of numbers."""

import itertools

import numpy as np
import pytest

from pagoda_common.params.sampling_params import SamplingParams
from pagoda_worker.steps import step_clock
from pagoda_worker.steps.step import NewRequest, StepTimings
from pagoda_worker.steps.step_clock import StepClock
from tests.unit.worker.driver import Driver


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


def test_every_step_says_where_its_time_went(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step without sequences, one of a prompt, and one that decodes."""
    driver = Driver("pagoda-tiny")
    readings = itertools.count(100)
    monkeypatch.setattr(step_clock.time, "perf_counter_ns", lambda: next(readings))
    assert driver.execute(arrived_ns=40).timings == StepTimings(queue_ns=60, prepare_ns=1, forward_ns=0, sample_ns=1)
    new = NewRequest(
        slot=0,
        request_id="r",
        prompt_token_ids=np.array([5, 6, 7]),
        sampling_params=SamplingParams(temperature=0, max_tokens=None),
        block_ids=np.array([1, 2]),
    )
    for fields in ({"new_requests": [new], "num_scheduled_tokens": np.array([3])}, {}):
        timings = driver.execute(num_seqs=1, slots=np.array([0]), arrived_ns=1, **fields).timings
        assert timings.queue_ns > 0
        assert timings.forward_ns > 0
        assert timings.sample_ns > 0
