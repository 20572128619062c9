"""Requests, results and counters field by field: what a beam inherits, what each sink gets, how far drafts go."""

from typing import Any

import numpy as np
import pytest

from pagoda_common.config.engine_config import SchedulerConfig
from pagoda_common.params.lora_adapter import LoraAdapter
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_scheduler.beams.beam_group import BeamGroup
from pagoda_scheduler.beams.beam_search import BeamSearch, Hypothesis
from pagoda_scheduler.core.chunks import Chunks
from pagoda_scheduler.core.request import Request, RequestStatus
from pagoda_scheduler.core.running_calls import RunningCalls
from pagoda_scheduler.core.speculation import Speculation, SpeculationCounters
from pagoda_scheduler.core.step import LogprobRows, PromptLogprobRows
from pagoda_scheduler.core.step_result import StepResult
from pagoda_scheduler.core.turns import TURN
from pagoda_scheduler.core.worker_slots import WorkerSlots
from tests.unit.scheduler.stories import make_request


def full_request(**more: Any) -> Request:
    fields: dict[str, Any] = {
        "request_id": "r",
        "prompt_token_ids": [1, 2, 3],
        "sampling_params": SamplingParams(max_tokens=9, seed=1, stop_token_ids=(8,)),
        "max_model_len": 100,
        "index": 2,
        "attempt": 4,
        "eos_token_ids": (7,),
        "priority": -3,
        "arrival_ns": 55,
        "cache_salt": "salt",
        "tenant": "tenant",
        "group": "group",
        "client": "client",
        "sink": object(),
        "session_slot": 6,
        "lora": LoraAdapter(name="sql", path="/sql"),
    }
    return Request(**{**fields, **more})


def test_a_beam_has_all_of_its_sequence_but_its_output() -> None:
    request = full_request(output_token_ids=[5, 6])
    request.beam_group = group = object()  # type: ignore[assignment]  # any
    params = SamplingParams(temperature=0, max_tokens=1, seed=3)
    beam = request.derive(sampling_params=params, output_token_ids=[9, 9, 9])
    for name in (
        "request_id",
        "index",
        "attempt",
        "priority",
        "arrival_ns",
        "cache_salt",
        "tenant",
        "group",
        "client",
        "lora",
    ):
        assert getattr(beam, name) == getattr(request, name), name
    assert beam.prompt_token_ids is request.prompt_token_ids
    assert (beam.output_token_ids, beam.sampling_params, beam.eos_token_ids) == ([9, 9, 9], params, (7,))
    assert (beam.beam_group, beam.is_beam, beam.takes_drafts, beam.is_announced) == (group, True, False, True)
    assert (beam.num_tokens, beam.max_num_tokens, beam.sink) == (6, 7, None)


def test_a_request_begins_where_its_output_ends() -> None:
    request = full_request(output_token_ids=[5, 6])
    assert (request.num_prompt_tokens, request.num_tokens, request.num_known_tokens) == (3, 5, 5)
    assert (request.max_num_tokens, request.num_pending, request.num_computed_tokens) == (12, 0, 0)
    assert (request.status, request.slot, request.held_state, request.sampled_token_id) == (
        RequestStatus.WAITING,
        -1,
        -1,
        -1,
    )
    assert request.end_token_ids == {7, 8}
    assert full_request(group="").group == "r"
    assert full_request(max_model_len=6).max_num_tokens == 6
    assert full_request(sampling_params=SamplingParams(max_tokens=None, seed=1)).max_num_tokens == 100
    assert full_request(sampling_params=SamplingParams(seed=1, ignore_eos=True)).end_token_ids == frozenset()


@pytest.mark.parametrize(
    ("start", "stop", "tokens"),
    [(0, 3, [1, 2, 3]), (1, 2, [2]), (3, 5, [5, 6]), (4, 5, [6]), (2, 4, [3, 5]), (0, 5, [1, 2, 3, 5, 6])],
)
def test_known_tokens_are_those_of_prompt_and_output(start: int, stop: int, tokens: list[int]) -> None:
    assert list(full_request(output_token_ids=[5, 6]).known_tokens(start, stop)) == tokens


