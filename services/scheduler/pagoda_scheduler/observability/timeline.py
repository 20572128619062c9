"""Where a step's time goes. This one forgets it; metrics.py has one that keeps histograms."""

from pagoda_scheduler.core.step import ModelRunnerOutput, SchedulerOutput


class Timeline:
    """Hears of every step."""

    def scheduled(self, output: SchedulerOutput, schedule_ns: int) -> None:
        """A step was decided in `schedule_ns` nanoseconds."""

    def answered(self, output: ModelRunnerOutput) -> None:
        """A step's result is there; it is taken and delivered next."""

    def delivered(self, output: ModelRunnerOutput, deliver_ns: int) -> None:
        """A step's result was taken and delivered in `deliver_ns` nanoseconds."""
