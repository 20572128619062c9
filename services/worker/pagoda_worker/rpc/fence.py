"""Fence and StepHistory: decide whose messages a worker accepts, and which step is next. No gRPC, no tensors."""

import secrets
from collections import OrderedDict
from typing import Generic, TypeVar

from pagoda_common.errors import StaleEpoch

Answer = TypeVar("Answer")

MAX_STEPS_AHEAD = 4
"""Maximum number of accepted steps of one stream; later ones wait in the connection."""
NUM_KEPT_ANSWERS = MAX_STEPS_AHEAD + 4
"""Number of steps whose answers are kept, pending ones included: a repeated step is answered again."""


class Fence:
    """Refuses schedulers that were replaced, and messages for an earlier process of this worker."""

    def __init__(self) -> None:
        self.incarnation = secrets.randbits(64) | 1
        """Random number of this process."""
        self.session_epoch = 0
        """Highest session epoch seen."""

    def claim(self, session_epoch: int) -> None:
        """A scheduler takes over (InitDevice).

        Raises:
            StaleEpoch: a later scheduler has taken over.
        """
        if session_epoch < self.session_epoch:
            raise StaleEpoch(f"session_epoch is {session_epoch}, must be at least {self.session_epoch}")
        self.session_epoch = session_epoch

    def check(self, session_epoch: int) -> None:
        """Check that the caller is the scheduler that has claimed the worker.

        Raises:
            StaleEpoch: it is another scheduler.
        """
        if session_epoch != self.session_epoch:
            hint = "" if session_epoch < self.session_epoch else ": call InitDevice first"
            raise StaleEpoch(f"session_epoch is {session_epoch}, must be {self.session_epoch}{hint}")

    def check_incarnation(self, incarnation: int) -> None:
        """Check that the message is for this process.

        Raises:
            StaleEpoch: it is for an earlier process.
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
        """Number of the latest accepted step."""
        return self._last

    def forget(self) -> None:
        """Start again with step 1."""
        self._last = 0
        self._answers.clear()

    def repeated(self, step: int) -> Answer | None:
        """The answer of a step that was accepted before; None for the next step.

        Raises:
            StaleEpoch: the step is neither.
        """
        if step in self._answers:
            return self._answers[step]
        if step != self._last + 1:
            raise StaleEpoch(f"step is {step}, must be {self._last + 1}")
        return None

    def add(self, step: int, answer: Answer) -> None:
        """Accept the next step."""
        assert step == self._last + 1
        self._last = step
        self._answers[step] = answer
        if len(self._answers) > NUM_KEPT_ANSWERS:
            self._answers.popitem(last=False)
