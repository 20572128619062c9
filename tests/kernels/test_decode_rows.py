"""decode_rows and append_rows: the C++ kernel against the specification, and what is no such step."""

import numpy as np
import pytest

from pagoda_kernels.decoder.decode_rows import (
    DecodeRows,
    SequenceColumns,
    append_rows,
    append_rows_reference,
    decode_rows,
    decode_rows_reference,
)
from pagoda_kernels.native.library import load_native

load_native()
BLOCK_SIZE = 4
MAX_TOKENS = 64


def make_columns(*, num_slots: int = 9, seed: int = 0) -> SequenceColumns:
    """Sequences that have all but their last token in the cache."""
    generator = np.random.default_rng(seed)
    num_tokens = generator.integers(1, MAX_TOKENS - 1, num_slots)
    num_blocks = -(-num_tokens // BLOCK_SIZE) + generator.integers(0, 2, num_slots)
    return SequenceColumns(
        is_in_use=np.ones(num_slots, dtype=np.bool_),
        is_greedy=np.ones(num_slots, dtype=np.bool_),
        num_tokens=num_tokens,
        num_computed_tokens=num_tokens - 1,
        num_blocks=num_blocks,
        tokens=generator.integers(0, 1000, (num_slots, MAX_TOKENS + 1)).astype(np.int32),
        block_table=generator.permutation(num_slots * 20).reshape(num_slots, 20).astype(np.int32),
    )


def both(slots: list[int], columns: SequenceColumns) -> DecodeRows | None:
    """What the kernel gives, which the specification gives as well."""
    chosen = np.array(slots, dtype=np.int64)
    ours, spec = (
        rows(chosen, columns, block_size=BLOCK_SIZE, max_tokens=MAX_TOKENS)
        for rows in (decode_rows, decode_rows_reference)
    )
    assert (ours is None) == (spec is None)
    if ours is not None and spec is not None:
        for name in ("seq_lens", "positions", "input_ids", "slot_mapping"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(spec, name))
        assert (ours.max_blocks, ours.is_greedy) == (spec.max_blocks, spec.is_greedy)
    return ours


@pytest.mark.parametrize("slots", [[0], [8, 0, 3], list(range(9)), []])
def test_rows_of_a_batch(slots: list[int]) -> None:
    for seed in range(5):
        rows = both(slots, make_columns(seed=seed))
        assert rows is not None
        assert rows.seq_lens.size == len(slots)
        assert rows.is_greedy


def test_one_that_is_not_greedy_counts_for_all() -> None:
    columns = make_columns()
    columns.is_greedy[3] = False
    others = both([1, 2], columns)
    for slots in ([1, 3], [3, 1]):
        all_rows = both(slots, columns)
        assert all_rows is not None
        assert not all_rows.is_greedy
    assert others is not None
    assert others.is_greedy


@pytest.mark.parametrize(
    "change",
    [
        lambda columns: columns.is_in_use.__setitem__(3, False),
        lambda columns: columns.num_computed_tokens.__setitem__(3, columns.num_tokens[3]),
        lambda columns: columns.num_computed_tokens.__setitem__(3, columns.num_tokens[3] - 2),
        lambda columns: columns.num_blocks.__setitem__(3, 0),
        lambda columns: columns.num_tokens.__setitem__(3, MAX_TOKENS),
    ],
    ids=["empty slot", "nothing to compute", "two tokens to compute", "no block", "at the limit"],
)
def test_what_is_no_such_step(change: object) -> None:
    columns = make_columns()
    assert callable(change)
    change(columns)
    assert both([1, 3], columns) is None
    assert both([1, 2], columns) is not None


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks", "max_tokens", "max_blocks"),
    [
        (8, 2, MAX_TOKENS, 2),
        (9, 3, MAX_TOKENS, 3),
        (9, 2, MAX_TOKENS, None),
        (8, 2, 9, 2),
        (8, 2, 8, None),
    ],
)
def test_a_sequence_has_a_block_for_its_token_and_room_for_the_next(
    num_tokens: int, num_blocks: int, max_tokens: int, max_blocks: int | None
) -> None:
    columns = make_columns()
    columns.num_tokens[3], columns.num_computed_tokens[3], columns.num_blocks[3] = (
        num_tokens,
        num_tokens - 1,
        num_blocks,
    )
    for rows in (decode_rows, decode_rows_reference):
        found = rows(np.array([3]), columns, block_size=BLOCK_SIZE, max_tokens=max_tokens)
        assert (None if found is None else found.max_blocks) == max_blocks


def test_a_slot_that_does_not_exist() -> None:
    """Also where its memory goes on, as if there was one."""
    wide = make_columns(num_slots=10)
    assert both([1, 9], wide) is not None
    assert both([1, 9], SequenceColumns(*(column[:9] for column in wide))) is None


def test_tokens_are_appended() -> None:
    slots, token_ids = np.array([8, 0, 3]), np.array([11, 22, 33])
    ours = make_columns()
    spec = ours._replace(
        num_tokens=ours.num_tokens.copy(),
        num_computed_tokens=ours.num_computed_tokens.copy(),
        tokens=ours.tokens.copy(),
    )
    append_rows(slots, token_ids, ours)
    append_rows_reference(slots, token_ids, spec)
    for name in ("num_tokens", "num_computed_tokens", "tokens"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(spec, name))
    assert ours.tokens[slots, ours.num_computed_tokens[slots]].tolist() == token_ids.tolist()
    assert both([8, 0, 3], ours) is not None  # and so on with the next step
