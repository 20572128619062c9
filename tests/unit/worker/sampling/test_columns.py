"""Slot-indexed arrays grow with use, and what was in them stays."""

import numpy as np

from pagoda_common.params.sampling_params import SamplingParams
from pagoda_worker.sampling.columns import RaggedColumn, grown
from pagoda_worker.steps.input_batch import FIRST_TOKENS, InputBatch
from pagoda_worker.steps.step import NewRequest, StepInput


def test_growing_keeps_the_content_and_doubles() -> None:
    array = np.arange(6).reshape(2, 3)
    assert grown(array, (2, 2)) is array
    larger = grown(array, (3, 4), fill=-1)
    assert larger.shape == (4, 6)
    assert larger[:2, :3].tolist() == array.tolist()
    assert (larger[2:] == -1).all()
    assert grown(array, (2, 100)).shape == (2, 100)


def test_a_ragged_column_pads_and_forgets() -> None:
    column = RaggedColumn(dtype=np.int64, fill=7)
    column.set(5, np.array([], dtype=np.int64))
    assert column.values.size == 0, "an empty list costs nothing"
    column.set(2, np.array([1, 2, 3]))
    column.set(9, np.array([4]))
    assert column.values[9, :3].tolist() == [4, 7, 7]
    assert column.lengths_of(np.array([2, 9, 0, 1000])).tolist() == [3, 1, 0, 0]
    column.set(2, np.array([], dtype=np.int64))
    assert column.lengths_of(np.array([2])).tolist() == [0]


def new_request(slot: int, num_tokens: int, blocks: list[int]) -> NewRequest:
    return NewRequest(
        slot=slot,
        request_id=str(slot),
        prompt_token_ids=np.arange(num_tokens) % 50,
        sampling_params=SamplingParams(temperature=0),
        block_ids=np.array(blocks),
    )


def test_the_batch_grows_to_its_highest_slot_and_longest_sequence() -> None:
    batch = InputBatch(max_num_seqs=1000, max_model_len=100_000, block_size=16, num_blocks=10_000, vocab_size=50)
    assert batch.tokens.nbytes < 1 << 20, "a large context costs nothing before it is used"
    long = 3 * FIRST_TOKENS
    blocks = list(range(100, 100 + long // 16))
    step = StepInput(
        new_requests=[new_request(0, 5, [7]), new_request(999, long, blocks)],
        num_seqs=2,
        slots=np.array([999, 0]),
        num_scheduled_tokens=np.array([long, 5]),
    )
    batch.apply(step)
    inputs = batch.prepare(step)
    assert inputs.bad_slots == []
    assert inputs.input_ids.tolist() == [*(np.arange(long) % 50).tolist(), 0, 1, 2, 3, 4]
    assert inputs.slot_mapping[:long].tolist() == list(range(1600, 1600 + long))
    assert inputs.slot_mapping[long:].tolist() == [112, 113, 114, 115, 116]
    assert inputs.is_sampled.all()


def test_blocks_are_appended_to_their_slots_in_order() -> None:
    batch = InputBatch(max_num_seqs=4, max_model_len=512, block_size=16, num_blocks=100, vocab_size=50)
    batch.apply(StepInput(new_requests=[new_request(0, 5, [1]), new_request(1, 5, [2, 3])]))
    batch.apply(StepInput(appended_slots=np.array([1, 0, 1, 0, 0]), appended_block_ids=np.array([11, 12, 13, 14, 15])))
    assert batch.block_tables[0, 0, :4].tolist() == [1, 12, 14, 15]
    assert batch.block_tables[0, 1, :4].tolist() == [2, 3, 11, 13]
    assert batch.num_blocks_of[:2].tolist() == [4, 4]
