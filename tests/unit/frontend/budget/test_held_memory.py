"""What requests hold before they are admitted has one bound, of which one caller gets half."""

import pytest

from pagoda_common.errors import QueueFull
from pagoda_frontend.budget.held_memory import HeldMemory, Hold


def hold_of(memory: HeldMemory, owner: str) -> Hold:
    hold = memory.begin()
    hold.owner = owner
    return hold


def test_one_caller_gets_half_and_all_get_the_whole() -> None:
    memory = HeldMemory(max_bytes=100)
    first, second = hold_of(memory, "a"), hold_of(memory, "b")
    first.add(50)
    with pytest.raises(QueueFull, match="log probabilities of answers, hold 50 bytes, at most 100 are held") as caught:
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
