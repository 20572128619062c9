"""Beam search in the scheduler finds what the bare algorithm finds, whatever happens to its beams."""

import math
from itertools import chain

import pytest

from pagoda_scheduler.beams.beam_group import BeamGroup
from pagoda_scheduler.beams.beam_search import BeamSearch, EarlyStopping, Hypothesis
from pagoda_scheduler.core.request import Request
from pagoda_scheduler.kv.cache_group import ONE_GROUP, CacheGroup
from tests.unit.scheduler import stories
from tests.unit.scheduler.stories import PretendWorker, likeliest, make_request, make_scheduler, run

WINDOW = (CacheGroup("full"), CacheGroup("window", window=7))
STATES = (CacheGroup("full"), CacheGroup("recurrent"))
ENDS = frozenset([3, 57])


def make_search(**options: object) -> BeamSearch:
    return BeamSearch(**{"beam_width": 3, "max_tokens": 12, "end_token_ids": ENDS, **options})  # type: ignore[arg-type]


def searched(prompt: list[int], **options: object) -> list[Hypothesis]:
    """The bare algorithm over the pretend model."""
    search = make_search(**options)
    while search.beams:
        count = search.num_candidates
        search.advance([likeliest([*prompt, *beam.token_ids], count) for beam in search.beams])
    return search.hypotheses


def make_group(name: str, prompt: list[int], *, n: int = 3, **options: object) -> list[Request]:
    sequences = [make_request(name, prompt, index=i, max_tokens=12, stop_token_ids=[3]) for i in range(n)]
    BeamGroup(sequences=sequences, search=make_search(**options))
    return sequences


