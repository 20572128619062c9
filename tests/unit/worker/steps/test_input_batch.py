"""What is remembered of each slot: bounds of a new request, and what a slot forgets."""

from dataclasses import replace

import numpy as np
import pytest

from pagoda_common.config.speculative_config import SpeculativeConfig
from pagoda_common.errors import Code
from pagoda_common.params.pooling_params import PoolingParams
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_worker.sampling.drafter import Drafter
from pagoda_worker.steps.input_batch import InputBatch
from pagoda_worker.steps.step import BadSlot, NewRequest, StepInput

GUESSES = SpeculativeConfig(num_speculative_tokens=2, prompt_lookup_max=2, prompt_lookup_min=1)
MAX_MODEL_LEN, VOCAB_SIZE, BLOCK_SIZE, NUM_BLOCKS, MAX_NUM_SEQS = 20, 50, 4, 15, 3


def make_batch(drafter: Drafter | None = None) -> InputBatch:
    return InputBatch(
        max_num_seqs=MAX_NUM_SEQS,
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        vocab_size=VOCAB_SIZE,
        drafter=drafter,
    )


def request(slot: int, prompt: list[int], *, output: tuple[int, ...] = (), computed: int = 0) -> NewRequest:
    return NewRequest(
        slot=slot,
        request_id=f"r{slot}",
        prompt_token_ids=np.array(prompt, dtype=np.int64),
        output_token_ids=np.array(output, dtype=np.int64),
        sampling_params=SamplingParams(temperature=0),
        block_ids=np.arange(5) + 5 * slot,
        num_computed_tokens=computed,
    )


def problem_of(new: NewRequest) -> str:
    """Why the batch does not take a request; empty when it does."""
    batch = make_batch()
    count = new.prompt_token_ids.size + new.output_token_ids.size - new.num_computed_tokens
    slots, counts = np.array([new.slot]), np.array([max(count, 1)])
    step = StepInput(new_requests=[new], num_seqs=1, slots=slots, num_scheduled_tokens=counts)
    batch.apply(step)
    bad = batch.prepare(step).bad_slots
    assert all((one.slot, one.code) == (new.slot, Code.INVALID_ARGUMENT) for one in bad)
    return bad[0].message if bad else ""


@pytest.mark.parametrize(
    ("new", "problem"),
    [
        (request(1, [3] * MAX_MODEL_LEN), ""),
        (request(1, [3] * (MAX_MODEL_LEN - 1), output=(4,)), ""),
        (request(1, [3] * (MAX_MODEL_LEN + 1)), "prompt and output have 21 tokens, max_model_len is 20"),
        (request(1, [3] * MAX_MODEL_LEN, output=(4,)), "prompt and output have 21 tokens, max_model_len is 20"),
        (request(1, [VOCAB_SIZE - 1, 0], output=(VOCAB_SIZE - 1,)), ""),
        (request(1, [3, VOCAB_SIZE]), "token id 50 is outside of the vocabulary of 50"),
        (request(1, [3], output=(VOCAB_SIZE,)), "token id 50 is outside of the vocabulary of 50"),
        (request(1, []), "the prompt is empty"),
        (request(1, [3, 4, 5], computed=2), ""),
        (request(1, [3, 4], output=(5,), computed=3), "num_computed_tokens is 3, must be less than 3"),
    ],
)
def test_a_new_request_is_within_its_bounds(new: NewRequest, problem: str) -> None:
    assert problem_of(new).removeprefix("request r1: ") == problem


def test_sequences_are_as_long_as_models_are() -> None:
    """Beyond what numbers of 16 bits count."""
    num_tokens, block_size = 70_000, 16
    num_blocks = num_tokens // block_size + 1
    batch = InputBatch(
        max_num_seqs=2, max_model_len=100_000, block_size=block_size, num_blocks=num_blocks, vocab_size=100_000
    )
    new = replace(
        request(1, list(range(num_tokens)), computed=num_tokens - 2), block_ids=np.arange(num_blocks)[::-1].copy()
    )
    step = StepInput(new_requests=[new], num_seqs=1, slots=np.array([1]), num_scheduled_tokens=np.array([2]))
    batch.apply(step)
    inputs = batch.prepare(step)
    assert not inputs.bad_slots
    assert inputs.input_ids.tolist() == inputs.positions.tolist() == [num_tokens - 2, num_tokens - 1]
    assert inputs.seq_lens.tolist() == [num_tokens]
    first = num_blocks - 1 - (num_tokens - 2) // block_size  # blocks are in falling order
    assert inputs.slot_mapping.tolist() == [first * block_size + place for place in (14, 15)]


def test_the_highest_block_that_was_used_is_remembered() -> None:
    batch = make_batch()
    batch.apply(StepInput(new_requests=[replace(request(0, [3]), block_ids=np.array([7, 2]))]))
    assert batch.num_blocks_used == 8
    batch.apply(StepInput(appended_slots=np.array([0]), appended_block_ids=np.array([NUM_BLOCKS - 1])))
    batch.apply(StepInput(freed_slots=np.array([0])))
    assert batch.num_blocks_used == NUM_BLOCKS


