"""Fence and StepHistory: whose messages a worker listens to, and which step comes next. No gRPC, no tensors."""

import secrets
from collections import OrderedDict
from typing import Generic, TypeVar

from pagoda_common.errors import StaleEpoch

Answer = TypeVar("Answer")

MAX_STEPS_AHEAD = 4
"""Steps of one stream that may wait or run at once; what comes after them waits in the connection."""
NUM_KEPT_ANSWERS = MAX_STEPS_AHEAD + 4
"""Steps whose answers are kept, those on their way included: a repeated step is answered again."""


class Fence:
    """Refuses schedulers that were replaced, and messages that were meant for an earlier life of this worker."""

    def __init__(self) -> None:
        self.incarnation = secrets.randbits(64) | 1
        """Random per process start."""
        self.session_epoch = 0
        """Highest seen."""

    def claim(self, session_epoch: int) -> None:
        """A scheduler takes over (InitDevice).

        Raises:
            StaleEpoch: a later one has done so.
        """
        if session_epoch < self.session_epoch:
            raise StaleEpoch(f"session_epoch is {session_epoch}, must be at least {self.session_epoch}")
        self.session_epoch = session_epoch

    def check(self, session_epoch: int) -> None:
        """The caller is the scheduler that has the worker.

        Raises:
            StaleEpoch: it is another.
        """
        if session_epoch != self.session_epoch:
            hint = "" if session_epoch < self.session_epoch else ": call InitDevice first"
            raise StaleEpoch(f"session_epoch is {session_epoch}, must be {self.session_epoch}{hint}")

    def check_incarnation(self, incarnation: int) -> None:
        """The message is for this process.

        Raises:
            StaleEpoch: it is for an earlier one.
        """
        if incarnation != self.incarnation:
            raise StaleEpoch(f"worker_incarnation is {incarnation}, must be {self.incarnation}")


class StepHistory(Generic[Answer]):
    """Steps since the cache was initialized, in order, with the latest answers."""

    def __init__(self) -> None:
        self._last = 0
        self._answers: OrderedDict[int, Answer] = OrderedDict()

    @property
    def last_step(self) -> int:
        """The latest step taken on."""
        return self._last

    def forget(self) -> None:
        """The next step is 1 again."""
        self._last = 0
        self._answers.clear()

    def repeated(self, step: int) -> Answer | None:
        """The answer of a step that was taken on before; None for the next step.

        Raises:
            StaleEpoch: it is neither.
        """
        if step in self._answers:
            return self._answers[step]
        if step != self._last + 1:
            raise StaleEpoch(f"step is {step}, must be {self._last + 1}")
        return None

    def add(self, step: int, answer: Answer) -> None:
        """Take on the next step."""
        assert step == self._last + 1
        self._last = step
        self._answers[step] = answer
        if len(self._answers) > NUM_KEPT_ANSWERS:
            self._answers.popitem(last=False)
