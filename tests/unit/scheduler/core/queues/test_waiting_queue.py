"""The order in which waiting sequences are taken, policy by policy, with several tenants, priorities and arrivals."""

from collections.abc import Callable

import pytest

from pagoda_scheduler.core import waiting_queue
from pagoda_scheduler.core.request import Request
from pagoda_scheduler.core.turns import TURN
from pagoda_scheduler.core.waiting_queue import FairQueue, FcfsQueue, PriorityQueue, WaitingQueue
from tests.unit.scheduler.stories import make_request


def names(queue: WaitingQueue) -> list[str]:
    """Everything, in the order in which it is taken."""
    return [queue.pop().request_id for _ in range(len(queue))]


def of_tenant(name: str) -> Request:
    return make_request(name, 4, tenant=name[0])


@pytest.mark.parametrize("make_queue", [FcfsQueue, PriorityQueue, FairQueue])
def test_a_queue_counts_the_prompt_tokens_of_all_that_waits(make_queue: Callable[[], WaitingQueue]) -> None:
    queue, requests = make_queue(), [make_request(name, size) for name, size in (("a", 3), ("b", 5), ("c", 7))]
    for request in requests[:2]:
        queue.append(request)
    queue.append_front(requests[2])
    assert (len(queue), queue.num_prompt_tokens) == (3, 15)
    queue.remove(requests[1])
    assert (len(queue), queue.num_prompt_tokens) == (2, 10)
    names(queue)
    assert (len(queue), queue.num_prompt_tokens) == (0, 0)


def test_first_come_first_served_but_what_was_put_back_goes_before() -> None:
    queue = FcfsQueue()
    for name in "ab":
        queue.append(make_request(name, 4))
    for name in "xy":
        queue.append_front(make_request(name, 4))
    assert names(queue) == ["y", "x", "a", "b"]


def test_equal_priorities_go_by_arrival_and_not_by_the_order_of_the_calls() -> None:
    queue = PriorityQueue()
    for name, priority, arrival_ns in (("late", 1, 30), ("early", 1, 10), ("middle", 1, 20), ("urgent", 0, 40)):
        queue.append(make_request(name, 4, priority=priority, arrival_ns=arrival_ns))
    assert names(queue) == ["urgent", "early", "middle", "late"]


def test_equal_priorities_and_arrivals_go_in_the_order_of_the_calls() -> None:
    queue = PriorityQueue()
    for name in "abc":
        queue.append(make_request(name, 4, priority=2, arrival_ns=5))
    assert names(queue) == ["a", "b", "c"]


def test_what_was_removed_and_added_again_stands_once_in_the_priority_queue() -> None:
    queue = PriorityQueue()
    first, second = make_request("first", 4, arrival_ns=1), make_request("second", 4, arrival_ns=2)
    queue.append(first)
    queue.append(second)
    queue.remove(first)
    assert queue.peek() is second
    queue.append_front(first)
    assert names(queue) == ["first", "second"]


def test_what_was_removed_and_added_again_goes_after_its_equals() -> None:
    queue = PriorityQueue()
    again, other = (make_request(name, 4, arrival_ns=5) for name in ("again", "other"))
    queue.append(again)
    queue.append(other)
    queue.remove(again)
    queue.append(again)
    assert names(queue) == ["other", "again"]


def test_tenants_take_turns_by_what_they_were_served() -> None:
    queue = FairQueue()
    for name in ("a1", "a2", "b1", "b2", "c1"):
        queue.append(of_tenant(name))
    order = []
    while queue:
        request = queue.pop()
        queue.charge(request, {"a": 10, "b": 4, "c": 100}[request.tenant])
        order.append(request.request_id)
    assert order == ["a1", "b1", "c1", "b2", "a2"]


def test_a_tenant_that_returns_starts_level_with_the_least_served_that_wait() -> None:
    queue = FairQueue()
    for name in ("a1", "b1"):
        queue.append(of_tenant(name))
    queue.charge(of_tenant("a"), 100)
    queue.charge(of_tenant("b"), 60)
    queue.append(of_tenant("c1"))  # level with b, at 60
    queue.charge(of_tenant("c"), 30)
    assert names(queue) == ["b1", "c1", "a1"]


