"""What a scheduler takes in: each bound is met at the number that it names, and not before."""

from dataclasses import replace

import pytest

from pagoda.options.llm_options import engine_config_from_options
from pagoda_common.config.engine_config import SchedulerConfig
from pagoda_common.errors import Code, InvalidRequest, QueueFull, RequestTooLong, ShareFull
from pagoda_common.params.pooling_params import POOLED, PoolingParams
from pagoda_scheduler.core import step_plan
from pagoda_scheduler.core.admission import Admission, check_queue
from pagoda_scheduler.core.request import Request
from pagoda_scheduler.core.waiting_queue import FairQueue, FcfsQueue, PriorityQueue, WaitingQueue
from tests.unit.scheduler.stories import make_request, make_scheduler


def admission(*, waiting: list[int] | None = None, vocab_size: int | None = None, **config: object) -> Admission:
    """Bounds of a scheduler with a context of 20 tokens; `waiting`: sizes of the prompts in its queue."""
    queue = FcfsQueue()
    for number, size in enumerate(waiting or []):
        queue.append(make_request(f"waiting-{number}", size))
    settings = SchedulerConfig(**{"max_num_seqs": 4, "max_num_batched_tokens": 8, **config})  # type: ignore[arg-type]
    return Admission(config=settings, waiting=queue, max_model_len=20, vocab_size=vocab_size)


def pooled(size: int) -> Request:
    return Request(
        request_id="pooled",
        prompt_token_ids=list(range(size)),
        sampling_params=POOLED,
        max_model_len=200,
        pooling=PoolingParams(),
    )


def test_one_token_of_the_context_is_the_outputs() -> None:
    admission().check([make_request("fits", 19)])
    with pytest.raises(RequestTooLong, match="20 tokens, max_model_len is 20"):
        admission().check([make_request("long", 20)])


def test_what_is_pooled_may_fill_the_context() -> None:
    admission().check([pooled(20)])
    with pytest.raises(RequestTooLong, match="21 tokens"):
        admission().check([pooled(21)])


def test_without_chunks_a_prompt_must_fit_a_step() -> None:
    admission(enable_chunked_prefill=False).check([make_request("fits", 8)])
    admission().check([make_request("chunked", 9)])
    with pytest.raises(RequestTooLong, match="9 tokens, max_num_batched_tokens is 8"):
        admission(enable_chunked_prefill=False).check([make_request("long", 9)])


@pytest.mark.parametrize("where", ["prompt_token_ids", "output_token_ids"])
def test_a_token_must_be_in_the_vocabulary(where: str) -> None:
    def request(token: int) -> Request:
        prompt, output = ([token, 1], [2]) if where == "prompt_token_ids" else ([1], [token, 2])
        return make_request("a", prompt, output_token_ids=output)

    admission(vocab_size=50).check([request(49)])
    with pytest.raises(InvalidRequest, match=f"{where} has token 50, the vocabulary has 50") as caught:
        admission(vocab_size=50).check([request(50)])
    assert caught.value.field == where


def test_every_sequence_of_a_request_is_looked_at() -> None:
    with pytest.raises(RequestTooLong):
        admission().check([make_request("fits", 3), make_request("long", 30)])


def test_sequences_that_wait_and_new_ones_count_against_the_bound() -> None:
    two = [make_request("a", 2), make_request("b", 2)]
    admission(waiting=[1, 1], max_num_queued_reqs=4).check(two)
    with pytest.raises(QueueFull, match="2 sequences are waiting, max_num_queued_reqs is 3"):
        admission(waiting=[1, 1], max_num_queued_reqs=3).check(two)


def test_prompt_tokens_that_wait_and_new_ones_count_against_the_bound() -> None:
    two = [make_request("a", 2), make_request("b", 3)]
    admission(waiting=[4, 6], max_num_queued_tokens=15).check(two)
    with pytest.raises(QueueFull, match="15 prompt tokens would wait, max_num_queued_tokens is 14"):
        admission(waiting=[4, 6], max_num_queued_tokens=14).check(two)


def test_a_queue_is_bounded_unless_it_is_told_otherwise_and_an_honest_request_fits() -> None:
    config = SchedulerConfig()
    full = FcfsQueue()
    full.num_prompt_tokens = config.max_num_queued_tokens
    with pytest.raises(QueueFull, match="max_num_queued_tokens is 33554432") as caught:
        check_queue(config, waiting=full, requests=[make_request("a", 1)])
    assert caught.value.retry_after_s > 0
    waiting = FcfsQueue()
    requests = [make_request(f"r{number}", 1) for number in range(config.max_num_queued_reqs)]
    check_queue(config, waiting=waiting, requests=requests)
    for request in requests:
        waiting.append(request)
    with pytest.raises(QueueFull, match="16384 sequences are waiting"):
        check_queue(config, waiting=waiting, requests=[make_request("one more", 1)])
    private = engine_config_from_options().scheduler
    assert (private.max_num_queued_reqs, private.max_num_queued_tokens) == (0, 0), "an LLM has one client"
    assert engine_config_from_options(max_num_queued_reqs=7).scheduler.max_num_queued_reqs == 7