def test_what_is_lost_with_a_worker_is_forgotten() -> None:
    request = full_request(output_token_ids=[5, 6])
    request.num_pending, request.num_tokens, request.num_lookahead, request.num_computed_tokens = 2, 7, 3, 5
    request.slot, request.held_state, request.num_cached_blocks, request.status = 4, 2, 1, RequestStatus.RUNNING
    request.block_ids, request.group_block_ids, request.first_blocks = [1], [[2]], [0, 1]
    request.unnamed_states = [(4, 1)]
    request.forget_computed()
    assert (request.num_tokens, request.num_pending, request.num_lookahead, request.num_computed_tokens) == (5, 0, 0, 0)
    assert (request.slot, request.held_state, request.num_cached_blocks) == (-1, -1, 0)
    assert (request.block_ids, request.group_block_ids, request.first_blocks, request.unnamed_states) == (
        [],
        [],
        [],
        [],
    )
    assert (request.status, request.output_token_ids) == (RequestStatus.WAITING, [5, 6])


@pytest.mark.parametrize(
    ("status", "num_computed", "is_behind"),
    [
        (RequestStatus.RUNNING, 2, True),
        (RequestStatus.RUNNING, 3, False),
        (RequestStatus.WAITING, 0, False),
        (RequestStatus.FINISHED, 0, False),
    ],
)
def test_a_sibling_waits_while_its_leader_computes_the_prompt(
    status: RequestStatus, num_computed: int, is_behind: bool
) -> None:
    leader, sibling = full_request(), full_request()
    assert not sibling.is_behind_leader
    sibling.leader = leader
    leader.status, leader.num_computed_tokens = status, num_computed
    assert sibling.is_behind_leader is is_behind


@pytest.mark.parametrize(("status", "computed"), [(RequestStatus.RUNNING, 12), (RequestStatus.WAITING, 10)])
def test_right_drafts_count_as_pending_and_as_computed_where_the_sequence_runs(
    status: RequestStatus, computed: int
) -> None:
    request = full_request()
    request.num_tokens, request.num_pending, request.num_computed_tokens, request.num_lookahead = 11, 1, 10, 7
    request.status = status
    request.settle(num_accepted=2, num_ahead=4)
    assert (request.num_tokens, request.num_pending, request.num_lookahead) == (13, 3, 3)
    assert request.num_computed_tokens == computed
    request.settle(num_accepted=0, num_ahead=3)
    assert (request.num_tokens, request.num_pending, request.num_lookahead) == (13, 3, 0)


def test_blocks_are_counted_over_all_groups_without_those_that_have_left() -> None:
    request = full_request()
    request.block_ids, request.group_block_ids, request.first_blocks = [1, 2, 3], [[4, 5, 6], [7, 8, 9]], [0, 2, 1]
    assert request.num_blocks == 6
    request.first_cached_tokens = 9
    assert request.num_cached_tokens == 3


# Results.


def test_each_sink_gets_its_own_part_of_a_step() -> None:
    one, two = object(), object()
    requests = [make_request(name, 3, sink=sink) for name, sink in (("a", one), ("b", two), ("c", None), ("d", one))]
    chunk = PromptLogprobRows(0, 1, _rows())
    result = StepResult(step=6, logprobs=_rows())
    for place, request in enumerate(requests):
        request.output_token_ids = [0] * (place + 1)
        result.add_token(request, 40 + place, 10 + place)
    result.admitted += requests[:3]
    result.finished += requests[1:]
    result.prompt_logprobs += [(requests[3], chunk), (requests[2], chunk)]
    parts = result.by_sink()
    assert set(parts) == {one, two}
    first, second = parts[one], parts[two]
    assert (first.step, first.requests, first.offsets) == (6, [requests[0], requests[3]], [0, 3])
    assert (first.token_ids, first.rows, first.logprobs) == ([40, 43], [10, 13], result.logprobs)
    assert (first.admitted, first.finished, first.prompt_logprobs) == (
        requests[:1],
        requests[3:],
        [(requests[3], chunk)],
    )
    assert (second.requests, second.offsets, second.token_ids, second.rows) == ([requests[1]], [1], [41], [11])
    assert (second.admitted, second.finished, second.prompt_logprobs) == ([requests[1]], [requests[1]], [])


def _rows() -> LogprobRows:
    none = np.zeros(0, dtype=np.uint32)
    return LogprobRows(none, none, none, none.astype(np.float32), none)


@pytest.mark.parametrize("kept", [[0, 1, 2], [0, 2], [1]])
def test_last_tokens_are_those_at_their_rows(kept: list[int]) -> None:
    batch = [make_request(name, 3) for name in "abc"]
    for count, request in enumerate(batch, start=1):
        request.output_token_ids = [0] * count
    result = StepResult(step=1)
    result.add_last_tokens(batch, kept, [70, 71, 72])
    assert (result.requests, result.offsets) == ([batch[row] for row in kept], kept)
    assert (result.token_ids, result.rows) == ([70 + row for row in kept], kept)


