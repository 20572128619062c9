"""StepPipeline: the queue of a worker's steps, in which a step may begin before the one before has finished. No
messages."""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pagoda_worker.steps.pending_step import PendingStep
from pagoda_worker.steps.step import StepInput, StepOutput

POLL_S = 50e-6
"""Seconds between two checks whether the device has finished, while a next step may also arrive."""


class StepWorker(Protocol):
    """Interface that begins steps (as `Worker`)."""

    def can_begin(self, step: StepInput) -> bool:
        """Whether the step may begin before those in flight are finished."""

    def begin(self, step: StepInput) -> PendingStep:
        """Begin a step. Its result raises failures."""


@dataclass(slots=True)
class QueuedStep:
    """A step and its callback, which is called on the model thread."""

    step: StepInput
    give: Callable[[StepOutput], None]
    fail: Callable[[Exception], None]
    pending: PendingStep | None = None
    """None before it begins."""


class StepPipeline:
    """Any thread puts, the model thread runs. A step in flight is not waited for while the next one is queued, so that
    the next one's host work runs while the device computes."""

    def __init__(self, *, worker: StepWorker, submit: Callable[[Callable[[], None]], object]) -> None:
        """`submit` runs a call on the model thread, after earlier calls."""
        self._worker = worker
        self._submit = submit
        self._steps: deque[QueuedStep] = deque()
        """All steps without a result: first those that were begun, then those that wait."""
        self._num_begun = 0
        self._has_come = threading.Event()
        self._runs = False

    @property
    def is_running(self) -> bool:
        """Whether any step is unfinished."""
        return self._runs or self._num_begun > 0

    def put(self, step: QueuedStep) -> None:
        """Queue the next step."""
        self._steps.append(step)
        self._has_come.set()
        self._submit(self._run_next)

    def drain(self) -> None:
        """Finish the steps that were begun; called on the model thread before other work."""
        while self._num_begun:
            self._finish()

    def _run_next(self) -> None:
        """Begin the first waiting step, then finish those that need not stay in flight."""
        self._runs = True
        queued = self._steps[self._num_begun]
        while self._num_begun and not self._worker.can_begin(queued.step):
            self._finish()
        queued.pending = begun = self._worker.begin(queued.step)
        self._num_begun += 1
        while self._num_begun > 1 or (self._num_begun and not begun.is_in_flight):
            self._finish()
        while self._num_begun and self._num_begun == len(self._steps):  # no other step waits
            if begun.is_done:
                self._finish()
            elif self._has_come.wait(POLL_S):
                self._has_come.clear()
        self._runs = False

    def _finish(self) -> None:
        """Report the result of the oldest step that was begun."""
        oldest = self._steps.popleft()
        self._num_begun -= 1
        assert oldest.pending is not None, "steps begin in order"
        try:
            output = oldest.pending.result()
        except Exception as error:
            oldest.fail(error)
        else:
            oldest.give(output)
