"""Steps between `begin` and `result`: when the worker rests, and what a failure ends."""

import pytest

from pagoda_common.errors import PagodaError, StaleEpoch
from pagoda_worker.steps.pending_step import DoneStep, PendingStep, StepGuard
from pagoda_worker.steps.step import StepInput, StepOutput

LONG = 1e9
STEP = StepInput()


class InFlight:
    """A step that the device has, until its result is asked for."""

    is_in_flight = True
    is_done = False

    def __init__(self, outcome: StepOutput | Exception) -> None:
        self.outcome = outcome

    def result(self) -> StepOutput:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        self.is_in_flight = False
        return self.outcome


class Side:
    """A guard, and how often it told of a failure."""

    def __init__(self) -> None:
        self.num_failures = 0
        self.guard = StepGuard(on_failure=self._hear)

    def _hear(self) -> None:
        self.num_failures += 1

    def launch(self, outcome: StepOutput | Exception | None = None) -> PendingStep:
        return self.guard.begin(STEP, lambda step: InFlight(outcome or StepOutput()))

    def raise_on_begin(self, error: Exception) -> PendingStep:
        def begin(step: StepInput) -> PendingStep:
            raise error

        return self.guard.begin(STEP, begin)


@pytest.fixture
def side() -> Side:
    return Side()


def test_it_rests_between_the_end_of_a_step_and_the_next(side: Side) -> None:
    seen = []

    def begin(step: StepInput) -> PendingStep:
        seen.append(side.guard.have_rested(0))
        return InFlight(StepOutput())

    assert side.guard.have_rested(0)
    first, second = side.guard.begin(STEP, begin), side.guard.begin(STEP, begin)
    first.result()
    seen.append(side.guard.have_rested(0))
    second.result()
    assert seen == [False] * 3
    assert side.guard.have_rested(0)
    assert not side.guard.have_rested(LONG)


def test_it_rests_after_a_step_that_failed(side: Side) -> None:
    failed = side.raise_on_begin(ValueError("a bug"))
    assert not side.guard.have_rested(0), "its result is not told"
    with pytest.raises(PagodaError):
        failed.result()
    assert side.guard.have_rested(0)
    with pytest.raises(StaleEpoch):
        side.launch().result()
    assert side.guard.have_rested(0)


def test_a_step_that_ended_as_it_began_has_its_outcome_at_once(side: Side) -> None:
    output = StepOutput()
    done = side.guard.begin(STEP, lambda step: DoneStep(output))
    assert (done.is_in_flight, done.is_done) == (False, True)
    assert done.result() is output
    launched = side.launch()
    assert (launched.is_in_flight, launched.is_done) == (True, False)


def test_a_failure_ends_the_steps_after_it_and_none_before(side: Side) -> None:
    output = StepOutput()
    sound, bad, after = side.launch(output), side.launch(RuntimeError("device")), side.launch()
    assert sound.result() is output
    with pytest.raises(PagodaError, match="the step failed: RuntimeError: device"):
        bad.result()
    with pytest.raises(StaleEpoch, match=r"earlier step failed \(RuntimeError: device\): call InitializeCache"):
        after.result()
    with pytest.raises(StaleEpoch, match="device"):
        side.launch().result()
    assert side.num_failures == 1


def test_what_fails_as_it_begins_leaves_the_steps_before_it_their_answers(side: Side) -> None:
    output = StepOutput()
    sound, bad, after = side.launch(output), side.raise_on_begin(ValueError("slot 9")), side.launch()
    assert side.num_failures == 1
    assert sound.result() is output
    with pytest.raises(PagodaError, match="ValueError: slot 9") as failed:
        bad.result()
    assert isinstance(failed.value.__cause__, ValueError)
    with pytest.raises(StaleEpoch, match="slot 9"):
        after.result()


def test_a_new_cache_takes_steps_again(side: Side) -> None:
    with pytest.raises(PagodaError):
        side.launch(RuntimeError("device")).result()
    side.guard.forget_failure()
    side.launch().result()


@pytest.mark.parametrize(
    ("error", "has_traceback"), [(ConnectionResetError("another rank has gone"), False), (ValueError("a bug"), True)]
)
def test_a_rank_that_goes_is_told_in_one_line(
    side: Side, error: Exception, has_traceback: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(PagodaError, match=str(error)):
        side.raise_on_begin(error).result()
    (record,) = caplog.records
    assert (record.exc_info is not None) == has_traceback