@pytest.mark.parametrize(("slot", "block", "name"), [(3, 0, "slot 3"), (0, NUM_BLOCKS, f"block {NUM_BLOCKS}")])
def test_a_block_or_a_slot_that_does_not_exist_fails_the_step(slot: int, block: int, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is not below"):
        make_batch().apply(StepInput(appended_slots=np.array([slot]), appended_block_ids=np.array([block])))


def test_a_slot_that_is_freed_forgets_its_failure_and_its_embedding() -> None:
    batch = make_batch()
    pooled = replace(request(1, [5, 6]), pooling=PoolingParams())
    rejected = BadSlot(slot=0, code=Code.INVALID_ARGUMENT, message="unreadable")
    first = StepInput(
        rejected=[rejected],
        new_requests=[pooled],
        num_seqs=2,
        slots=np.array([0, 1]),
        num_scheduled_tokens=np.array([1, 2]),
    )
    batch.apply(first)
    inputs = batch.prepare(first)
    assert (inputs.bad_slots, inputs.slots.tolist(), inputs.pooled.tolist()) == ([rejected], [1], [0])
    again = StepInput(
        freed_slots=np.array([0, 1]),
        new_requests=[request(0, [7]), request(1, [8, 9])],
        num_seqs=2,
        num_scheduled_tokens=np.array([1, 2]),
    )
    batch.apply(again)
    inputs = batch.prepare(again)
    assert (inputs.bad_slots, inputs.pooled.tolist()) == ([], [])
    assert inputs.input_ids.tolist() == [7, 8, 9]
    assert inputs.slot_mapping.tolist() == [0, 20, 21]
    assert inputs.is_sampled.tolist() == [True, True]


def test_a_freed_slot_without_a_new_sequence_is_empty() -> None:
    batch = make_batch()
    batch.apply(StepInput(new_requests=[request(2, [5])]))
    step = StepInput(freed_slots=np.array([2]), num_seqs=1, slots=np.array([2]))
    batch.apply(step)
    (bad,) = batch.prepare(step).bad_slots
    assert (bad.slot, bad.message) == (2, "slot 2 is empty")
    assert 2 not in batch.poolers


def test_what_was_learnt_of_guesses_goes_with_the_sequence() -> None:
    forgotten: list[int] = []

    class Noting(Drafter):
        def forget(self, slot: int) -> None:
            forgotten.append(slot)
            super().forget(slot)

    drafter = Noting(config=SpeculativeConfig(num_speculative_tokens=2), max_num_seqs=MAX_NUM_SEQS)
    batch = make_batch(drafter)
    batch.apply(StepInput(new_requests=[request(1, [3])]))
    assert forgotten == [1], "of whatever was there before"
    batch.apply(StepInput(freed_slots=np.array([1])))
    assert forgotten == [1, 1]


def guesses(new: NewRequest, num_scheduled: int, most: int = 2) -> list[int]:
    """Draft tokens that a sequence tries in its first step."""
    batch = make_batch(Drafter(config=GUESSES, max_num_seqs=MAX_NUM_SEQS))
    step = StepInput(
        new_requests=[new],
        num_seqs=1,
        slots=np.array([new.slot]),
        num_scheduled_tokens=np.array([num_scheduled]),
        num_lookahead_tokens=np.array([most]),
    )
    batch.apply(step)
    inputs = batch.prepare(step)
    assert not inputs.bad_slots
    return inputs.num_draft_tokens.tolist()


def test_only_what_samples_a_token_has_guesses_after_it() -> None:
    prompt = [3, 4, 3, 4, 3, 4, 3, 4]
    assert guesses(request(1, prompt, computed=7), 1) == [2]
    assert guesses(request(1, prompt), 8) == [2]
    assert guesses(request(1, prompt), 5) == [0], "a part of a prompt"


def test_tokens_that_were_sampled_elsewhere_count_against_the_guesses() -> None:
    """6 of prompt, 4 of output: what is left of max_tokens is room for a token and one guess less."""
    resumed = request(1, [3, 4, 3, 4, 3, 4], output=(3, 4, 3, 4), computed=9)
    for max_tokens, num_guesses in ((5, 0), (6, 1), (7, 2), (20, 2)):
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        assert guesses(replace(resumed, sampling_params=params), 1) == [num_guesses]


@pytest.mark.parametrize("fields", [{"slots": [0]}, {"block_ids": [7]}, {"groups": [0]}])
def test_each_appended_block_has_its_slot_and_its_group(fields: dict[str, list[int]]) -> None:
    given = {"slots": [0, 0], "block_ids": [7, 8], "groups": [0, 0], **fields}
    step = StepInput(**{f"appended_{name}": np.array(values) for name, values in given.items()})  # type: ignore[arg-type]  # columns
    with pytest.raises(ValueError, match="zip"):
        make_batch().apply(step)