@pytest.mark.parametrize("early_stopping", ["heuristic", "first", "never"])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0, -1.0])
@pytest.mark.parametrize(("window", "num_speculative_tokens"), [(1, 0), (2, 0), (2, 3)])
def test_the_engine_finds_the_same_hypotheses(
    early_stopping: EarlyStopping, length_penalty: float, window: int, num_speculative_tokens: int
) -> None:
    options = {"early_stopping": early_stopping, "length_penalty": length_penalty}
    scheduler = make_scheduler(max_num_seqs=16, num_speculative_tokens=num_speculative_tokens)
    prompts = [[11, 12, 13], [5] * 8, [9]]
    groups = [make_group(str(i), prompt, **options) for i, prompt in enumerate(prompts)]
    other = make_request("other", [1, 2, 3], max_tokens=9)
    for sequence in [*chain(*groups), other]:
        scheduler.add(sequence)
    worker = PretendWorker(guess=lambda most: (most, most // 2))  # of the other one's tokens; beams do not guess
    results = run(scheduler, worker, window=window)
    assert other.output_token_ids == stories.expected_output([1, 2, 3], 9)
    assert (worker.num_tried > 0) is (num_speculative_tokens > 0)
    for prompt, sequences in zip(prompts, groups, strict=True):
        expected = [list(hypothesis.token_ids) for hypothesis in searched(prompt, **options)]
        assert [sequence.output_token_ids for sequence in sequences] == expected
        for sequence in sequences:
            delivered = [
                (offset, token)
                for result in results
                for request, offset, token in zip(result.requests, result.offsets, result.token_ids, strict=True)
                if request is sequence
            ]
            assert delivered == list(enumerate(sequence.output_token_ids))
    assert len(other.output_token_ids) == 9
    assert scheduler.kv.pool.num_used_blocks == 0


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("num_snapshots", [0, 4, 30])
@pytest.mark.parametrize("cache_groups", [ONE_GROUP, WINDOW, STATES])
def test_preempted_beams_change_nothing(
    prefix_caching: bool, cache_groups: tuple[CacheGroup, ...], num_snapshots: int
) -> None:
    scheduler = make_scheduler(
        groups=cache_groups,
        num_blocks=22 if cache_groups is WINDOW else 11,
        num_snapshots=num_snapshots,
        max_model_len=40,
        max_num_seqs=6,
        enable_prefix_caching=prefix_caching,
    )
    prompts = [[11, 12, 13, 14, 15], [5] * 7]
    groups = [make_group(str(i), prompt) for i, prompt in enumerate(prompts)]
    for sequence in chain(*groups):
        scheduler.add(sequence)
    run(scheduler, PretendWorker(groups=cache_groups))
    assert scheduler.num_preemptions > 0
    for prompt, sequences in zip(prompts, groups, strict=True):
        assert [sequence.output_token_ids for sequence in sequences] == [list(h.token_ids) for h in searched(prompt)]
    scheduler.kv.pool.check_invariants()
    assert scheduler.kv.pool.num_used_blocks == 0


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("max_num_seqs", [1, 2, 3])
def test_beams_take_turns_where_there_are_too_few_slots(max_num_seqs: int, window: int, prefix_caching: bool) -> None:
    scheduler = make_scheduler(max_num_seqs=max_num_seqs, enable_prefix_caching=prefix_caching)
    prompts = [[11, 12, 13, 14, 15], [5] * 7]
    groups = [make_group(str(i), prompt, beam_width=4) for i, prompt in enumerate(prompts)]
    others = [make_request(f"other {i}", [1, 2, 3 + i], max_tokens=9) for i in range(3)]
    for sequence in [others[0], *groups[0], others[1], *groups[1], others[2]]:
        scheduler.add(sequence)
    run(scheduler, PretendWorker(), window=window)
    for place, other in enumerate(others):
        assert other.output_token_ids == stories.expected_output([1, 2, 3 + place], 9)
    for prompt, sequences in zip(prompts, groups, strict=True):
        expected = [list(hypothesis.token_ids) for hypothesis in searched(prompt, beam_width=4)]
        assert [sequence.output_token_ids for sequence in sequences] == expected[:3]
    assert scheduler.kv.pool.num_used_blocks == 0


def test_only_what_is_possible_is_found_and_too_little_of_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def constrained(log: list[int], count: int) -> tuple[list[int], list[float]]:
        possible = {13: [20, 21], 20: [22], 21: [3], 22: [3]}[log[-1]]
        return [*possible, 40, 41], [-0.5 * place for place in range(len(possible))] + [-math.inf] * 2

    monkeypatch.setattr(stories, "likeliest", constrained)
    scheduler = make_scheduler()
    few, many = make_group("few", [11, 12, 13], n=2), make_group("many", [10, 12, 13])
    for sequence in (*few, *many):
        scheduler.add(sequence)
    results = run(scheduler, PretendWorker())
    assert [sequence.output_token_ids for sequence in few] == [[20, 22, 3], [21, 3]]
    assert all(sequence.error is None for sequence in few)
    for sequence in many:
        assert (sequence.is_finished, sequence.finish_reason, sequence.output_token_ids) == (True, "error", [])
        assert sequence.error is not None
        assert sequence.error.message == "the beam search has found 2 outputs, 3 are wanted"
    assert sum(result.finished.count(sequence) for result in results for sequence in many) == 3
    assert scheduler.kv.pool.num_used_blocks == 0


def test_an_abort_ends_every_beam() -> None:
    scheduler, worker = make_scheduler(), PretendWorker()
    sequences = make_group("a", [11, 12, 13])
    for sequence in sequences:
        scheduler.add(sequence)
    for _ in range(3):
        output = scheduler.schedule()
        assert output is not None
        scheduler.update(worker.execute(output))
    assert len(scheduler.running) == 3
    for sequence in sequences:
        scheduler.finish(sequence)
    assert not scheduler.has_unfinished_requests
    assert scheduler.kv.pool.num_used_blocks == 0
    assert all(sequence.is_finished for sequence in sequences)


@pytest.mark.parametrize("is_urgent", [False, True])
def test_blocks_of_a_fork_that_was_not_sent_are_swapped_into_without_harm(*, is_urgent: bool) -> None:
    scheduler = make_scheduler(num_blocks=11, max_num_seqs=3, num_host_blocks=20, policy="priority")
    worker = PretendWorker()
    cached = [40 + place for place in range(21)]
    for name, prompt in (("cached", cached), ("other", [99] * 37)):
        scheduler.add(make_request(name, prompt, max_tokens=1))
        run(scheduler, worker)
    group = make_group("a", [11, 12, 13, 14, 15], n=3)
    for sequence in group:
        sequence.priority = 1
        scheduler.add(sequence)
    output = scheduler.schedule()
    assert output is not None
    scheduler.update(worker.execute(output))  # two beams have forked, and their blocks are copied with the next step
    for sequence in [] if is_urgent else group:
        scheduler.finish(sequence)
    again = make_request("again", cached, max_tokens=4)
    scheduler.add(again)
    run(scheduler, worker)
    assert again.output_token_ids == stories.expected_output(cached, 4)
    if is_urgent:
        hypotheses = [list(hypothesis.token_ids) for hypothesis in searched([11, 12, 13, 14, 15])]
        assert [sequence.output_token_ids for sequence in group] == hypotheses
    assert scheduler.kv.pool.num_used_blocks == 0


def test_a_lost_worker_starts_the_search_again() -> None:
    scheduler, worker = make_scheduler(), PretendWorker()
    sequences = make_group("a", [11, 12, 13])
    for sequence in sequences:
        scheduler.add(sequence)
    for _ in range(3):
        output = scheduler.schedule()
        assert output is not None
        scheduler.update(worker.execute(output))
    orphans = scheduler.take_all()
    assert orphans == sequences
    successor = make_scheduler()
    for sequence in orphans:
        successor.add(sequence)
    run(successor, PretendWorker())
    assert [s.output_token_ids for s in sequences] == [list(h.token_ids) for h in searched([11, 12, 13])]
