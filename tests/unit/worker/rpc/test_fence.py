"""Whose messages a worker listens to, and which steps it answers again."""

import pytest

from pagoda_common.errors import StaleEpoch
from pagoda_worker.rpc.fence import NUM_KEPT_ANSWERS, Fence, StepHistory


def test_a_later_scheduler_takes_over_and_an_earlier_one_does_not_come_back() -> None:
    fence = Fence()
    assert fence.incarnation > 0
    fence.claim(3)
    fence.claim(3)
    fence.claim(7)
    with pytest.raises(StaleEpoch, match="session_epoch is 6, must be at least 7"):
        fence.claim(6)
    assert fence.session_epoch == 7


def test_only_the_scheduler_that_has_the_worker_is_heard() -> None:
    fence = Fence()
    fence.claim(5)
    fence.check(5)
    with pytest.raises(StaleEpoch, match=r"session_epoch is 4, must be 5$"):
        fence.check(4)
    with pytest.raises(StaleEpoch, match="session_epoch is 6, must be 5: call InitDevice first"):
        fence.check(6)


def test_messages_for_an_earlier_life_are_refused() -> None:
    fence, other = Fence(), Fence()
    fence.check_incarnation(fence.incarnation)
    assert fence.incarnation != other.incarnation
    with pytest.raises(StaleEpoch, match="worker_incarnation is"):
        fence.check_incarnation(other.incarnation)


def test_steps_come_in_turn_and_the_latest_are_answered_again() -> None:
    history: StepHistory[str] = StepHistory()
    last = NUM_KEPT_ANSWERS + 3
    for step in range(1, last + 1):
        assert history.repeated(step) is None
        history.add(step, f"answer {step}")
    assert history.last_step == last
    for step in range(4, last + 1):
        assert history.repeated(step) == f"answer {step}"
    for step in (3, last + 2, 0):
        with pytest.raises(StaleEpoch, match=f"step is {step}, must be {last + 1}"):
            history.repeated(step)


def test_a_new_cache_begins_with_step_1_and_no_answers() -> None:
    history: StepHistory[str] = StepHistory()
    history.add(1, "old")
    history.forget()
    assert history.last_step == 0
    assert history.repeated(1) is None
