"""The rows of steps by number: tokens, places, blocks and draft tokens of each sequence, and which rows sample."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pagoda_common.config.speculative_config import SpeculativeConfig
from pagoda_common.errors import Code
from pagoda_common.params.pooling_params import PoolingParams
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_worker.models.cache_groups import CacheGroup
from pagoda_worker.sampling import prompt_logprobs as prompt_logprobs_module
from pagoda_worker.sampling.drafter import Drafter
from pagoda_worker.sampling.prompt_logprobs import describes_prompts, prompt_logprobs
from pagoda_worker.steps.input_batch import ONE_GROUP, ForwardInputs, InputBatch
from pagoda_worker.steps.sampled_rows import SampledRows
from pagoda_worker.steps.step import NULL_BLOCK, NewRequest, StepInput
from pagoda_worker.steps.step_sampler import _rows_of

WINDOW = (CacheGroup("full", (0,)), CacheGroup("window", (1,), 5))


def make_batch(*, groups: Any = ONE_GROUP, guesses: int = 0) -> InputBatch:
    drafter = None
    if guesses:
        config = SpeculativeConfig(num_speculative_tokens=guesses, prompt_lookup_max=2, prompt_lookup_min=1)
        drafter = Drafter(config=config, max_num_seqs=4)
    return InputBatch(
        max_num_seqs=4, max_model_len=30, block_size=4, num_blocks=50, vocab_size=90, drafter=drafter, groups=groups
    )


def new(slot: int, prompt: list[int], *, computed: int = 0, blocks: int = 3, **more: Any) -> NewRequest:
    """Its blocks are 10 * slot + 1 and so on, those of a second group 5 more."""
    ids = np.arange(1, 1 + blocks) + 10 * slot
    fields: dict[str, Any] = {"sampling_params": SamplingParams(temperature=0), "block_ids": ids}
    return NewRequest(
        slot=slot,
        request_id=f"r{slot}",
        prompt_token_ids=np.array(prompt, dtype=np.int64),
        num_computed_tokens=computed,
        **{**fields, **more},
    )


def prepare(
    batch: InputBatch,
    requests: list[NewRequest],
    scheduled: list[int] | None,
    *,
    lookahead: list[int] | None = None,
    **more: Any,
) -> ForwardInputs:
    step = StepInput(
        new_requests=requests,
        num_seqs=len(requests),
        slots=np.array([request.slot for request in requests]),
        num_scheduled_tokens=None if scheduled is None else np.array(scheduled),
        num_lookahead_tokens=None if lookahead is None else np.array(lookahead),
        **more,
    )
    batch.apply(step)
    return batch.prepare(step)


def test_rows_of_prompts_and_their_parts() -> None:
    batch = make_batch()
    inputs = prepare(batch, [new(2, [5, 6, 7, 8, 9, 10]), new(0, [20, 21, 22, 23, 24, 25, 26], computed=4)], [5, 3])
    assert (inputs.batch_rows.tolist(), inputs.slots.tolist()) == ([0, 1], [2, 0])
    assert (inputs.num_scheduled_tokens.tolist(), inputs.num_draft_tokens.tolist()) == ([5, 3], [0, 0])
    assert inputs.seq_lens.tolist() == [5, 7]
    assert inputs.input_ids.tolist() == [5, 6, 7, 8, 9, 24, 25, 26]
    assert inputs.positions.tolist() == [0, 1, 2, 3, 4, 4, 5, 6]
    assert inputs.slot_mapping.tolist() == [84, 85, 86, 87, 88, 8, 9, 10]
    assert inputs.block_table.tolist() == [[21, 22], [1, 2]]
    assert inputs.block_table.dtype == np.int32
    assert inputs.is_sampled.tolist() == [False, True]
    assert (inputs.is_plain, inputs.bad_slots, inputs.pooled.tolist(), inputs.adapters) == (False, [], [], [])
    rows = SampledRows.of(inputs, batch)
    assert (rows.sequences.tolist(), rows.slots.tolist(), rows.logit_rows.tolist()) == ([1], [0], [7])
    assert (rows.starts.tolist(), rows.owners.tolist(), rows.ahead.tolist()) == ([0], [0], [0])
    assert (rows.batch.num_tokens.tolist(), rows.batch.num_prompt_tokens.tolist()) == ([7], [7])


def test_a_plain_step_is_one_row_a_sequence() -> None:
    batch = make_batch()
    inputs = prepare(batch, [new(1, [5, 6, 7], computed=2), new(3, [8, 9, 10, 11, 12], computed=4)], None)
    assert inputs.is_plain
    assert inputs.is_greedy
    assert (inputs.input_ids.tolist(), inputs.positions.tolist()) == ([7, 12], [2, 4])
    assert (inputs.seq_lens.tolist(), inputs.slot_mapping.tolist()) == ([3, 5], [46, 128])
    assert inputs.block_table.tolist() == [[11, 12], [31, 32]]
    rows = SampledRows.of(inputs, batch)
    assert (rows.logit_rows.tolist(), rows.slots.tolist(), rows.ahead.tolist()) == ([0, 1], [1, 3], [0, 0])
    again = batch.prepare(StepInput(num_seqs=2))
    assert again.slots.tolist() == [1, 3], "the batch of the step before"


def test_a_step_with_one_that_samples_is_not_greedy() -> None:
    batch = make_batch()
    random = new(0, [1, 2], computed=1, sampling_params=SamplingParams(temperature=1, seed=3))
    inputs = prepare(batch, [new(1, [5, 6], computed=1), random], None)
    assert (inputs.is_plain, inputs.is_greedy) == (True, False)


def test_each_group_has_its_own_places() -> None:
    batch = make_batch(groups=WINDOW)
    request = new(1, list(range(9)), computed=6, group_block_ids=np.array([[NULL_BLOCK, 16, 17]]))
    inputs = prepare(batch, [request], [3])
    assert inputs.block_tables.tolist() == [[[11, 12, 13]], [[0, 16, 17]]]
    assert inputs.slot_mappings.tolist() == [[50, 51, 52], [66, 67, 68]]
    # Of a window of 5 the query at place 6 sees places 2 to 6: all blocks from the first one on.
    assert inputs.readable_blocks(0, WINDOW, 4).tolist() == [11, 12, 13, 0, 16, 17]
    batch.num_computed_tokens[1] = 9
    assert batch.readable_blocks(1).tolist() == [11, 12, 13, 16, 17], "the query at place 8 sees 4 to 8"


@pytest.mark.parametrize(("num_computed", "blocks"), [(8, [0, 16, 17]), (9, [16, 17]), (12, [16, 17]), (13, [17])])
def test_what_a_window_leaves_is_not_read(num_computed: int, blocks: list[int]) -> None:
    batch = make_batch(groups=WINDOW)
    request = new(1, list(range(9)), group_block_ids=np.array([[NULL_BLOCK, 16, 17]]))
    prepare(batch, [request], [9])
    batch.num_computed_tokens[1] = num_computed
    assert batch.readable_blocks(1).tolist() == [11, 12, 13, *blocks]


def test_what_cannot_be_computed_is_left_out_by_name() -> None:
    batch = make_batch()
    requests = [new(0, [1, 2, 3], blocks=1), new(1, [4, 5, 6], blocks=1), new(2, [7] * 5, blocks=1), new(3, [8, 9])]
    inputs = prepare(batch, requests, [3, 4, 5, 0])
    assert (inputs.batch_rows.tolist(), inputs.slots.tolist()) == ([0], [0])
    assert [bad.slot for bad in inputs.bad_slots] == [1, 2, 3]
    assert {bad.code for bad in inputs.bad_slots} <= {Code.INTERNAL, Code.INVALID_ARGUMENT}
    assert all(bad.message for bad in inputs.bad_slots)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_seqs": 3}, "the batch has 2 slots for num_seqs 3"),
        ({"num_scheduled_tokens": np.array([1])}, "num_scheduled_tokens has 1 entries for 2 slots"),
        ({"slots": np.array([1, 4])}, r"slot 4 is not below max_num_seqs (4)"),
    ],
)
def test_a_step_that_contradicts_itself_is_refused(change: dict[str, Any], message: str) -> None:
    batch = make_batch()
    fields: dict[str, Any] = {
        "num_seqs": 2,
        "slots": np.array([0, 1]),
        "num_scheduled_tokens": np.array([1, 1]),
    }
    batch.apply(StepInput(new_requests=[new(0, [1, 2]), new(1, [3, 4])]))
    with pytest.raises(ValueError, match=f"^{message.replace('(', '[(]').replace(')', '[)]')}$"):
        batch.prepare(StepInput(**{**fields, **change}))


def test_blocks_are_below_their_number_and_alike_for_groups() -> None:
    batch = make_batch(groups=WINDOW)
    base: dict[str, Any] = {"appended_slots": np.array([0]), "appended_block_ids": np.array([49])}
    batch.apply(
        StepInput(
            **{
                **base,
                "appended_slots": np.zeros(2, int),
                "appended_block_ids": np.array([49, 3]),
                "appended_groups": np.array([0, 1]),
            }
        )
    )
    assert (batch.num_blocks_of[0], batch.num_blocks_used) == (1, 50)
    for change, message in (
        ({"appended_block_ids": np.array([50])}, r"^block 50 is not below num_blocks \(50\)$"),
        ({"appended_slots": np.array([4])}, r"^slot 4 is not below max_num_seqs \(4\)$"),
        ({"appended_groups": np.array([2])}, r"^cache group 2 is not below 2$"),
        ({}, r"^the cache groups of a sequence have different numbers of blocks$"),
    ):
        with pytest.raises(ValueError, match=message):
            batch.apply(StepInput(**{**base, **change}))


def test_draft_tokens_stand_after_the_known_ones() -> None:
    """What followed the last token where it stood before: 1 2 3 1 2 -> 3 1; 7 8 7 -> 8 7."""
    batch = make_batch(guesses=2)
    requests = [new(0, [1, 2, 3, 1, 2], computed=4), new(2, [4, 5], computed=0), new(1, [7, 8, 7], computed=2)]
    inputs = prepare(batch, requests, [1, 1, 1], lookahead=[2, 2, 1])
    assert inputs.num_draft_tokens.tolist() == [2, 0, 1]
    assert inputs.num_scheduled_tokens.tolist() == [3, 1, 2]
    assert inputs.seq_lens.tolist() == [7, 1, 4]
    assert inputs.input_ids.tolist() == [2, 3, 1, 4, 7, 8]
    assert inputs.positions.tolist() == [4, 5, 6, 0, 2, 3]
    assert inputs.is_sampled.tolist() == [True, False, True]
    rows = SampledRows.of(inputs, batch)
    assert (rows.sequences.tolist(), rows.slots.tolist()) == ([0, 2], [0, 1])
    assert (rows.starts.tolist(), rows.owners.tolist(), rows.ahead.tolist()) == (
        [0, 3],
        [0, 0, 0, 1, 1],
        [0, 1, 2, 0, 1],
    )
    assert rows.logit_rows.tolist() == [0, 1, 2, 4, 5]
    assert rows.batch.slots.tolist() == [0, 0, 0, 1, 1]
    assert rows.batch.num_tokens.tolist() == [5, 6, 7, 3, 4]
    assert rows.batch.num_prompt_tokens.tolist() == [5, 5, 5, 3, 3]


@pytest.mark.parametrize(
    ("more", "blocks", "num_draft"),
    [
        ({"sampling_params": SamplingParams(temperature=0, max_tokens=10)}, 3, 2),
        ({"sampling_params": SamplingParams(temperature=0, max_tokens=3)}, 3, 2),
        ({"sampling_params": SamplingParams(temperature=0, max_tokens=2)}, 3, 1),
        ({"sampling_params": SamplingParams(temperature=0, max_tokens=1)}, 3, 0),
        ({}, 2, 2),
        ({"is_beam": True}, 3, 0),
        ({"pooling": PoolingParams(task="embed")}, 3, 0),
        ({"sampling_params": SamplingParams(temperature=0, prompt_logprobs=1)}, 3, 2),
    ],
)
def test_a_draft_ends_with_the_output_and_with_the_blocks(more: dict[str, Any], blocks: int, num_draft: int) -> None:
    batch = make_batch(guesses=2)
    inputs = prepare(batch, [new(0, [1, 2, 3, 1, 2], computed=4, blocks=blocks, **more)], [1], lookahead=[2])
    assert inputs.num_draft_tokens.tolist() == [num_draft]


@pytest.mark.parametrize(("num_prompt", "num_draft"), [(6, 2), (7, 1), (8, 0)])
def test_a_draft_has_blocks(num_prompt: int, num_draft: int) -> None:
    batch = make_batch(guesses=2)
    request = new(0, [1] * num_prompt, computed=num_prompt - 1, blocks=2)
    assert prepare(batch, [request], [1], lookahead=[2]).num_draft_tokens.tolist() == [num_draft]


def test_without_a_word_of_the_step_there_is_no_draft() -> None:
    batch = make_batch(guesses=2)
    inputs = prepare(batch, [new(0, [1, 2, 3, 1, 2], computed=4)], [1])
    assert inputs.num_draft_tokens.tolist() == [0]
    with pytest.raises(ValueError, match=r"^num_lookahead_tokens has 2 entries for 1 slots$"):
        prepare(batch, [new(0, [1, 2, 3, 1, 2], computed=4)], [1], lookahead=[1, 1])


def test_an_embedding_s_last_row_does_not_sample() -> None:
    batch = make_batch()
    pooled = new(1, [5, 6], pooling=PoolingParams(task="embed", second_text_start=1))
    inputs = prepare(batch, [new(0, [1, 2]), pooled, new(2, [3, 4, 5], pooling=PoolingParams(task="embed"))], [2, 2, 2])
    assert (inputs.is_sampled.tolist(), inputs.pooled.tolist()) == ([True, False, False], [1])
    assert inputs.second_texts.tolist() == [0, 1, 0]


def test_rows_of_some_sequences() -> None:
    hidden, ids = torch.arange(6.0)[:, None], torch.arange(6) + 10
    rows, token_ids, starts = _rows_of(hidden, ids, [0, 2, 3, 6], [0, 2])
    assert rows.flatten().tolist() == [0, 1, 3, 4, 5]
    assert token_ids.tolist() == [10, 11, 13, 14, 15]
    assert starts == [0, 2, 5]


ASKS = SamplingParams(temperature=0, prompt_logprobs=1)


@pytest.mark.parametrize(
    ("params", "computed", "scheduled", "describes"),
    [
        (ASKS, 0, 4, True),
        (ASKS, 2, 1, True),
        (ASKS, 3, 1, False),  # the last token of the prompt predicts no token of it
        (SamplingParams(temperature=0), 0, 4, False),
    ],
)
def test_which_steps_describe_prompts(params: SamplingParams, computed: int, scheduled: int, describes: bool) -> None:
    batch = make_batch()
    inputs = prepare(batch, [new(0, [1, 2, 3, 4], computed=computed, sampling_params=params)], [scheduled])
    assert describes_prompts(inputs, batch) is describes


def logits_of(rows: Any) -> Tensor:
    """The likeliest token of a row is ten more than its place."""
    logits = torch.zeros(len(rows), 90)
    logits[torch.arange(len(rows)), torch.as_tensor(rows) + 10] = 5.0
    return logits


@pytest.mark.parametrize("most", [256, 2, 1])
def test_prompt_tokens_are_described_by_the_rows_before_them(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_logprobs_module, "MAX_PROMPT_LOGPROB_ROWS", most)
    batch = make_batch()
    requests = [
        new(2, [50, 51]),
        new(1, [60, 61, 62, 63], sampling_params=ASKS),
        new(3, [70, 71, 72, 73, 74, 75], computed=2, sampling_params=ASKS),
    ]
    inputs = prepare(batch, requests, [2, 4, 2])
    first, second = prompt_logprobs(inputs, batch, logits_of, is_normalised=False, is_leader=True)
    assert (first.slot, first.start, second.slot, second.start) == (1, 1, 3, 3)
    assert first.logprobs.rows.tolist() == [0, 1, 2]
    assert first.logprobs.counts.tolist() == [2, 2, 2]
    assert first.logprobs.token_ids.tolist() == [61, 12, 62, 13, 63, 14]
    assert first.logprobs.logprobs.tolist() == [0, 5] * 3
    assert first.logprobs.sampled_ranks.tolist() == [2, 2, 2]
    assert second.logprobs.token_ids.tolist() == [73, 16, 74, 17]
    assert prompt_logprobs(inputs, batch, logits_of, is_normalised=False, is_leader=False) == []


def test_prompt_logprobs_are_normalised_where_that_is_asked() -> None:
    batch = make_batch()
    inputs = prepare(batch, [new(1, [60, 61], sampling_params=ASKS)], [2])
    (told,) = prompt_logprobs(inputs, batch, logits_of, is_normalised=True, is_leader=True)
    expected = torch.log_softmax(logits_of(np.array([0])), dim=-1)[0]
    assert told.logprobs.logprobs.tolist() == pytest.approx([float(expected[61]), float(expected[10])])
    plain = prepare(make_batch(), [new(1, [60, 61])], [2])
    assert prompt_logprobs(plain, make_batch(), logits_of, is_normalised=True, is_leader=True) == []


def test_sampled_tokens_are_logged_after_the_known_ones() -> None:
    batch = make_batch()
    inputs = prepare(batch, [new(0, [1, 2]), new(1, [3, 4, 5])], [2, 3])
    batch.advance(inputs)
    assert batch.num_computed_tokens[:2].tolist() == [2, 3]
    batch.append_tokens(np.array([0, 1, 1, 1]), np.array([20, 30, 31, 32]), np.array([0, 0, 1, 2]))
    assert batch.num_tokens[:2].tolist() == [3, 6]
    assert batch.num_computed_tokens[:2].tolist() == [2, 5], "right draft tokens are in the cache"
    assert (batch.tokens[0, :3].tolist(), batch.tokens[1, :6].tolist()) == ([1, 2, 20], [3, 4, 5, 30, 31, 32])


@pytest.mark.parametrize("is_plain", [True, False])
def test_a_placeholder_counts_and_is_filled_in(is_plain: bool) -> None:
    batch = make_batch()
    inputs = prepare(batch, [new(0, [1, 2], computed=1), new(1, [3, 4], computed=1)], None if is_plain else [1, 1])
    assert inputs.is_plain is is_plain
    batch.append_placeholders(inputs, np.array([0, 1]))
    assert (batch.num_tokens[:2].tolist(), batch.num_computed_tokens[:2].tolist()) == ([3, 3], [2, 2])
    assert batch.tokens[:2, :3].tolist() == [[1, 2, 0], [3, 4, 0]]
    batch.place_tokens(np.array([1, 0]), np.array([2, 2]), np.array([30, 20]))
    assert batch.tokens[:2, :3].tolist() == [[1, 2, 20], [3, 4, 30]]


def test_a_bad_slot_says_why() -> None:
    batch = make_batch()
    batch.apply(StepInput(new_requests=[new(0, [1, 2, 3], blocks=1, computed=1), new(1, [4, 5])]))
    bad = batch.fail(1, Code.INVALID_ARGUMENT, "it is bad", field="prompt")
    assert (bad.slot, bad.code, bad.message, bad.field) == (1, Code.INVALID_ARGUMENT, "it is bad", "prompt")
    step = StepInput(num_seqs=3, slots=np.array([2, 0, 1]), num_scheduled_tokens=np.array([1, 3, 1]))
    empty, long, failed = batch.prepare(step).bad_slots
    assert (empty.slot, empty.code, empty.message) == (2, Code.INTERNAL, "slot 2 is empty")
    assert (long.slot, long.code) == (0, Code.INTERNAL)
    assert long.message == "slot 0: 3 tokens after 1 computed ones do not fit 3 known tokens and 1 blocks of 4"
    assert (failed.slot, failed.code, failed.message, failed.field) == (1, Code.INVALID_ARGUMENT, "it is bad", "prompt")


@pytest.mark.parametrize(("num_groups", "is_refused"), [(0, True), (1, False), (2, True)])
def test_a_request_has_blocks_in_every_group(num_groups: int, is_refused: bool) -> None:
    batch = make_batch(groups=WINDOW)
    request = new(1, [5, 6], blocks=1, group_block_ids=np.full((num_groups, 1), 20))
    bad = prepare(batch, [request], [2]).bad_slots
    message = f"request r1: group_block_ids has {num_groups} groups, must have 1"
    assert [(one.slot, one.code, one.message) for one in bad] == (
        [(1, Code.INVALID_ARGUMENT, message)] if is_refused else []
    )
