"""Where a step's time goes. This one forgets it; metrics.py has one that keeps histograms."""

from collections.abc import Iterator
from contextlib import contextmanager

from pagoda_scheduler.step import ModelRunnerOutput, SchedulerOutput


class Timeline:
    """Hears of every step."""

    def scheduled(self, output: SchedulerOutput, schedule_ns: int) -> None:
        """A step was decided in `schedule_ns` nanoseconds."""

    @contextmanager
    def result(self, output: ModelRunnerOutput) -> Iterator[None]:
        """A step's result is taken and delivered inside of this context."""
        yield
