"""Stories about models with recurrent layers: where states are kept, and who begins with them."""

import pytest

from pagoda_scheduler.core.request import Request
from pagoda_scheduler.core.scheduler import Scheduler
from pagoda_scheduler.core.step import SchedulerOutput
from pagoda_scheduler.kv.cache_group import CacheGroup
from pagoda_scheduler.kv.state_snapshots import StateSnapshots
from pagoda_scheduler.kv.transfers import Transfers
from tests.unit.scheduler import stories
from tests.unit.scheduler.beams import test_beam_search
from tests.unit.scheduler.beams.test_beam_search import make_group, searched
from tests.unit.scheduler.stories import PretendWorker, expected_output, make_request, make_scheduler, run

HYBRID = (CacheGroup("full"), CacheGroup("recurrent"))
ALONE = (CacheGroup("recurrent"),)


def make(
    groups: tuple[CacheGroup, ...] = HYBRID, *, num_snapshots: int = 10, **options: object
) -> tuple[Scheduler, PretendWorker]:
    """Blocks of 4 tokens; a snapshot every 100, unless the story says otherwise."""
    options = {"snapshot_interval": 100, **options}
    scheduler = make_scheduler(groups=groups, num_snapshots=num_snapshots, **options)  # type: ignore[arg-type]
    return scheduler, PretendWorker(groups=groups)


def step(scheduler: Scheduler, worker: PretendWorker) -> SchedulerOutput:
    output = scheduler.schedule()
    assert output is not None
    scheduler.update(worker.execute(output))
    return output


def computed(scheduler: Scheduler, worker: PretendWorker, request: Request) -> list[int]:
    """Tokens of each chunk of the request's prompt; then the request runs to its end, and its output is right."""
    scheduler.add(request)
    chunks = []
    while request.num_computed_tokens < request.num_prompt_tokens:
        chunks += step(scheduler, worker).num_scheduled_tokens
    run(scheduler, worker)
    assert request.output_token_ids == expected_output(request.prompt_token_ids, 4)
    return chunks


def snapshots_of(scheduler: Scheduler) -> StateSnapshots:
    assert scheduler.kv.states is not None
    return scheduler.kv.states.snapshots


@pytest.mark.parametrize("groups", [HYBRID, ALONE])
def test_a_prompt_is_found_again_up_to_its_last_full_block(groups: tuple[CacheGroup, ...]) -> None:
    scheduler, worker = make(groups)
    assert computed(scheduler, worker, make_request("first", 22)) == [20, 2]
    assert computed(scheduler, worker, make_request("again", 22)) == [2]
    assert worker.states is not None
    assert (worker.states.num_saved, worker.states.num_loaded) == (1, 1)
    assert scheduler.kv.num_prefix_hits == 20


def test_a_sequence_that_leaves_before_its_step_is_sent_loads_nothing() -> None:
    scheduler, worker = make()
    first = make_request("first", 22)
    computed(scheduler, worker, first)
    states, again = scheduler.kv.states, make_request("again", 22)
    assert states is not None
    name = first.block_hashes[4]
    again.slot = 3
    transfers = Transfers()
    states.admit(again, name)
    states.take(transfers)
    assert [slot for _, slot in transfers.states_to_load] == [3]
    states.admit(again, name)
    states.free(again)
    states.take(transfers)
    assert list(transfers.states_to_load) == [], "the slot may be another's by then"
    snapshots_of(scheduler).check_invariants()


def test_a_prompt_of_whole_blocks_runs_its_last_block_again() -> None:
    scheduler, worker = make()
    assert computed(scheduler, worker, make_request("first", 20)) == [16, 4]
    assert computed(scheduler, worker, make_request("again", 20)) == [4]


def test_states_are_kept_at_intervals_of_whole_blocks() -> None:
    scheduler, worker = make(snapshot_interval=7)
    assert computed(scheduler, worker, make_request("first", 30)) == [8, 8, 8, 4, 2]
    other = make_request("other", [*range(1000, 1019), *[5] * 9])
    assert computed(scheduler, worker, other) == [8, 4], "16 tokens are shared, 24 the next boundary, 28 the end"