def waiting_for(*clients: str) -> FcfsQueue:
    queue = FcfsQueue()
    for number, client in enumerate(clients):
        queue.append(make_request(f"waiting-{number}", 2, client=client))
    return queue


@pytest.mark.parametrize(("bound", "text"), [("reqs", "2 sequences of"), ("tokens", "6 prompt tokens of")])
def test_one_client_has_its_share_of_the_queue(bound: str, text: str) -> None:
    config = SchedulerConfig(**{f"max_num_queued_{bound}": {"reqs": 4, "tokens": 8}[bound]})  # type: ignore[arg-type]  # a field by name
    queue = waiting_for("a", "a")
    with pytest.raises(ShareFull, match=text) as caught:
        check_queue(config, waiting=queue, requests=[make_request("c", 2, client="a")])
    assert (caught.value.http.status, caught.value.code) == (429, Code.RESOURCE_EXHAUSTED)
    assert caught.value.retry_after_s > 0
    check_queue(config, waiting=queue, requests=[make_request("c", 2, client="b")])
    check_queue(config, waiting=queue, requests=[make_request("c", 2)])  # of no one in particular
    wider = replace(config, max_queued_share=1.0)
    check_queue(wider, waiting=queue, requests=[make_request("c", 2, client="a")])


@pytest.mark.parametrize("make_queue", [FcfsQueue, FairQueue, PriorityQueue])
def test_a_share_is_free_again_however_a_sequence_leaves(make_queue: type[WaitingQueue]) -> None:
    queue = make_queue()
    requests = [make_request(f"r{number}", 3, client="a", tenant="t") for number in range(4)]
    for request in requests:
        queue.append(request)
    queue.set_aside(requests[3])
    assert queue.share_of("a") == (4, 12)
    admitted = queue.pop()
    assert queue.share_of("a") == (3, 9)
    queue.append_front(admitted)
    queue.remove(requests[2])
    queue.remove(requests[3])
    assert queue.share_of("a") == (2, 6)
    while queue.has_next:
        queue.pop()
    assert queue.share_of("a") == (0, 0)


def test_without_bounds_there_are_no_shares() -> None:
    config = SchedulerConfig(max_num_queued_reqs=0, max_num_queued_tokens=0)
    check_queue(config, waiting=waiting_for(*"aaaa"), requests=[make_request("c", 2, client="a")])


def test_what_was_taken_in_before_is_not_bounded_by_the_queue() -> None:
    admission(waiting=[1, 1], max_num_queued_reqs=2, max_num_queued_tokens=2).check_fits([make_request("a", 5)])


@pytest.mark.parametrize(
    ("bounds", "is_full"),
    [
        ({"max_num_queued_reqs": 2}, True),
        ({"max_num_queued_reqs": 3}, False),
        ({"max_num_queued_tokens": 11}, True),
        ({"max_num_queued_tokens": 12}, False),
        ({"max_num_queued_reqs": 0, "max_num_queued_tokens": 0}, False),
        ({}, False),
    ],
)
def test_without_a_group_the_same_bounds_hold(bounds: dict[str, int], is_full: bool) -> None:
    waiting = FcfsQueue()
    for request in (make_request("a", 3), make_request("b", 4)):
        waiting.append(request)
    config = SchedulerConfig(**bounds)  # type: ignore[arg-type]
    if is_full:
        with pytest.raises(QueueFull):
            check_queue(config, waiting=waiting, requests=[make_request("c", 5)])
    else:
        check_queue(config, waiting=waiting, requests=[make_request("c", 5)])


def test_without_chunks_a_prompt_that_fills_a_step_runs_in_it_alone() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16, enable_chunked_prefill=False)
    whole, other = make_request("whole", 16, cache_salt="a"), make_request("other", 1, cache_salt="b")
    scheduler.add(whole)
    scheduler.add(other)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first is not None
    assert second is not None
    assert (first.num_scheduled_tokens, second.num_scheduled_tokens) == ([16], [1, 1])


def test_a_steps_message_has_room_for_so_many_new_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each goes to the worker in full: n sequences with a large constraint are too large a message together."""
    monkeypatch.setattr(step_plan, "MAX_NEW_BYTES", 100)
    scheduler = make_scheduler(num_blocks=100)
    for number, prompt in enumerate([[1] * 10, [2] * 10, [3] * 10, [4] * 40]):
        scheduler.add(make_request(f"r{number}", prompt))
    entered = []
    for _ in range(4):
        output = scheduler.schedule()
        assert output is not None
        entered.append([new.request_id for new in output.new_requests])
    assert entered == [["r0/0", "r1/0"], ["r2/0"], ["r3/0"], []], "one alone may be larger"
