"""Who gives way to whom, with several running sequences: by priority, then by arrival; what a tenant's tokens cost."""

from pagoda_scheduler.core.request import Request
from pagoda_scheduler.core.scheduler import Scheduler
from pagoda_scheduler.core.waiting_queue import FairQueue
from tests.unit.scheduler.stories import PretendWorker, expected_output, make_request, make_scheduler, run


def step(scheduler: Scheduler, worker: PretendWorker) -> list[Request]:
    """One step; who runs after it."""
    output = scheduler.schedule()
    assert output is not None
    scheduler.update(worker.execute(output))
    return list(scheduler.running)


def long(name: str, priority: int, arrival_ns: int, size: int = 6) -> Request:
    return make_request(
        name, size, max_tokens=40, ignore_eos=True, priority=priority, arrival_ns=arrival_ns, cache_salt=name
    )


def test_the_least_urgent_of_three_running_ones_gives_way_and_no_other() -> None:
    scheduler, worker = make_scheduler(max_num_seqs=3, policy="priority"), PretendWorker()
    requests = [long("five", 5, 1), long("nine", 9, 2), long("one", 1, 3)]
    for request in requests:
        scheduler.add(request)
    step(scheduler, worker)
    urgent = long("three", 3, 4)
    scheduler.add(urgent)
    assert set(step(scheduler, worker)) == {requests[0], requests[2], urgent}
    assert [request.num_preemptions for request in (*requests, urgent)] == [0, 1, 0, 0]
    assert scheduler.num_preemptions == 1
    run(scheduler, worker)
    for request in (*requests, urgent):
        assert request.output_token_ids == _undisturbed(request)


def test_of_equal_priorities_the_last_to_arrive_gives_way() -> None:
    scheduler, worker = make_scheduler(max_num_seqs=3, policy="priority"), PretendWorker()
    last, first, middle = long("last", 9, 30), long("first", 9, 10), long("middle", 9, 20)
    for request in (last, first, middle):
        scheduler.add(request)
    step(scheduler, worker)
    scheduler.add(long("urgent", 8, 40))
    step(scheduler, worker)
    assert [request.num_preemptions for request in (first, middle, last)] == [0, 0, 1]


def test_nobody_gives_way_to_an_equal() -> None:
    scheduler, worker = make_scheduler(max_num_seqs=2, policy="priority"), PretendWorker()
    requests = [long("a", 4, 10), long("b", 4, 20)]
    for request in requests:
        scheduler.add(request)
    step(scheduler, worker)
    scheduler.add(long("earlier", 4, 1))
    assert step(scheduler, worker) == requests
    assert scheduler.num_preemptions == 0


def test_as_many_give_way_as_an_urgent_prompt_needs_blocks() -> None:
    # 16 blocks of 4 tokens, one of them kept free: three sequences of 4 blocks, and a prompt of 10 blocks.
    scheduler, worker = make_scheduler(num_blocks=16, policy="priority"), PretendWorker()
    requests = [long("a", 5, 10, size=14), long("b", 7, 20, size=14), long("c", 6, 30, size=14)]
    for request in requests:
        scheduler.add(request)
    step(scheduler, worker)
    urgent = make_request("urgent", 38, max_tokens=2, ignore_eos=True, priority=0, arrival_ns=40, cache_salt="u")
    scheduler.add(urgent)
    assert urgent in step(scheduler, worker)
    assert [request.num_preemptions for request in requests] == [0, 1, 1]


def test_when_blocks_run_out_the_least_urgent_goes_wherever_it_stands() -> None:
    scheduler, worker = make_scheduler(num_blocks=9, policy="priority"), PretendWorker()
    requests = [long("a", 9, 10, size=7), long("b", 1, 20, size=7), long("c", 5, 30, size=7)]
    for request in requests:
        scheduler.add(request)
    for _ in range(40):
        step(scheduler, worker)
        if scheduler.num_preemptions:
            break
    assert [request.num_preemptions for request in requests] == [1, 0, 0]
    run(scheduler, worker)
    for request in requests:
        assert request.output_token_ids == _undisturbed(request)[: len(request.output_token_ids)]


def test_under_first_come_first_served_the_last_admitted_goes() -> None:
    scheduler, worker = make_scheduler(num_blocks=9), PretendWorker()
    requests = [long(name, 0, 0, size=7) for name in "abc"]
    for request in requests:
        scheduler.add(request)
    while not scheduler.num_preemptions:
        step(scheduler, worker)
    assert [request.num_preemptions for request in requests] == [0, 0, 1]


def test_an_output_token_counts_as_two_of_a_prompt() -> None:
    scheduler, worker = make_scheduler(max_num_seqs=2, policy="fair"), PretendWorker()
    scheduler.add(make_request("a1", 4, max_tokens=10, ignore_eos=True, tenant="a", cache_salt="a"))
    scheduler.add(make_request("b1", 21, max_tokens=1, ignore_eos=True, tenant="b", cache_salt="b"))
    run(scheduler, worker)
    assert isinstance(scheduler.waiting, FairQueue)
    assert scheduler.waiting._served == {"a": 4 + 2 * 10, "b": 21 + 2 * 1}
    for tenant in "ba":
        scheduler.add(make_request(f"{tenant}2", 3, tenant=tenant))
    assert [scheduler.waiting.pop().request_id for _ in range(2)] == ["b2", "a2"]


def _undisturbed(request: Request) -> list[int]:
    log = list(request.prompt_token_ids)
    for _ in range(40):
        log.append(PretendWorker.next_token(log))
    assert expected_output(log[: request.num_prompt_tokens], 1) == log[request.num_prompt_tokens :][:1]
    return log[request.num_prompt_tokens :]
