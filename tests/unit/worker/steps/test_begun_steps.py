"""When a worker rests: what is done beside steps looks at it."""

from typing import cast

import pytest

from pagoda_common.errors import PagodaError
from pagoda_worker.steps.begun_steps import BegunSteps
from pagoda_worker.steps.model_runner import ModelRunner
from pagoda_worker.steps.step import StepInput, StepOutput

LONG = 1e9


class FakeRunner:
    """Says whether the steps rest while it computes."""

    def __init__(self, steps: BegunSteps) -> None:
        self.steps = steps
        self.seen: list[bool] = []

    def begin(self, step: StepInput) -> bool:
        self.seen.append(self.steps.have_rested(0))
        return True

    def finish(self) -> StepOutput:
        self.seen.append(self.steps.have_rested(0))
        return StepOutput()


def test_it_rests_between_the_end_of_a_step_and_the_next() -> None:
    steps = BegunSteps(on_failure=lambda: None)
    runner = FakeRunner(steps)
    as_runner = cast("ModelRunner", runner)
    assert steps.have_rested(0)
    steps.begin(as_runner, StepInput())
    steps.begin(as_runner, StepInput())
    steps.finish()
    assert not steps.have_rested(0)
    steps.finish()
    assert runner.seen == [False] * 4
    assert steps.have_rested(0)
    assert not steps.have_rested(LONG)


@pytest.mark.parametrize(
    ("error", "has_traceback"), [(ConnectionResetError("another rank has gone"), False), (ValueError("a bug"), True)]
)
def test_a_rank_that_goes_is_told_in_one_line(
    error: Exception, has_traceback: bool, caplog: pytest.LogCaptureFixture
) -> None:
    class FailingRunner:
        def begin(self, step: StepInput) -> bool:
            raise error

    steps = BegunSteps(on_failure=lambda: None)
    steps.begin(cast("ModelRunner", FailingRunner()), StepInput())
    with pytest.raises(PagodaError, match=str(error)):
        steps.finish()
    (record,) = caplog.records
    assert (record.exc_info is not None) == has_traceback
