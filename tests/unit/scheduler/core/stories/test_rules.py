"""Small rules of a step that are seen only with several sequences, a second admission, or at a bound."""

from types import SimpleNamespace

import pytest

from pagoda_common.errors import PagodaError
from pagoda_common.params.lora_adapter import LoraAdapter
from pagoda_scheduler.core.quarantine import Quarantine
from pagoda_scheduler.core.request import Request, RequestStatus
from pagoda_scheduler.core.scheduler import Scheduler
from tests.unit.scheduler.stories import EOS, PretendWorker, make_request, make_scheduler, run


def step(scheduler: Scheduler, worker: PretendWorker) -> list[Request]:
    """One step; who runs after it."""
    output = scheduler.schedule()
    assert output is not None
    scheduler.update(worker.execute(output))
    return list(scheduler.running)


def test_siblings_that_waited_for_their_prompt_are_admitted_in_their_order() -> None:
    scheduler, worker = make_scheduler(), PretendWorker()
    siblings = [make_request("a", 9, index=index, max_tokens=6, ignore_eos=True) for index in range(4)]
    for sibling in siblings[1:]:
        sibling.leader = siblings[0]
    other = make_request("b", [7, 8, 9], max_tokens=6, ignore_eos=True)
    for request in (*siblings, other):
        scheduler.add(request)
    assert step(scheduler, worker) == [siblings[0], other]
    assert list(scheduler.waiting) == siblings[1:]
    assert step(scheduler, worker) == [siblings[0], other, *siblings[1:]]


def test_an_admission_leaves_a_block_for_those_that_run() -> None:
    scheduler, worker = make_scheduler(num_blocks=6), PretendWorker()
    first = make_request("a", [1, 2, 3, 4, 5, 6], max_tokens=8, ignore_eos=True)  # 2 blocks
    second = make_request("b", list(range(20, 36)), max_tokens=2, ignore_eos=True)  # all 4 others
    scheduler.add(first)
    step(scheduler, worker)
    scheduler.add(second)
    assert step(scheduler, worker) == [first]
    run(scheduler, worker)
    assert (first.num_preemptions, second.num_preemptions, scheduler.num_preemptions) == (0, 0, 0)


def test_alone_a_prompt_may_take_the_last_block() -> None:
    scheduler, worker = make_scheduler(num_blocks=4), PretendWorker()
    request = make_request("a", list(range(20, 35)), max_tokens=1, ignore_eos=True)
    scheduler.add(request)
    run(scheduler, worker)
    assert request.finish_reason == "length"


def test_what_the_cache_had_and_when_it_was_admitted_are_the_first_admissions() -> None:
    scheduler, worker = make_scheduler(num_blocks=40), PretendWorker()
    scheduler.add(make_request("before", 9, max_tokens=1))
    run(scheduler, worker)
    request = make_request("a", 13, max_tokens=20, ignore_eos=True)
    scheduler.add(request)
    output = scheduler.schedule(now_ns=111)
    assert output is not None
    scheduler.update(worker.execute(output))
    assert (request.first_cached_tokens, request.admitted_ns) == (8, 111)
    scheduler.park(request)
    scheduler.unpark(request)
    output = scheduler.schedule(now_ns=222)
    assert output is not None
    assert request.num_computed_tokens > 12, "its own blocks were found"
    assert (request.first_cached_tokens, request.admitted_ns, request.num_preemptions) == (8, 111, 1)


def test_of_a_resumed_request_the_cache_may_have_more_than_its_prompt() -> None:
    scheduler, worker = make_scheduler(num_blocks=40), PretendWorker()
    before = make_request("a", 9, max_tokens=20, ignore_eos=True)
    scheduler.add(before)
    run(scheduler, worker)
    request = make_request("b", 9, max_tokens=30, ignore_eos=True)
    request.output_token_ids += before.output_token_ids
    request.num_tokens += 20
    scheduler.add(request)
    assert scheduler.schedule() is not None
    assert request.first_cached_tokens == 24
    assert request.num_cached_tokens == 9, "clients get the length of the cached prompt"


@pytest.mark.parametrize(("min_tokens", "is_finished"), [(0, True), (2, True), (3, False)])
def test_an_end_token_ends_from_the_minimum_on(min_tokens: int, is_finished: bool) -> None:
    request = make_request("a", 3, max_tokens=9, min_tokens=min_tokens)
    request.output_token_ids += [5, EOS]
    assert request.check_finished() is is_finished
    assert request.finish_reason == ("stop" if is_finished else None)


def test_a_stop_token_that_is_the_models_end_is_no_stop_reason() -> None:
    request = make_request("a", 3, max_tokens=9, stop_token_ids=[EOS, 77])
    request.output_token_ids.append(EOS)
    assert request.check_finished()
    assert (request.finish_reason, request.stop_token_id) == ("stop", None)
    other = make_request("b", 3, max_tokens=9, stop_token_ids=[EOS, 77])
    other.output_token_ids.append(77)
    assert other.check_finished()
    assert (other.finish_reason, other.stop_token_id) == ("stop", 77)