def test_a_tenant_that_returns_keeps_what_it_was_served_beyond_the_others() -> None:
    queue = FairQueue()
    queue.append(of_tenant("a1"))
    queue.charge(of_tenant("a"), 50)
    queue.pop()
    queue.append(of_tenant("b1"))
    queue.append(of_tenant("a2"))
    queue.charge(of_tenant("b"), 40)
    assert names(queue) == ["b1", "a2"]


def test_what_is_put_back_goes_first_within_its_tenant_alone() -> None:
    queue = FairQueue()
    for name in ("a1", "b1"):
        queue.append(of_tenant(name))
    queue.append_front(of_tenant("b0"))
    queue.charge(of_tenant("a"), 1)
    assert names(queue) == ["b0", "b1", "a1"]


def test_names_that_are_used_once_are_forgotten_the_least_served_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_queue, "MAX_TENANTS", 4)
    queue = FairQueue()
    queue.append(make_request("waits", 4, tenant="waits"))
    queue.charge(make_request("greedy", 4, tenant="greedy"), 1000)
    for number in range(100):
        queue.charge(make_request(str(number), 4, tenant=f"junk{number}"), 1)
    assert len(queue._served) <= 9
    assert queue._served["greedy"] == 1000
    assert queue.peek().tenant == "waits"
    queue.remove(queue.peek())
    queue.compact()
    assert not queue._served


def test_a_tenant_that_was_served_little_long_ago_has_saved_nothing_up() -> None:
    queue = FairQueue()
    queue.append(of_tenant("a1"))
    queue.charge(queue.pop(), 5)
    queue.append(of_tenant("b1"))
    queue.charge(of_tenant("b"), 100)
    queue.append(of_tenant("a2"))  # level with b, at 100
    queue.charge(of_tenant("a"), 1)
    assert names(queue) == ["b1", "a2"]


@pytest.mark.parametrize("make_queue", [FcfsQueue, PriorityQueue, FairQueue])
def test_one_that_is_set_aside_counts_and_is_no_one_s_next(make_queue: Callable[[], WaitingQueue]) -> None:
    queue, requests = make_queue(), [make_request(name, 4, arrival_ns=index) for index, name in enumerate("abc")]
    for request in requests:
        queue.append(request)
    queue.set_aside(requests[0])
    assert (len(queue), queue.num_prompt_tokens, requests[0] in queue) == (3, 12, True)
    assert queue.peek() is requests[1]
    assert set(queue) == set(requests)
    queue.put_back(requests[1])  # it was not aside
    queue.put_back(requests[0])
    assert names(queue) == ["a", "b", "c"]
    queue.append(requests[0])
    queue.set_aside(requests[0])
    assert not queue.has_next
    queue.remove(requests[0])
    assert (len(queue), queue.num_prompt_tokens) == (0, 0)
    queue.put_back(requests[0])
    assert not queue.has_next, "it has left"


@pytest.mark.parametrize("make_queue", [FcfsQueue, FairQueue])
def test_a_queue_at_rest_forgets_that_large_calls_have_come(make_queue: Callable[[], WaitingQueue]) -> None:
    queue = make_queue()
    for index in range(2 * TURN):
        queue.append(make_request("large", 4, index=index))
    assert queue.num_late > 0
    names(queue)
    queue.compact()
    assert queue.num_late == 0


@pytest.mark.parametrize("make_queue", [FcfsQueue, PriorityQueue, FairQueue])
def test_what_a_client_has_waiting_is_counted_by_its_name(make_queue: Callable[[], WaitingQueue]) -> None:
    queue = make_queue()
    requests = [make_request(name, size, client=name[0]) for name, size in (("a1", 3), ("a2", 5), ("b1", 7))]
    nameless = make_request("c", 9)
    for request in (*requests[:2], nameless):
        queue.append(request)
    queue.append_front(requests[2])
    assert (queue.share_of("a"), queue.share_of("b"), queue.share_of("")) == ((2, 8), (1, 7), (0, 0))
    queue.remove(requests[0])
    assert queue.share_of("a") == (1, 5)
    names(queue)
    assert (queue.share_of("a"), queue.share_of("b"), queue.num_prompt_tokens) == ((0, 0), (0, 0), 0)
