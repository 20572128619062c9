"""Sequences that are there for their embedding: they end with their prompt, and hold nothing after it."""

import pytest

from pagoda_common.errors import RequestFailed, RequestTooLong
from pagoda_common.params.pooling_params import PoolingParams
from pagoda_scheduler.core.request import Request
from pagoda_scheduler.core.scheduler import Scheduler
from tests.unit.scheduler.stories import PretendWorker, expected_output, make_request, make_scheduler, run


def make_pooled(name: str, prompt: list[int] | int, **more: object) -> Request:
    return make_request(name, prompt, max_tokens=1, pooling=PoolingParams(), **more)


def check(request: Request) -> None:
    assert (request.finish_reason, request.output_token_ids) == ("stop", [])
    assert request.embedding == PretendWorker.embedding(list(request.prompt_token_ids))


def is_empty(scheduler: Scheduler) -> bool:
    return not scheduler.has_unfinished_requests and scheduler.kv.pool.num_used_blocks == 0


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("length", [1, 4, 5, 63, 64, 65, 129, 200])
def test_it_ends_with_its_last_chunk(window: int, length: int) -> None:
    scheduler = make_scheduler()
    request = make_pooled("a", length)
    scheduler.admission.check([request])
    scheduler.add(request)
    results = run(scheduler, PretendWorker(), window=window)
    check(request)
    assert len(results) == -(-length // 64), "no step after the last token"
    assert (results[-1].finished, results[-1].admitted, results[-1].token_ids) == ([request], [request], [])
    assert is_empty(scheduler)


@pytest.mark.parametrize("num_speculative_tokens", [0, 3])
def test_others_generate_beside_it(num_speculative_tokens: int) -> None:
    scheduler = make_scheduler(num_speculative_tokens=num_speculative_tokens, max_num_batched_tokens=24)
    requests = [
        make_pooled(f"p{i}", 30 + i) if i % 2 else make_request(f"g{i}", list(range(i, 3 * i + 5)), max_tokens=9)
        for i in range(10)
    ]
    for request in requests:
        scheduler.add(request)
    run(scheduler, PretendWorker(guess=lambda most: (most, most // 2)))
    for request in requests:
        if request.pooling is not None:
            check(request)
        else:
            assert request.output_token_ids == expected_output(list(request.prompt_token_ids), 9)
    assert is_empty(scheduler)


def test_a_cached_prefix_is_used_and_left() -> None:
    scheduler, worker = make_scheduler(), PretendWorker()
    for name in ("a", "b"):
        request = make_pooled(name, 41)
        scheduler.add(request)
        run(scheduler, worker)
        check(request)
    assert request.first_cached_tokens == 40
    generated = make_request("c", 41)
    scheduler.add(generated)
    run(scheduler, worker)
    assert generated.first_cached_tokens == 40


def test_when_blocks_run_out_it_is_computed_again() -> None:
    scheduler = make_scheduler(num_blocks=24, max_model_len=90, max_num_seqs=4, max_num_batched_tokens=4)
    requests = [make_request("g0", 16, max_tokens=40), make_pooled("p0", [*range(70)]), make_request("g1", 8)]
    requests.append(make_pooled("p1", [*range(100, 160)]))
    for request in requests:
        scheduler.add(request)
    run(scheduler, PretendWorker())
    assert scheduler.num_preemptions
    check(requests[1])
    check(requests[3])
    assert is_empty(scheduler)


def test_a_lost_worker_means_that_it_is_computed_anew() -> None:
    scheduler = make_scheduler()
    request = make_pooled("a", 100)
    scheduler.add(request)
    assert scheduler.schedule() is not None
    assert scheduler.schedule() is not None
    assert scheduler.take_all() == [request]
    assert (request.num_computed_tokens, request.num_pending, request.num_tokens) == (0, 0, 100)
    scheduler = make_scheduler()
    scheduler.add(request, at_front=True)
    run(scheduler, PretendWorker())
    check(request)


def test_it_may_be_aborted_while_its_last_chunk_is_in_flight() -> None:
    scheduler, worker = make_scheduler(), PretendWorker()
    request = make_pooled("a", 10)
    scheduler.add(request)
    output = scheduler.schedule()
    assert output is not None
    request.finish_reason = "abort"
    scheduler.finish(request)
    assert scheduler.update(worker.execute(output)).finished == []
    assert request.embedding == b""
    assert is_empty(scheduler)


def test_it_may_be_held_while_its_last_chunk_is_in_flight() -> None:
    scheduler, worker = make_scheduler(), PretendWorker()
    request = make_pooled("a", 10)
    scheduler.add(request)
    output = scheduler.schedule()
    assert output is not None
    scheduler.park(request)
    assert scheduler.update(worker.execute(output)).finished == [request]
    check(request)
    assert is_empty(scheduler)


def test_a_worker_that_gives_none_fails_it_alone() -> None:
    scheduler, worker = make_scheduler(), PretendWorker()
    request, other = make_pooled("a", 10), make_request("b", 100)
    for each in (request, other):
        scheduler.add(each)
    output = scheduler.schedule()
    assert output is not None
    scheduler.update(worker.execute(output)._replace(pooled={}))
    assert isinstance(request.error, RequestFailed)
    assert request.error.message == "the worker has given no embedding"
    run(scheduler, worker)
    assert other.finish_reason == "length"


def test_its_prompt_may_fill_the_context() -> None:
    scheduler = make_scheduler()
    with pytest.raises(RequestTooLong, match="prompt has 201 tokens, max_model_len is 200"):
        scheduler.admission.check([make_pooled("a", 201)])
