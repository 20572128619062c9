"""Many sequences of one call: they take turns with others, and what they run beyond their share is taken back."""

from collections.abc import Callable

import pytest

from pagoda_scheduler.core import turns
from pagoda_scheduler.core.request import Request
from pagoda_scheduler.core.turns import ADMISSIONS_A_TURN, TURN
from pagoda_scheduler.core.waiting_queue import FairQueue, FcfsQueue, WaitingQueue
from tests.unit.scheduler.engine.test_planned_pause import add_core, make_engine
from tests.unit.scheduler.stories import PretendWorker, expected_output, make_request, make_scheduler, run


def call(name: str, count: int, **more: object) -> list[Request]:
    """The sequences of one call."""
    return [
        make_request(f"{name}-{number}", 6, group=name, cache_salt=f"{name}-{number}", **more)
        for number in range(count)
    ]


def names(queue: WaitingQueue) -> list[str]:
    return [queue.pop().request_id for _ in range(len(queue))]


@pytest.mark.parametrize("make_queue", [FcfsQueue, FairQueue])
def test_what_comes_after_a_large_call_goes_before_its_rest(make_queue: Callable[[], WaitingQueue]) -> None:
    queue, large = make_queue(), call("large", 3 * TURN)
    for request in large:
        queue.append(request)
    order = [queue.pop() for _ in range(TURN + 3)]
    for victim in ("v1", "v2"):
        queue.append(make_request(victim, 4))
    assert order == large[: TURN + 3]
    assert names(queue) == ["v1", "v2", *(request.request_id for request in large[TURN + 3 :])]


def test_calls_of_a_turn_are_served_first_come_first_served() -> None:
    queue = FcfsQueue()
    requests = [request for name in "abc" for request in (*call(name, TURN), make_request(f"{name} alone", 4))]
    for request in requests:
        queue.append(request)
    assert names(queue) == [request.request_id for request in requests]
    assert queue.num_late == 0


def test_a_large_call_has_its_share_while_others_come_without_end() -> None:
    queue = FcfsQueue()
    for request in call("large", 20 * TURN):
        queue.append(request)
    num_large = 0
    for number in range(10 * (ADMISSIONS_A_TURN + TURN)):
        queue.append(make_request(f"other-{number}", 4))
        num_large += queue.pop().group == "large"
    assert 9 * TURN <= num_large <= 12 * TURN


def singles(client: str, count: int) -> list[Request]:
    """Calls of one sequence each."""
    return [
        make_request(f"{client}-{number}", 6, client=client, cache_salt=f"{client}-{number}") for number in range(count)
    ]


@pytest.mark.parametrize("make_queue", [FcfsQueue, FairQueue])
def test_what_another_client_sends_goes_before_the_many_requests_of_one(
    make_queue: Callable[[], WaitingQueue],
) -> None:
    queue, many = make_queue(), singles("many", 1000)
    for request in many:
        queue.append(request)
    assert [queue.pop() for _ in range(200)] == many[:200]
    for request in singles("other", 2):
        queue.append(request)
    order = names(queue)
    assert max(order.index("other-0"), order.index("other-1")) < 4
    assert [name for name in order if name.startswith("many")] == [request.request_id for request in many[200:]]
    assert queue.num_late == 0, "no one is preempted for that"


def test_clients_with_much_to_do_have_equal_shares() -> None:
    queue = FcfsQueue()
    for request in (*singles("a", 1000), *singles("b", 1000)):
        queue.append(request)
    first = [queue.pop().client for _ in range(600)]
    assert 250 <= first.count("b") <= 350


def test_requests_of_one_client_keep_their_order_over_bursts_and_pauses() -> None:
    queue, serial, admitted = FcfsQueue(), 0, list[int]()
    for num_arrivals, num_admissions in [(10, 5), (100, 30), (3, 60), (1, 10), (200, 210), (1, 1), (70, 79)]:
        for _ in range(num_arrivals):
            queue.append(make_request(str(serial), 4, client="a"))
            serial += 1
        admitted += [int(queue.pop().request_id) for _ in range(min(num_admissions, len(queue)))]
    assert admitted == list(range(len(admitted)))


def test_a_client_that_has_caught_up_starts_anew() -> None:
    queue = FcfsQueue()
    for request in singles("a", 1000):
        queue.append(request)
    for _ in range(1000):
        queue.pop()
    for request in (*singles("a", 60), make_request("b", 4, client="b")):
        queue.append(request)
    assert names(queue)[-1] == "b"