def test_a_decode_keeps_states_that_are_found_when_their_tokens_are_known() -> None:
    scheduler, worker = make(snapshot_interval=8)
    request = make_request("first", 5, max_tokens=21)
    scheduler.add(request)
    for _ in range(3):
        step(scheduler, worker)
    assert (request.num_computed_tokens, snapshots_of(scheduler).num_named) == (6, 1)
    before, output = scheduler.schedule(), scheduler.schedule()
    assert before is not None
    assert output is not None
    assert output.states_to_save == [(0, 1)], "after the token that the step before it samples"
    assert (request.unnamed_states, snapshots_of(scheduler).num_named) == ([(8, 1)], 1)
    scheduler.update(worker.execute(before))
    scheduler.update(worker.execute(output))
    assert (request.unnamed_states, snapshots_of(scheduler).num_named) == ([], 2)
    run(scheduler, worker)
    conversation = [*request.prompt_token_ids, *request.output_token_ids]
    assert computed(scheduler, worker, make_request("next", [*conversation, 7])) == [3], "24 of 27 tokens are found"


def test_guesses_have_no_states() -> None:
    scheduler, worker = make(snapshot_interval=4, num_speculative_tokens=3)
    request = make_request("a", 5, max_tokens=30)
    scheduler.add(request)
    run(scheduler, worker)
    assert worker.states is not None
    assert (request.output_token_ids, worker.states.num_saved) == (expected_output(request.prompt_token_ids, 30), 1)


def test_a_state_is_kept_where_prompts_part() -> None:
    scheduler, worker = make()
    shared = list(range(100, 115))
    assert computed(scheduler, worker, make_request("one", [*shared, *[1] * 10])) == [24, 1]
    assert computed(scheduler, worker, make_request("two", [*shared, *[2] * 10])) == [12, 12, 1]
    assert computed(scheduler, worker, make_request("three", [*shared, *[3] * 10])) == [12, 1]


def test_without_snapshots_everything_is_computed_again() -> None:
    scheduler, worker = make(num_snapshots=0)
    for name in ("first", "again"):
        assert computed(scheduler, worker, make_request(name, 22)) == [22]
    assert scheduler.kv.num_prefix_hits == 0


@pytest.mark.parametrize("option", [{"enable_prefix_caching": False}, {"enable_chunked_prefill": False}])
def test_what_no_one_finds_or_may_not_be_cut_is_not_kept(option: dict[str, bool]) -> None:
    scheduler, worker = make(**option)
    for name in ("first", "again"):
        assert computed(scheduler, worker, make_request(name, 22)) == [22]


@pytest.mark.parametrize("is_shared", [False, True])
def test_without_a_prefix_cache_no_state_is_copied(is_shared: bool) -> None:
    """Only a beam's, which forks from it."""
    scheduler = make(enable_prefix_caching=is_shared)[0]
    scheduler.add(make_request("a", 24))
    output = scheduler.schedule()
    assert output is not None
    assert bool(output.states_to_save) is is_shared


def test_states_swap_to_the_host_and_back() -> None:
    scheduler, worker = make(num_snapshots=1, num_host_snapshots=3)
    prompts = {name: [number] * 22 for number, name in enumerate("abc", start=7)}
    for name, prompt in prompts.items():
        assert computed(scheduler, worker, make_request(name, prompt)) == [20, 2]
    for name, prompt in prompts.items():
        assert computed(scheduler, worker, make_request(f"{name} again", prompt)) == [2]


def test_siblings_begin_at_the_last_full_block_of_their_prompt() -> None:
    scheduler, worker = make()
    requests = [make_request("a", 22, index=index, max_tokens=6) for index in range(3)]
    for request in requests:
        request.leader = requests[0] if request is not requests[0] else None
        scheduler.add(request)
    run(scheduler, worker)
    assert [request.first_cached_tokens for request in requests] == [0, 20, 20]
    for request in requests:
        assert request.output_token_ids == expected_output(request.prompt_token_ids, 6)


def test_two_equal_prompts_in_one_step_keep_one_state() -> None:
    scheduler, worker = make()
    for name in "ab":
        scheduler.add(make_request(name, 22))
    output = step(scheduler, worker)
    assert (output.num_scheduled_tokens, len(output.states_to_save)) == ([20, 20], 1)
    run(scheduler, worker)
    snapshots_of(scheduler).check_invariants()


