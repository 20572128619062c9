"""StepClock: measures the stages of one step. On an accelerator launches return early, so its time is in the last
stage."""

import time

from pagoda_worker.steps.step import StepTimings


class StepClock:
    """Stage times of one step, which begins now, in the order of the methods.

    If a prepared step must be prepared again in another way, both times count.
    """

    def __init__(self, arrived_ns: int) -> None:
        """`arrived_ns`: time.perf_counter_ns() when the step arrived in this process; 0 if not known."""
        self._last = time.perf_counter_ns()
        self._queue_ns = self._last - arrived_ns if arrived_ns else 0
        self._prepare_ns = self._forward_ns = 0

    def prepared(self) -> None:
        """The model's inputs are on the device, or being copied."""
        self._prepare_ns += self._lap()

    def computed(self) -> None:
        """The model has run, or is launched."""
        self._forward_ns = self._lap()

    def timings(self) -> StepTimings:
        """All stage times; the tokens are on the host."""
        return StepTimings(
            queue_ns=self._queue_ns, prepare_ns=self._prepare_ns, forward_ns=self._forward_ns, sample_ns=self._lap()
        )

    def _lap(self) -> int:
        now = time.perf_counter_ns()
        elapsed, self._last = now - self._last, now
        return elapsed
