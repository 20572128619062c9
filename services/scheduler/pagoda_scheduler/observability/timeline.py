"""Timeline: interface for the durations of steps. This class ignores them; metrics.py has one with histograms."""

from pagoda_scheduler.core.step import ModelRunnerOutput, SchedulerOutput


class Timeline:
    """Is called for every step."""

    def scheduled(self, output: SchedulerOutput, schedule_ns: int) -> None:
        """A step was decided in `schedule_ns` nanoseconds."""

    def answered(self, output: ModelRunnerOutput) -> None:
        """A step's result has arrived; it is applied and delivered next."""

    def delivered(self, output: ModelRunnerOutput, deliver_ns: int) -> None:
        """A step's result was applied and delivered in `deliver_ns` nanoseconds."""
