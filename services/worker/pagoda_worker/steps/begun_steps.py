"""BegunSteps: a worker's steps from `begin` to `finish`, in order, and the failure that ends them all. No tensors."""

import logging
import math
import time
from collections import deque
from collections.abc import Callable

from pagoda_common.errors import PagodaError, StaleEpoch
from pagoda_worker.steps.model_runner import ModelRunner
from pagoda_worker.steps.step import StepInput, StepOutput

logger = logging.getLogger(__name__)


class BegunSteps:
    """What fails while a step begins is told by its `finish`: those before it have answers. One caller at a time."""

    def __init__(self, *, on_failure: Callable[[], None]) -> None:
        """`on_failure`: called when a step fails."""
        self._steps: deque[ModelRunner | PagodaError] = deque()
        """Who finishes each, or why it has failed."""
        self._failure: str | None = None
        self._rests_since = 0.0
        """time.monotonic() at the end of the latest step; infinite while one is under way."""
        self._on_failure = on_failure

    def forget_failure(self) -> None:
        """What the slots hold is known again."""
        self._failure = None

    def begin(self, runner: ModelRunner | None, step: StepInput) -> bool:
        """Begin the next step. False: nothing is done, a step has to be finished first."""
        if runner is None:
            self._steps.append(StaleEpoch("the cache is not initialized: call InitializeCache first"))
        elif self._failure is not None:
            self._steps.append(self._refusal())
        else:
            self._rests_since = math.inf
            try:
                if not runner.begin(step):
                    return False
                self._steps.append(runner)
            except Exception as error:
                self._steps.append(self._fail(error))
        return True

    @property
    def has_output(self) -> bool:
        """Whether the oldest step is finished but for `finish`."""
        oldest = self._steps[0]
        return isinstance(oldest, PagodaError) or oldest.has_output

    @property
    def is_done(self) -> bool:
        """Whether `finish` would not wait."""
        oldest = self._steps[0]
        return isinstance(oldest, PagodaError) or oldest.is_done

    def finish(self) -> StepOutput:
        """Wait for the oldest step that was begun.

        Raises:
            PagodaError: it has failed. What the slots hold is unknown then: every later step is refused.
        """
        oldest = self._steps.popleft()
        if isinstance(oldest, PagodaError):
            raise oldest
        try:
            return oldest.finish()
        except Exception as error:
            failed = self._fail(error)
            self._steps = deque(self._refusal() for _ in self._steps)
            raise failed from error
        finally:
            if not self._steps:
                self._rests_since = time.monotonic()

    def have_rested(self, seconds: float) -> bool:
        """Whether none was under way for so long. For any thread to call."""
        return time.monotonic() - self._rests_since >= seconds

    def _fail(self, error: Exception) -> PagodaError:
        self._failure = f"{type(error).__name__}: {error}"
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
