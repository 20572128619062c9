"""What operators ask of worker groups, of one or of all, and what a worker tells of an earlier scheduler."""

import pytest

from pagoda_common.config.checkpoint.weights_source import WeightsSource
from pagoda_scheduler.groups.group_orders import GroupOrders


def source(version: int, *, is_for_one_group: bool = False) -> WeightsSource:
    return WeightsSource(model=f"m{version}", version=version, is_for_one_group=is_for_one_group)


def test_an_order_of_all_takes_back_those_of_one() -> None:
    orders = GroupOrders()
    orders.sleep(2, number=3)
    assert [orders.sleep_level(number) for number in (2, 3)] == [0, 2]
    orders.sleep(1)
    assert [orders.sleep_level(number) for number in (2, 3, 9)] == [1, 1, 1]
    orders.sleep(0, number=3)
    assert [orders.sleep_level(number) for number in (2, 3)] == [1, 0]
    assert orders.sleep_level_of_all == 1
    orders.use_weights(source(1), number=3)
    assert [orders.weights(number) for number in (2, 3)] == [None, source(1)]
    orders.use_weights(source(2))
    assert [orders.weights(number) for number in (2, 3, 9)] == [source(2)] * 3


def test_what_could_not_be_done_is_as_it_was() -> None:
    orders = GroupOrders()
    orders.use_weights(source(1))
    orders.use_weights(source(2), number=3)
    before = orders.weights_orders()
    orders.use_weights(source(5), number=4)
    orders.use_weights(source(6), number=3)
    orders.restore_weights_orders(before)
    assert [orders.weights(number) for number in (2, 3, 4)] == [source(1), source(2), source(1)]
    before = orders.weights_orders()
    orders.use_weights(source(7))
    orders.restore_weights_orders(before)
    assert [orders.weights(number) for number in (2, 3)] == [source(1), source(2)]


@pytest.mark.parametrize(("told", "level"), [(0, 1), (1, 1), (2, 2)])
def test_a_worker_s_deeper_sleep_counts(told: int, level: int) -> None:
    orders = GroupOrders()
    orders.sleep(1, number=3)
    orders.learn(3, incarnation=7, sleep_level=told, weights=None)
    assert (orders.sleep_level(3), orders.sleep_level(4), orders.sleep_level_of_all) == (level, 0, 0)


def test_a_worker_tells_once() -> None:
    orders = GroupOrders()
    orders.learn(3, incarnation=7, sleep_level=0, weights=None)
    orders.learn(3, incarnation=7, sleep_level=2, weights=source(9))
    assert (orders.sleep_level(3), orders.weights(3)) == (0, None)
    orders.learn(3, incarnation=8, sleep_level=2, weights=source(9))
    assert (orders.sleep_level(3), orders.weights(3)) == (2, source(9))


@pytest.mark.parametrize(
    ("ours", "told", "is_taken"),
    [(None, 0, True), (None, 1, True), (1, 2, True), (2, 2, False), (3, 2, False)],
)
def test_newer_weights_of_a_worker_count_for_whom_they_were_meant(ours: int | None, told: int, is_taken: bool) -> None:
    for is_for_one in (False, True):
        orders = GroupOrders()
        if ours is not None:
            orders.use_weights(source(ours))
        before = orders.weights(4)
        given = source(told, is_for_one_group=is_for_one)
        orders.learn(3, incarnation=7, sleep_level=0, weights=given)
        assert orders.weights(3) == (given if is_taken else before)
        assert orders.weights(4) == (given if is_taken and not is_for_one else before)
