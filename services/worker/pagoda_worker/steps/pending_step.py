"""PendingStep: a step between `begin` and `result`; StepGuard: refuses steps after a failed one. No tensors."""

import logging
import math
import time
from collections.abc import Callable
from typing import Protocol

from pagoda_common.errors import PagodaError, StaleEpoch
from pagoda_worker.steps.step import StepInput, StepOutput

logger = logging.getLogger(__name__)


class PendingStep(Protocol):
    """A step that was begun. `result` is called once for each step, in the order of `begin`."""

    @property
    def is_in_flight(self) -> bool:
        """Whether the device has the step, so that the next one may begin before `result`."""

    @property
    def is_done(self) -> bool:
        """Whether `result` would return at once."""

    def result(self) -> StepOutput:
        """Wait for the step.

        Raises:
            Exception: the step failed.
        """


class DoneStep:
    """A step that ended in `begin`."""

    is_in_flight = False
    is_done = True

    def __init__(self, outcome: StepOutput | PagodaError) -> None:
        """`outcome`: its result, or its failure."""
        self._outcome = outcome

    def result(self) -> StepOutput:
        """Its result.

        Raises:
            PagodaError: the step failed.
        """
        if isinstance(self._outcome, PagodaError):
            raise self._outcome
        return self._outcome


class StepGuard:
    """Begins steps, and refuses steps after a failed one, because the content of the slots is then unknown.

    A failure in `begin` is raised by the step's `result`, after the answers of earlier steps. One caller at a time.
    """

    def __init__(self, *, on_failure: Callable[[], None]) -> None:
        """`on_failure`: called when a step fails."""
        self._failure: str | None = None
        self._num_begun = self._num_pending = 0
        self._num_sound = 0
        """Steps before the failed one."""
        self._rests_since = 0.0
        """time.monotonic() at the end of the latest step; infinite while a step runs."""
        self._on_failure = on_failure

    def forget_failure(self) -> None:
        """Accept steps again: the content of the slots is known."""
        self._failure = None

    def begin(self, step: StepInput, begin: Callable[[StepInput], PendingStep]) -> PendingStep:
        """The step, begun by `begin` unless an earlier step has failed."""
        if self._failure is not None:
            return DoneStep(self._refusal())
        number, self._num_begun = self._num_begun, self._num_begun + 1
        self._num_pending += 1
        self._rests_since = math.inf
        try:
            return _GuardedStep(self, number, begin(step))
        except Exception as error:
            return _GuardedStep(self, number, DoneStep(self._fail(number, error)))

    def result(self, number: int, step: PendingStep) -> StepOutput:
        """Wait for a step of `begin`, as PendingStep.result; every failure becomes a PagodaError."""
        try:
            if not step.is_in_flight:
                return step.result()
            if self._failure is not None and number >= self._num_sound:
                raise self._refusal()
            try:
                return step.result()
            except Exception as error:
                raise self._fail(number, error) from error
        finally:
            self._num_pending -= 1
            if not self._num_pending:
                self._rests_since = time.monotonic()

    def have_rested(self, seconds: float) -> bool:
        """Whether no step ran for `seconds`. May be called from any thread."""
        return time.monotonic() - self._rests_since >= seconds

    def _fail(self, number: int, error: Exception) -> PagodaError:
        self._failure, self._num_sound = f"{type(error).__name__}: {error}", number
        self._on_failure()
        if isinstance(error, ConnectionError | TimeoutError):  # another rank has gone, which is no fault of this one
            logger.error("the step failed: %s", self._failure)
        else:
            logger.error("the step failed", exc_info=error)
        failed = PagodaError(f"the step failed: {self._failure}")
        failed.__cause__ = error
        return failed

    def _refusal(self) -> StaleEpoch:
        return StaleEpoch(f"an earlier step failed ({self._failure}): call InitializeCache first")


class _GuardedStep:
    def __init__(self, guard: StepGuard, number: int, step: PendingStep) -> None:
        self._guard = guard
        self._number = number
        self._step = step

    @property
    def is_in_flight(self) -> bool:
        return self._step.is_in_flight

    @property
    def is_done(self) -> bool:
        return self._step.is_done

    def result(self) -> StepOutput:
        return self._guard.result(self._number, self._step)