def test_the_states_of_a_failed_sequence_are_forgotten() -> None:
    scheduler, worker = make()
    worker.bad.add("a/0")
    scheduler.add(make_request("a", 22))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first is not None
    assert second is not None
    assert snapshots_of(scheduler).num_named == 1
    scheduler.update(worker.execute(first))
    assert snapshots_of(scheduler).num_named == 0
    scheduler.update(worker.execute(second))
    assert computed(scheduler, worker, make_request("b", 22)) == [20, 2]


def test_a_reset_forgets_states_on_the_device_and_on_the_host() -> None:
    scheduler, worker = make(num_snapshots=1, num_host_snapshots=1)
    for number in (7, 8):
        computed(scheduler, worker, make_request(str(number), [number] * 22))
    scheduler.kv.reset_cache()
    for number in (7, 8):
        assert computed(scheduler, worker, make_request(f"{number} again", [number] * 22)) == [20, 2]


def test_a_preempted_sequence_goes_back_to_its_last_snapshot() -> None:
    scheduler, worker = make(snapshot_interval=8)
    request = make_request("a", 5, max_tokens=20)
    scheduler.add(request)
    for _ in range(10):
        step(scheduler, worker)
    assert request.num_computed_tokens == 13
    scheduler.park(request)
    scheduler.unpark(request)
    (new,) = step(scheduler, worker).new_requests
    assert new.num_computed_tokens == 8
    run(scheduler, worker)
    assert request.output_token_ids == expected_output(request.prompt_token_ids, 20)


@pytest.mark.parametrize("num_snapshots", [10, 0])
def test_beams_fork_from_snapshots_and_else_are_computed_again(num_snapshots: int) -> None:
    scheduler, worker = make(num_snapshots=num_snapshots, max_num_seqs=16)
    prompt = [11, 12, 13, 14, 15]
    group = make_group("a", prompt)
    for sequence in group:
        scheduler.add(sequence)
    run(scheduler, worker)
    assert [sequence.output_token_ids for sequence in group] == [list(h.token_ids) for h in searched(prompt)]
    assert worker.states is not None
    assert (worker.states.num_loaded > 0) is (num_snapshots > 0)
    assert scheduler.kv.num_prefix_queries == 5 or not num_snapshots, "only the first beam was looked up"
    snapshots_of(scheduler).check_invariants()
    assert not snapshots_of(scheduler)._holders


@pytest.mark.parametrize("num_snapshots", [10, 0])
def test_a_beam_that_does_not_take_the_likeliest_token_begins_anew(
    monkeypatch: pytest.MonkeyPatch, num_snapshots: int
) -> None:
    def ends_first(log: list[int], count: int) -> tuple[list[int], list[float]]:
        token_ids = [3, 20 + len(log), 40 + len(log), 60, 61, 62, 63, 64, 65][:count]  # 3 ends, and is the likeliest
        return token_ids, [-0.5 * (place + 1) for place in range(len(token_ids))]

    monkeypatch.setattr(stories, "likeliest", ends_first)
    monkeypatch.setattr(test_beam_search, "likeliest", ends_first)
    scheduler, worker = make(num_snapshots=num_snapshots)
    group = make_group("a", [11, 12, 13, 14, 15], early_stopping="never")
    for sequence in group:
        scheduler.add(sequence)
    run(scheduler, worker)
    expected = [list(hypothesis.token_ids) for hypothesis in searched([11, 12, 13, 14, 15], early_stopping="never")]
    assert [sequence.output_token_ids for sequence in group] == expected
    assert (scheduler.num_preemptions > 0) is (num_snapshots == 0)


def test_a_lost_worker_costs_nothing_but_time() -> None:
    scheduler, worker = make(snapshot_interval=8)
    requests = [make_request(name, length, max_tokens=20) for name, length in (("a", 5), ("b", 22))]
    for request in requests:
        scheduler.add(request)
    for _ in range(6):
        step(scheduler, worker)
    assert scheduler.schedule() is not None
    successor, other = make(snapshot_interval=8)
    for request in scheduler.take_all():
        successor.add(request, at_front=True)
    run(successor, other)
    for request in requests:
        assert request.output_token_ids == expected_output(request.prompt_token_ids, 20)
    snapshots_of(successor).check_invariants()
    assert not snapshots_of(successor)._holders