# Drafts.


@pytest.mark.parametrize(
    ("num_tokens", "spare", "expected"),
    [(10, 9, 4), (10, 4, 4), (10, 3, 3), (10, 0, 0), (10, -2, 0), (17, 9, 2), (19, 9, 0), (20, 9, 0)],
)
def test_drafts_end_with_the_room_of_the_step_and_of_the_sequence(num_tokens: int, spare: int, expected: int) -> None:
    request = full_request()
    request.num_tokens, request.max_num_tokens = num_tokens, 20
    speculation = Speculation(num_speculative_tokens=4)
    assert speculation.num_ahead(request, spare) == expected
    request.takes_drafts = False
    assert speculation.num_ahead(request, spare) == 0


def test_drafts_are_counted_by_sequence_and_position() -> None:
    speculation = Speculation(num_speculative_tokens=3)
    speculation.count([3, 0, 2, 1], [2, 1, 3, 0])
    assert speculation.counters == SpeculationCounters(3, 6, 3, [2, 1, 0])
    speculation.count([1], None)
    assert speculation.counters == SpeculationCounters(4, 7, 3, [2, 1, 0])
    other = SpeculationCounters(1, 5, 4, [1, 1, 1, 1, 0])
    other.add(speculation.counters)
    assert other == SpeculationCounters(5, 12, 7, [3, 2, 1, 1, 0])
    speculation.counters.add(SpeculationCounters(1, 5, 4, [1, 1, 1, 1, 0]))
    assert speculation.counters == SpeculationCounters(5, 12, 7, [3, 2, 1, 1, 0])
    speculation.count([1], [5])
    assert speculation.counters.num_accepted_tokens == 8, "no more than were tried"


# Chunks, slots and calls.


@pytest.mark.parametrize(
    ("config", "start", "budget", "expected"),
    [
        ({}, 0, 100, 30),
        ({}, 0, 29, 29),
        ({}, 10, 100, 20),
        ({"long_prefill_token_threshold": 8}, 0, 100, 8),
        ({"long_prefill_token_threshold": 8}, 0, 5, 5),
        ({"long_prefill_token_threshold": 30}, 0, 100, 30),
        ({"long_prefill_token_threshold": 8}, 22, 100, 8),
        ({"enable_chunked_prefill": False}, 0, 30, 30),
        ({"enable_chunked_prefill": False}, 0, 29, 0),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 30}, 0, 30, 30),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 29}, 0, 29, 29),
    ],
)
def test_a_chunk_is_what_fits_or_nothing(config: dict[str, Any], start: int, budget: int, expected: int) -> None:
    settings = SchedulerConfig(**{"max_num_batched_tokens": 64, "max_num_seqs": 8, **config})
    assert Chunks(config=settings).size(make_request("a", 30), start, budget) == expected


def test_slots_are_told_of_once_and_the_one_that_was_freed_last_is_next() -> None:
    slots = WorkerSlots(size=3)
    assert [slots.take() for _ in range(3)] == [0, 1, 2]
    assert not slots.has_free
    slots.release(1, is_known=True)
    slots.release(0, is_known=False)
    assert (slots.has_free, slots.take(), slots.take()) == (True, 0, 1)
    slots.renew(2)
    assert not slots.is_telling
    slots.tell()
    assert slots.is_telling
    assert slots.take_freed() == [1, 2]
    assert (slots.take_freed(), slots.is_telling) == ([], False)
    slots.tell()
    assert not slots.is_telling, "there is nothing to tell"


def running(**calls: int) -> list[Request]:
    return [make_request(f"{name}-{n}", 3, group=name) for name, count in calls.items() for n in range(count)]


@pytest.mark.parametrize(
    ("calls", "borrower"),
    [
        ({"a": TURN}, None),
        ({"a": TURN + 1, "b": 1}, None),
        ({"a": 33, "b": 1}, "a"),
        ({"a": 32, "b": 1}, None),
        ({"a": 22, "b": 22}, "a"),
        ({"a": 21, "b": 21}, None),
        ({"a": 22, "b": 23}, "b"),
    ],
)
def test_who_has_borrowed_most_gives_way(calls: dict[str, int], borrower: str | None) -> None:
    sequences = running(**calls)
    found = RunningCalls(sequences, num_slots=64, num_blocks=100).borrower
    if borrower is None:
        assert found is None
    else:
        assert found is [request for request in sequences if request.group == borrower][-1]


