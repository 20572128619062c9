"""What requests hold before they are admitted has one bound, of which one caller gets half."""

import pytest

from pagoda_common.errors import QueueFull
from pagoda_frontend.budget.caller import admit_hold, current_hold
from pagoda_frontend.budget.held_memory import HeldMemory, Hold


def hold_of(memory: HeldMemory, owner: str) -> Hold:
    hold = memory.begin()
    hold.owner = owner
    return hold


def test_one_caller_gets_half_and_all_get_the_whole() -> None:
    memory = HeldMemory(max_bytes=100)
    first, second = hold_of(memory, "a"), hold_of(memory, "b")
    first.add(50)
    with pytest.raises(QueueFull, match="answers hold 50 bytes of memory, at most 100 are allowed") as caught:
        hold_of(memory, "a").add(1)
    assert caught.value.retry_after_s > 0
    second.add(50)
    with pytest.raises(QueueFull):
        hold_of(memory, "c").add(1)
    first.release()
    hold_of(memory, "c").add(50)
    assert memory.num_bytes == 100


def test_what_is_released_is_free_and_released_once() -> None:
    memory = HeldMemory(max_bytes=100)
    hold = hold_of(memory, "a")
    hold.add(20)
    hold.add(30)
    hold.release()
    hold.release()
    assert (memory.num_bytes, hold.num_bytes, hold.num_bytes_seen) == (0, 0, 50)
    hold_of(memory, "a").add(50)


def test_a_caller_that_holds_nothing_any_more_is_forgotten() -> None:
    memory = HeldMemory(max_bytes=100)
    first, second = hold_of(memory, "a"), hold_of(memory, "a")
    first.add(20)
    second.add(10)
    first.release()
    assert memory._by_owner == {"a": 10}
    second.release()
    assert memory._by_owner == {}, "who calls once and never again leaves nothing"


def test_a_call_that_is_over_holds_nothing_any_more() -> None:
    memory = HeldMemory(max_bytes=100)
    hold = hold_of(memory, "a")
    hold.add(20)
    hold.end()
    hold.add(30)
    hold.end()
    assert (memory.num_bytes, hold.num_bytes, hold.num_bytes_seen) == (0, 0, 20)


def test_what_is_refused_is_not_counted() -> None:
    memory = HeldMemory(max_bytes=100)
    hold = hold_of(memory, "a")
    hold.add(40)
    with pytest.raises(QueueFull):
        hold.add(20)
    assert memory.num_bytes == 40
    hold.release()
    assert memory.num_bytes == 0


@pytest.mark.parametrize("sizes", [(1, 1), (1, 2, 1), (3, 1, 1), (2, 2, 2)])
@pytest.mark.parametrize("is_reversed", [False, True])
def test_all_that_a_caller_held_is_given_back_down_to_the_last_byte(sizes: tuple[int, ...], is_reversed: bool) -> None:
    memory = HeldMemory(max_bytes=20)
    holds = [hold_of(memory, "a") for _ in sizes]
    for hold, size in zip(holds, sizes, strict=True):
        hold.add(size)
    left = sum(sizes)
    for hold in reversed(holds) if is_reversed else holds:
        left -= hold.num_bytes
        hold.release()
        assert memory.num_bytes == left
        full = hold_of(memory, "a")
        full.add(10 - left)
        with pytest.raises(QueueFull):
            full.add(1)
        full.release()


def test_what_is_kept_of_a_request_stays_held() -> None:
    memory = HeldMemory(max_bytes=100)
    hold = hold_of(memory, "a")
    hold.add(40)
    hold.release(50)
    assert memory.num_bytes == 40
    hold.release(10)
    assert (hold.num_bytes, hold.num_bytes_seen, memory.num_bytes) == (10, 40, 10)
    hold.end()
    assert memory.num_bytes == 0


def test_work_that_outlives_its_call_holds_what_the_call_has_held() -> None:
    memory = HeldMemory(max_bytes=100)
    hold = hold_of(memory, "a")
    hold.add(40)
    heir = hold.hand_over()
    hold.end()
    assert (memory.num_bytes, heir.num_bytes, heir.num_bytes_seen, heir.owner) == (40, 40, 40, "a")
    with pytest.raises(QueueFull):
        heir.add(11)
    heir.add(10)
    heir.end()
    assert memory._by_owner == {}


@pytest.mark.parametrize(
    ("num_bytes", "num_prompt_tokens", "kept"),
    [(16 * 1024, 0, 0), (16 * 1024 + 1, 0, 1), (1_000_000, 0, 983_616), (64_384, 1000, 0), (64_385, 1000, 1)],
)
def test_what_the_prompt_does_not_explain_is_held_after_admission(
    num_bytes: int, num_prompt_tokens: int, kept: int
) -> None:
    hold = hold_of(HeldMemory(max_bytes=10_000_000), "a")
    hold.add(num_bytes)
    token = current_hold.set(hold)
    try:
        admit_hold(num_prompt_tokens)
    finally:
        current_hold.reset(token)
    assert hold.num_bytes == kept
