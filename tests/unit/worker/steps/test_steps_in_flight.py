"""Steps launched before the tokens of the one before are known: nothing of what is told changes."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pagoda_common.params.pooling_params import PoolingParams
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_worker.steps.step import StepInput
from pagoda_worker.worker import Worker
from tests.unit.worker.steps.overlap import (
    LAUNCHED,
    WAITED_FOR,
    WITH_LOGPROBS,
    assert_told_alike,
    empty_cache,
    make_worker,
    request,
    start,
)
from tests.unit.worker.steps.step_scripts import Script, ints, run_ahead, run_one_by_one, told


@pytest.mark.parametrize("seed", range(5))
def test_whatever_joins_ends_pauses_or_is_moved_the_tokens_are_the_same(
    one_by_one: Worker, ahead: Worker, seed: int
) -> None:
    steps = Script(seed, LAUNCHED).add(80).steps
    assert assert_told_alike(one_by_one, ahead, steps) > 30


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("seed", range(60, 62))
def test_steps_with_parts_of_prompts_run_ahead(one_by_one: Worker, ahead: Worker, seed: int, shares: bool) -> None:
    script = Script(seed, [*LAUNCHED, *WITH_LOGPROBS], joins=0.5, chunks=True, shares=shares).add(120)
    assert assert_told_alike(one_by_one, ahead, script.steps) == 119, "every step but the first"
    assert script.num_mixed > 20


@pytest.mark.parametrize("seed", range(20, 23))
def test_sequences_that_need_the_log_are_waited_for(one_by_one: Worker, ahead: Worker, seed: int) -> None:
    params = [*LAUNCHED, *LAUNCHED, *WAITED_FOR]
    steps = Script(seed, params, joins=0.2, chunks=seed % 2 == 0, shares=seed % 4 == 0).add(80).steps
    assert assert_told_alike(one_by_one, ahead, steps) > 0


@pytest.mark.parametrize("params", WAITED_FOR)
def test_nothing_runs_ahead_of_tokens_that_are_needed(
    one_by_one: Worker, ahead: Worker, params: SamplingParams
) -> None:
    steps = [start(request(0, [5, 6], [0, 1, 2, 3], params)), *[StepInput(num_seqs=1)] * 10]
    assert assert_told_alike(one_by_one, ahead, steps) == 0


@pytest.mark.parametrize(
    ("mode", "is_launched"),
    [("raw_logprobs", True), ("raw_logits", True), ("processed_logprobs", False), ("processed_logits", False)],
)
def test_log_probabilities_come_with_the_tokens(mode: str, is_launched: bool) -> None:
    """As they are told one after the other. Those after the rules and filters are waited for."""
    one_by_one, ahead = (
        make_worker(overlaps=overlaps, logprobs_mode=mode, max_logprobs=-1) for overlaps in (False, True)
    )
    asked = [
        SamplingParams(temperature=0, logprobs=0),
        SamplingParams(temperature=1.0, seed=21, logprobs=3, top_k=5, repetition_penalty=1.3),
        SamplingParams(temperature=1.0, seed=22, logprobs=-1, logit_bias={5: 3.0}),
        SamplingParams(temperature=1.0, seed=23, logprobs=3, logprob_token_ids=[7, 300, 5]),
    ]
    steps = Script(3, asked, joins=0.3, chunks=True).add(40).steps
    num_ahead = assert_told_alike(one_by_one, ahead, steps)
    assert num_ahead == 39 if is_launched else num_ahead < 20


@pytest.mark.parametrize("num_seqs", [1, 2, 5, 8])
def test_every_decode_of_a_batch_runs_ahead(one_by_one: Worker, ahead: Worker, num_seqs: int) -> None:
    requests = [
        request(slot, [20 + slot] * (1 + slot), list(range(6 * slot, 6 * slot + 6)), LAUNCHED[slot % len(LAUNCHED)])
        for slot in range(num_seqs)
    ]
    steps = [start(*requests), *[StepInput(num_seqs=num_seqs)] * 14]
    assert assert_told_alike(one_by_one, ahead, steps) == 14, "all but the prompts, before which nothing is"


def test_a_preempted_sequence_comes_back_with_its_tokens(one_by_one: Worker, ahead: Worker) -> None:
    seeded = SamplingParams(temperature=1.0, seed=3, max_tokens=None)
    decode, first = StepInput(num_seqs=2), start(request(0, [5, 6], [0, 1, 2]), request(1, [7], [3, 4], seeded))
    one = request(1, [7], [3, 4], seeded)
    known = [output.token_ids[1] for output in run_one_by_one(one_by_one, [first, *[decode] * 4])]
    empty_cache(one_by_one)
    gone = StepInput(freed_slots=ints([1]), num_seqs=1, slots=ints([0]))
    back = request(5, [7], [8, 9, 10], seeded, output=tuple(known))
    again = StepInput(
        new_requests=[back], num_seqs=2, slots=ints([0, 5]), num_scheduled_tokens=ints([1, 1 + len(known)])
    )
    steps = [start(request(0, [5, 6], [0, 1, 2]), one), *[decode] * 4, gone, again, *[decode] * 3]
    assert assert_told_alike(one_by_one, ahead, steps) > 5


def test_a_slot_that_is_filled_anew_keeps_its_new_log(one_by_one: Worker, ahead: Worker) -> None:
    """The token of the sequence that was there comes later."""
    penalised = SamplingParams(temperature=0, presence_penalty=2.0, repetition_penalty=1.5)
    first = start(request(0, [5, 6, 7], [0, 1]), request(1, [8], [2, 3]))
    decode = StepInput(num_seqs=2)
    new = request(1, [11, 12, 13, 14, 15, 16], [4, 5, 6], penalised)
    chunk = StepInput(freed_slots=ints([1]), new_requests=[new], num_seqs=2, num_scheduled_tokens=ints([1, 2]))
    rest = StepInput(num_seqs=2, num_scheduled_tokens=ints([1, 4]))
    assert assert_told_alike(one_by_one, ahead, [first, decode, chunk, rest, *[decode] * 3]) == 6


@pytest.mark.parametrize(
    "moved",
    [
        {"blocks_to_swap_out": np.array([[0, 1]])},
        {"blocks_to_swap_in": np.array([[1, 40]])},
        {"num_lookahead_tokens": np.array([1, 1])},
    ],
)
def test_a_step_that_swaps_blocks_or_may_have_drafts_waits(
    one_by_one: Worker, ahead: Worker, moved: dict[str, Any]
) -> None:
    step = StepInput(**({"num_seqs": 2} | moved))
    first = start(*(request(slot, [5 + slot], [4 * slot, 4 * slot + 1]) for slot in (0, 1)))
    assert assert_told_alike(one_by_one, ahead, [first, StepInput(num_seqs=2), step]) == 1


@pytest.mark.parametrize(
    "other",
    [
        {"num_scheduled_tokens": np.array([1, 1])},
        {"slots": np.array([0, 3])},
        {"slots": np.array([3, 1])},
        {"new_requests": [request(4, [5], [50])], "num_seqs": 3, "slots": np.array([0, 1, 4])},
        {"new_requests": [request(4, [5000000], [50])], "num_seqs": 3, "slots": np.array([4, 0, 1])},
        {"new_requests": [request(4, [5] * 9, [50, 51, 52])], "num_seqs": 1, "slots": np.array([4])},
        {"freed_slots": np.array([0]), "num_seqs": 1, "slots": np.array([1])},
        {"blocks_to_copy": np.array([[0, 30]])},
    ],
)
def test_a_step_of_other_sequences_runs_ahead(one_by_one: Worker, ahead: Worker, other: dict[str, Any]) -> None:
    step = StepInput(**({"num_seqs": 2} | other))
    first = start(*(request(slot, [5 + slot], [4 * slot, 4 * slot + 1]) for slot in (0, 1, 3)))
    steps = [first, StepInput(num_seqs=2, slots=ints([0, 1])), step, StepInput(num_seqs=step.num_seqs)]
    assert assert_told_alike(one_by_one, ahead, steps) == 3


def test_a_part_of_a_prompt_samples_nothing_and_its_parameters_may_wait(one_by_one: Worker, ahead: Worker) -> None:
    new = request(1, [8, 9, 10, 11], [1, 2, 3], WAITED_FOR[0])
    joins = StepInput(new_requests=[new], num_seqs=2, slots=ints([0, 1]), num_scheduled_tokens=ints([1, 3]))
    alone = StepInput(num_seqs=1, slots=ints([1]))
    steps = [start(request(0, [5, 6, 7], [0, 4])), joins, StepInput(num_seqs=2), alone]
    assert assert_told_alike(one_by_one, ahead, steps) == 1, "it joins, and the prompt's end waits"


def test_log_probabilities_of_a_prompt_are_waited_for_until_it_is_computed(one_by_one: Worker, ahead: Worker) -> None:
    params = SamplingParams(temperature=0, prompt_logprobs=1)
    first = start(request(0, [5, 6, 7], [0, 4]))
    joins = StepInput(
        new_requests=[request(1, [8, 9, 10, 11], [1, 2, 3], params)],
        num_seqs=2,
        slots=ints([0, 1]),
        num_scheduled_tokens=ints([1, 3]),
    )
    decode = StepInput(num_seqs=2)
    mixed = StepInput(
        new_requests=[request(2, [8, 9], [5])], num_seqs=3, slots=ints([0, 1, 2]), num_scheduled_tokens=ints([1, 1, 2])
    )
    assert assert_told_alike(one_by_one, ahead, [first, joins, decode, decode, mixed]) == 2


def test_a_part_of_a_prompt_whose_embedding_is_wanted_runs_ahead_and_its_end_waits(
    one_by_one: Worker, ahead: Worker
) -> None:
    pooled = replace(request(1, [8, 9, 10, 11, 12], [1, 2]), pooling=PoolingParams())
    joins = StepInput(new_requests=[pooled], num_seqs=2, slots=ints([0, 1]), num_scheduled_tokens=ints([1, 2]))
    rest = StepInput(num_seqs=2, num_scheduled_tokens=ints([1, 3]))
    alone = StepInput(freed_slots=ints([1]), num_seqs=1, slots=ints([0]))
    steps = [start(request(0, [5, 6, 7], [0, 4])), joins, rest, alone, StepInput(num_seqs=1)]
    expected = run_one_by_one(one_by_one, steps)
    outputs, num_ahead = run_ahead(ahead, steps)
    assert [told(output) for output in outputs] == [told(output) for output in expected]
    assert num_ahead == 2, "the part, and the last decode"
    found = [output.pooled for output in (outputs[2], expected[2])]
    assert all(columns is not None and columns.slots.tolist() == [1] for columns in found)
    mine, theirs = ([one.tolist() for one in columns.values] for columns in found if columns is not None)
    assert mine == theirs