@pytest.mark.parametrize(("blocks", "is_large"), [(5, False), (6, True)])
def test_two_sequences_with_most_blocks_are_a_large_call(blocks: int, is_large: bool) -> None:
    sequences = running(a=2, b=1)
    for request in sequences[:2]:
        request.block_ids = list(range(blocks))
    sequences[2].block_ids = list(range(90))
    calls = RunningCalls(sequences, num_slots=64, num_blocks=20)
    assert (calls.borrower is not None) is is_large
    assert calls.has_its_share(make_request("more", 3, group="a")) is is_large
    assert not calls.has_its_share(make_request("other", 3, group="b"))


# Beam groups.


def group_of(count: int) -> BeamGroup:
    sequences = [make_request("r", 4, index=index, max_tokens=6) for index in range(count)]
    search = BeamSearch(
        beam_width=4, max_tokens=6, end_token_ids=frozenset({57}), length_penalty=0.5, early_stopping="never"
    )
    return BeamGroup(sequences=sequences, search=search)


def test_a_search_begins_anew_with_its_parameters_and_greedy_beams() -> None:
    group = group_of(2)
    assert [sequence.beam_group for sequence in group.sequences] == [group, group]
    group.sequences[0].max_num_tokens = 7  # the group that came has a shorter context
    beam = group.start()
    search = group._search
    assert (search.beam_width, search.max_tokens, search.end_token_ids) == (4, 3, frozenset({57}))
    assert (search.length_penalty, search.early_stopping) == (0.5, "never")
    params = beam.sampling_params
    assert (params.temperature, params.logprobs, params.ignore_eos, params.min_tokens) == (0.0, 8, True, 0)
    assert (group.beams, beam.is_beam, beam.output_token_ids) == ([beam], True, [])


def test_hypotheses_are_given_to_the_sequences_with_each_of_their_tokens() -> None:
    group = group_of(2)
    group.start()
    group._search.hypotheses = [
        Hypothesis((5, 57), -1.0, -1.5, (-0.5, -1.0), (1, 2)),
        Hypothesis((6, 7, 8), -2.0),
        Hypothesis((9,), -3.0),
    ]
    result = StepResult(step=3)
    group.deliver(result)
    first, second = group.sequences
    assert (first.output_token_ids, second.output_token_ids) == ([5, 57], [6, 7, 8])
    assert (first.finish_reason, second.finish_reason) == ("stop", "length")
    assert (first.num_tokens, second.num_tokens) == (6, 7)
    assert result.requests == [first, first, second, second, second]
    assert (result.offsets, result.token_ids, result.rows) == ([0, 1, 0, 1, 2], [5, 57, 6, 7, 8], [-1] * 5)
    assert (result.admitted, result.finished) == ([first, second], [first, second])
    assert group.hypothesis_of(first) is group._search.hypotheses[0]
    second.output_token_ids = [6]
    assert group.hypothesis_of(second) is None, "it was told something else"
    assert group.hypothesis_of(make_request("other", 4)) is None


def test_too_few_hypotheses_fail_all_sequences() -> None:
    group = group_of(2)
    group.start()
    group._search.hypotheses = [Hypothesis((5,), -1.0)]
    result = StepResult(step=3)
    group.deliver(result)
    assert (result.finished, result.requests, result.admitted) == (group.sequences, [], [])
    for sequence in group.sequences:
        assert sequence.error is not None
        assert sequence.error.message == "the beam search has found 1 outputs, 2 are wanted"
        assert (sequence.error.field, sequence.finish_reason, sequence.output_token_ids) == ("n", "error", [])


def test_a_beam_s_candidates_are_its_row_without_the_sampled_token() -> None:
    group = group_of(1)
    beam = group.start()
    sibling = beam.derive(sampling_params=beam.sampling_params, output_token_ids=[1])
    group.beams = [beam, sibling]
    rows = LogprobRows(
        rows=np.array([2, 5], np.uint32),
        counts=np.array([3, 4], np.uint32),
        token_ids=np.array([20, 20, 21, 50, 50, 51, 52], np.uint32),
        logprobs=np.array([-1, -1, -2, -3, -3, -4, -5], np.float32),
        sampled_ranks=np.ones(2, np.uint32),
    )
    assert not group.collect(sibling, rows, 5)
    assert group.collect(beam, rows, 2)
    assert group._candidates == {beam: ([20, 21], [-1, -2]), sibling: ([50, 51, 52], [-3, -4, -5])}
