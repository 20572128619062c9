"""StepLoop: a worker's steps on its model thread, the next one begun before the one before is finished. No messages."""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pagoda_worker.steps.step import StepInput, StepOutput

POLL_S = 50e-6
"""Between two looks at whether a device has finished, while a next step may come as well."""


class StepWorker(Protocol):
    """Begins and finishes steps, in the same order (as `Worker`)."""

    def begin_step(self, step: StepInput) -> bool:
        """False: nothing is done, a step has to be finished first."""

    def finish_step(self) -> StepOutput:
        """Raises why the step failed."""

    @property
    def has_output(self) -> bool:
        """The oldest step that was begun is finished but for `finish_step`."""

    @property
    def is_done(self) -> bool:
        """`finish_step` would not wait."""


@dataclass(frozen=True, slots=True)
class StepJob:
    """A step, and who hears how it went; called on the model thread."""

    step: StepInput
    give: Callable[[StepOutput], None]
    fail: Callable[[Exception], None]


class StepLoop:
    """Any thread puts, the model thread runs. A step that the worker has only launched is not waited for while the next
    one is there: what that needs of the host goes on beside the device."""

    def __init__(self, *, worker: StepWorker, submit: Callable[[Callable[[], None]], object]) -> None:
        """`submit` runs a call on the model thread, behind those before it."""
        self._worker = worker
        self._submit = submit
        self._waiting: deque[StepJob] = deque()
        self._begun: deque[StepJob] = deque()
        self._has_come = threading.Event()
        self._runs = False

    @property
    def is_running(self) -> bool:
        """Whether a step computes, or has not been finished."""
        return self._runs or bool(self._begun)

    def put(self, job: StepJob) -> None:
        """The next step."""
        self._waiting.append(job)
        self._has_come.set()
        self._submit(self._run_next)

    def drain(self) -> None:
        """Finish what was begun; on the model thread, for whatever comes next there."""
        while self._begun:
            self._finish()

    def _run_next(self) -> None:
        self._runs = True
        job = self._waiting.popleft()
        while not self._worker.begin_step(job.step):
            self._finish()
        self._begun.append(job)
        while len(self._begun) > 1 or (self._begun and self._worker.has_output):
            self._finish()
        while self._begun and not self._waiting:
            if self._worker.is_done:
                self._finish()
            elif self._has_come.wait(POLL_S):
                self._has_come.clear()
        self._runs = False

    def _finish(self) -> None:
        job = self._begun.popleft()
        try:
            output = self._worker.finish_step()
        except Exception as error:
            job.fail(error)
        else:
            job.give(output)
