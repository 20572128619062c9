"""When the model thread begins a step, when it finishes one, and who hears of it. The device is a set of numbers."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from pagoda_worker.steps.pipeline import QueuedStep, StepPipeline
from pagoda_worker.steps.step import StepInput, StepOutput


class FakeStep:
    """A step of a FakeWorker, which knows what its device has done."""

    def __init__(self, worker: "FakeWorker", number: int) -> None:
        self._worker = worker
        self._number = number

    @property
    def is_in_flight(self) -> bool:
        return self._number not in self._worker.at_once

    @property
    def is_done(self) -> bool:
        return self._number in self._worker.done | self._worker.at_once

    def result(self) -> StepOutput:
        assert self._worker.begun.pop(0) == self._number, "in the order of begin"
        self._worker.log.append(f"finish {self._number}")
        if self._number in self._worker.failing:
            raise RuntimeError(f"step {self._number}")
        return StepOutput(token_ids=np.array([self._number]))


class FakeWorker:
    """Steps are numbered from 1 on by their num_seqs; what happens is written down."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.done: set[int] = set()
        """Steps that the device has finished."""
        self.alone: set[int] = set()
        """Steps that nothing may be in flight before."""
        self.at_once: set[int] = set()
        """Steps that end within `begin`."""
        self.failing: set[int] = set()
        self.begun: list[int] = []

    def can_begin(self, step: StepInput) -> bool:
        return not self.begun or step.num_seqs not in self.alone

    def begin(self, step: StepInput) -> FakeStep:
        assert self.can_begin(step)
        self.log.append(f"begin {step.num_seqs}")
        self.begun.append(step.num_seqs)
        return FakeStep(self, step.num_seqs)


class Side:
    """A pipeline with its model thread, and what was answered."""

    def __init__(self) -> None:
        self.worker = FakeWorker()
        self.thread = ThreadPoolExecutor(max_workers=1)
        self.pipeline = StepPipeline(worker=self.worker, submit=self.thread.submit)
        self.answers: list[object] = []

    def put(self, number: int) -> None:
        self.pipeline.put(
            QueuedStep(
                StepInput(num_seqs=number),
                lambda output: self.answers.append(int(output.token_ids[0])),
                lambda error: self.answers.append(str(error)),
            )
        )

    def put_together(self, *numbers: int) -> None:
        """Steps that are all there before the first one begins."""
        gate = threading.Event()
        self.thread.submit(gate.wait)
        for number in numbers:
            self.put(number)
        gate.set()

    def until(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 240
        while not is_so():
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def settle(self) -> None:
        """Until the model thread has nothing to do."""
        self.thread.submit(lambda: None).result(timeout=240)


@pytest.fixture
def side() -> Iterator[Side]:
    made = Side()
    yield made
    made.worker.done = set(range(100))
    made.thread.shutdown()


def test_a_step_that_is_there_begins_before_the_one_in_flight_is_finished(side: Side) -> None:
    side.worker.done = {1, 2, 3}
    side.put_together(1, 2, 3)
    side.settle()
    assert side.worker.log == ["begin 1", "begin 2", "finish 1", "begin 3", "finish 2", "finish 3"]
    assert side.answers == [1, 2, 3]


def test_a_step_that_comes_while_another_computes_is_begun_at_once(side: Side) -> None:
    side.put(1)
    side.until(lambda: side.worker.log == ["begin 1"])
    side.put(2)
    side.until(lambda: side.worker.log[:2] == ["begin 1", "begin 2"])
    side.worker.done |= {1, 2}
    side.settle()
    assert side.answers == [1, 2]


def test_tokens_that_are_there_are_told_without_a_step_after_them(side: Side) -> None:
    side.put(1)
    side.until(lambda: side.worker.log == ["begin 1"])
    assert side.pipeline.is_running
    side.worker.done.add(1)
    side.until(lambda: side.answers == [1])
    side.until(lambda: not side.pipeline.is_running)


def test_a_step_that_cannot_follow_waits_for_the_tokens_of_the_one_before(side: Side) -> None:
    side.worker.alone, side.worker.done = {2}, {1, 2}
    side.put_together(1, 2)
    side.settle()
    assert side.worker.log == ["begin 1", "finish 1", "begin 2", "finish 2"]


def test_a_step_that_ended_as_it_began_is_told_before_the_next_one_begins(side: Side) -> None:
    side.worker.at_once = {1, 2, 3}
    side.put_together(1, 2, 3)
    side.settle()
    assert side.worker.log == ["begin 1", "finish 1", "begin 2", "finish 2", "begin 3", "finish 3"]


def test_a_failure_is_that_steps_answer(side: Side) -> None:
    side.worker.failing, side.worker.done = {1, 3}, {1, 2, 3}
    side.put_together(1, 2, 3)
    side.settle()
    assert side.answers == ["step 1", 2, "step 3"]


def test_what_comes_between_two_steps_finds_none_in_flight(side: Side) -> None:
    """As InitializeCache does, sent between them."""
    side.worker.done = {1, 2}
    gate = threading.Event()
    side.thread.submit(gate.wait)
    side.put(1)
    side.thread.submit(lambda: (side.pipeline.drain(), side.worker.log.append("other")))
    side.put(2)
    gate.set()
    side.settle()
    assert side.worker.log == ["begin 1", "finish 1", "other", "begin 2", "finish 2"]
    assert not side.pipeline.is_running


def test_a_step_in_flight_runs_while_the_model_thread_does_something_else(side: Side) -> None:
    """The next step waits after a call, which finds the one before in flight."""
    gate, reached = threading.Event(), threading.Event()
    seen: list[bool] = []
    side.thread.submit(gate.wait)
    side.put(1)
    side.thread.submit(lambda: (seen.append(side.pipeline.is_running), reached.set()))
    side.put(2)
    gate.set()
    assert reached.wait(240)
    assert seen == [True]
    side.worker.done = {1, 2}
    side.settle()
    assert not side.pipeline.is_running