def test_a_request_that_was_there_before_the_model_takes_its_bounds_and_its_end_tokens() -> None:
    early = make_request("a", 3, max_tokens=None)
    early.eos_token_ids, early.end_token_ids = (), early.stop_token_ids
    early.learn_model(max_model_len=64, eos_token_ids=[EOS])
    assert (early.max_num_tokens, early.eos_token_ids, EOS in early.end_token_ids) == (64, (EOS,), True)
    early.learn_model(max_model_len=1000, eos_token_ids=[5])
    assert (early.max_num_tokens, early.eos_token_ids) == (64, (EOS,))
    deaf = make_request("b", 3, max_tokens=2, ignore_eos=True)
    deaf.learn_model(max_model_len=64, eos_token_ids=[EOS])
    assert (deaf.max_num_tokens, deaf.eos_token_ids) == (5, ())


def test_suspects_are_tried_in_the_order_in_which_they_came() -> None:
    quarantine, requests = Quarantine(), [make_request(name, 3) for name in "abc"]
    for request in requests:
        quarantine.add(request)
    assert (quarantine.first, list(quarantine)) == (requests[0], requests)
    quarantine.add(requests[0])
    assert quarantine.first is requests[0]
    quarantine.discard(requests[0])
    assert (quarantine.first, quarantine.take_all(), len(quarantine)) == (requests[1], requests[1:], 0)


@pytest.mark.parametrize(("shares", "num_found"), [(False, 0), (True, 2)])
def test_what_no_one_else_may_find_is_forgotten_with_its_request(shares: bool, num_found: int) -> None:
    scheduler = make_scheduler(enable_prefix_caching=shares, num_host_blocks=4, block_size=4)
    request = make_request("a", 9)
    scheduler.add(request)
    assert scheduler.schedule() is not None
    assert len(scheduler.kv.pool.hashes) == 2
    scheduler.finish(request)
    assert len(scheduler.kv.pool.hashes) == num_found


def test_sequences_of_an_adapter_that_cannot_be_read_end_with_its_error() -> None:
    scheduler = make_scheduler()
    first, second, other = (make_request(name, 9) for name in ("a", "b", "c"))
    for request in (first, second, other):
        scheduler.add(request)
    scheduler.park(second)
    asked: list[list[Request]] = []

    def failed(adapter: LoraAdapter, candidates: tuple[Request, ...], error: PagodaError) -> list[Request]:
        asked.append(list(candidates))
        return [first, second]

    scheduler.adapters = SimpleNamespace(failed=failed)  # type: ignore[assignment]  # all that is asked of it
    error = PagodaError("it cannot be read")
    assert scheduler.fail_adapter(LoraAdapter(name="a", path="/a"), error) == [first, second]
    assert asked == [[first, other, second]]
    for request in (first, second):
        assert (request.finish_reason, request.error, request.status) == ("error", error, RequestStatus.FINISHED)
    assert (list(scheduler.waiting), list(scheduler.parked)) == ([other], [])
    assert other.error is None


def test_all_sequences_of_a_search_end_with_the_error_of_their_adapter() -> None:
    scheduler, owners = make_scheduler(), [make_request(name, 9) for name in ("a", "b")]
    beam = make_request("beam", 9)
    beam.beam_group = SimpleNamespace(sequences=owners)  # type: ignore[assignment]  # all that is asked of it
    beam.is_beam = True
    scheduler.waiting.append(beam)
    scheduler.adapters = SimpleNamespace(failed=lambda *args: [beam])  # type: ignore[assignment]  # all that is asked of it
    error = PagodaError("it cannot be read")
    assert scheduler.fail_adapter(LoraAdapter(name="a", path="/a"), error) == owners
    assert [owner.status for owner in owners] == [RequestStatus.FINISHED] * 2
    assert [owner.error for owner in owners] == [error] * 2
    assert beam.is_finished


def test_a_step_says_how_many_prompts_end_in_it() -> None:
    scheduler, worker = make_scheduler(), PretendWorker()
    for start in (100, 200):
        scheduler.add(make_request(f"from {start}", list(range(start, start + 9))))
    output = scheduler.schedule()
    assert output is not None
    assert output.num_prefills_ended == 2
    scheduler.update(worker.execute(output))
    scheduler.add(make_request("c", 9, max_tokens=1))
    output = scheduler.schedule()
    assert output is not None
    assert (output.num_prefills_ended, len(output.slots)) == (1, 3)
    scheduler.update(worker.execute(output))
    output = scheduler.schedule()
    assert output is not None
    assert output.num_prefills_ended == 0


def test_a_search_waits_once_and_begins_with_its_first_sequence() -> None:
    scheduler, owners = make_scheduler(), [make_request("a", 9, index=index) for index in range(3)]
    beam = make_request("beam", 9)
    group = SimpleNamespace(sequences=owners, start=lambda: beam)
    for owner in owners:
        owner.beam_group = group  # type: ignore[assignment]  # all that is asked of it
    scheduler.add(owners[0])
    assert list(scheduler.waiting) == [beam]
    for owner in owners[1:]:
        scheduler.add(owner)
    assert list(scheduler.waiting) == [beam]