def test_a_large_call_does_not_make_its_client_wait() -> None:
    queue = FcfsQueue()
    for request in call("large", 1000, client="a"):
        queue.append(request)
    for request in (make_request("its", 4, client="a"), make_request("other's", 4, client="b")):
        queue.append(request)
    assert names(queue)[TURN : TURN + 2] == ["its", "other's"]


def test_of_many_clients_those_are_remembered_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "MAX_CLIENTS", 8)
    kept = turns.Turns()
    for number in range(100):
        place = kept.last(make_request(f"r{number}", 1, client=f"c{number}"))
        kept.admit(place)
    assert len(kept._clients) <= 16


def test_a_place_is_kept_by_what_is_set_aside() -> None:
    queue, requests = FcfsQueue(), call("c", 4)
    for request in requests:
        queue.append(request)
    queue.set_aside(requests[1])
    assert queue.pop() is requests[0]
    queue.put_back(requests[1])
    assert names(queue) == ["c-1", "c-2", "c-3"]


def check(requests: list[Request], max_tokens: int) -> None:
    """No one has lost or repeated a token."""
    for request in requests:
        assert request.output_token_ids == expected_output(list(request.prompt_token_ids), max_tokens)


@pytest.mark.parametrize("num_calls", [1, 3])
@pytest.mark.parametrize("policy", ["fcfs", "fair"])
def test_a_victim_runs_in_the_next_step_whatever_large_calls_run(policy: str, num_calls: int) -> None:
    slots = 4 * TURN
    scheduler = make_scheduler(num_blocks=2000, policy=policy, max_num_seqs=slots, max_num_batched_tokens=1000)
    worker = PretendWorker()
    large = [request for number in range(num_calls) for request in call(f"l{number}", 70, max_tokens=30)]
    for request in large:
        scheduler.add(request)
    for _ in range(3):
        output = scheduler.schedule()
        assert output is not None
        scheduler.update(worker.execute(output))
    assert len(scheduler.running) == slots
    victims = [make_request(f"v{number}", 5, cache_salt=f"v{number}", max_tokens=30) for number in range(3)]
    for victim in victims[:2]:
        scheduler.add(victim)
        output = scheduler.schedule()
        assert output is not None
        assert victim in scheduler.running
        scheduler.update(worker.execute(output))
    scheduler.add(victims[2])
    run(scheduler, worker)
    check([*victims, *large], 30)


def test_blocks_are_taken_back_as_slots_are() -> None:
    scheduler, worker = make_scheduler(num_blocks=40, max_num_seqs=64), PretendWorker()
    large = call("large", 60, max_tokens=12)
    for request in large:
        scheduler.add(request)
    while (output := scheduler.schedule()) is not None and len(scheduler.running) * 2 < 40 - 3:
        scheduler.update(worker.execute(output))
    assert output is not None
    scheduler.update(worker.execute(output))
    victim = make_request("victim", 40, cache_salt="v", max_tokens=4)
    scheduler.add(victim)
    output = scheduler.schedule()
    assert output is not None
    assert victim in scheduler.running
    scheduler.update(worker.execute(output))
    run(scheduler, worker)
    check([victim], 4)
    check(large, 12)


def test_nobody_is_preempted_where_no_call_is_large() -> None:
    scheduler, worker = make_scheduler(num_blocks=400), PretendWorker()
    requests = [request for name in "abc" for request in call(name, 8, max_tokens=10)]
    for request in requests:
        scheduler.add(request)
    run(scheduler, worker)
    assert scheduler.num_preemptions == 0
    check(requests, 10)


def test_a_large_call_alone_has_all_slots_and_is_not_preempted() -> None:
    scheduler, worker = make_scheduler(num_blocks=400), PretendWorker()
    large = call("large", 50, max_tokens=10)
    for request in large:
        scheduler.add(request)
    run(scheduler, worker)
    assert scheduler.num_preemptions == 0
    check(large, 10)


async def test_a_large_call_waits_for_turns_again_when_its_worker_is_lost() -> None:
    engine = make_engine(max_num_seqs=4)
    core = add_core(engine)
    large = call("large", 3 * TURN)
    for request in large:
        engine.submit([request])
    core.step()
    running = list(core.scheduler.running)
    engine.remove_core(core, "lost")
    second = add_core(engine)
    engine.submit([victim := make_request("victim", 6)])
    order = list(second.scheduler.waiting)
    assert order[: 4 + TURN] == large[: 4 + TURN]
    assert running == large[:4]
    assert order.index(victim) < len(order) - TURN // 2
    assert set(order) == {victim, *large}
