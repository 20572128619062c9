"""The reads and writes of a step that decodes the last known token of each sequence, in columns."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pagoda_kernels.native.library import native

IntArray = npt.NDArray[np.int64]


class SequenceColumns(NamedTuple):
    """What is known of the sequence in each slot. Arrays are contiguous, indexed by slot; the last two have at least a
    row for every slot in use. C++ kernels take them in this order."""

    is_in_use: npt.NDArray[np.bool_]
    is_greedy: npt.NDArray[np.bool_]
    """Samples the likeliest token, whatever else is there, and asks for nothing beside it."""
    num_tokens: IntArray
    num_computed_tokens: IntArray
    """Keys and values in the cache."""
    num_blocks: IntArray
    tokens: npt.NDArray[np.int32]
    """[slots, tokens] of each sequence, from its first on."""
    block_table: npt.NDArray[np.int32]
    """[slots, blocks]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeRows:
    """One row a sequence, each [n] int64."""

    seq_lens: IntArray
    """Tokens of each, the last one included."""
    positions: IntArray
    input_ids: IntArray
    slot_mapping: IntArray
    """block_id * block_size + offset."""
    max_blocks: int
    """Number of blocks of the longest sequence."""
    is_greedy: bool
    """All of them."""


def decode_rows(slots: IntArray, columns: SequenceColumns, *, block_size: int, max_tokens: int) -> DecodeRows | None:
    """The rows of `slots`; None: some slot is empty or does not exist, or its sequence has more or less to compute than
    one token, no block for it, or as many as `max_tokens` tokens.

    Args:
        slots: [n].
    """
    kernel = native("decode_rows")
    if kernel is None:
        return decode_rows_reference(slots, columns, block_size=block_size, max_tokens=max_tokens)
    rows = np.empty((4, slots.size), dtype=np.int64)
    max_blocks, is_greedy = kernel(slots, *columns, block_size, max_tokens, rows)
    if max_blocks < 0:
        return None
    seq_lens, positions, input_ids, slot_mapping = rows
    return DecodeRows(
        seq_lens=seq_lens,
        positions=positions,
        input_ids=input_ids,
        slot_mapping=slot_mapping,
        max_blocks=max_blocks,
        is_greedy=is_greedy,
    )


def decode_rows_reference(
    slots: IntArray, columns: SequenceColumns, *, block_size: int, max_tokens: int
) -> DecodeRows | None:
    """The specification of `decode_rows`."""
    if slots.size and int(slots.max()) >= columns.is_in_use.size:
        return None
    seq_lens = columns.num_tokens[slots]
    positions = columns.num_computed_tokens[slots]
    is_good = (
        columns.is_in_use[slots]
        & (positions + 1 == seq_lens)
        & (seq_lens <= columns.num_blocks[slots] * block_size)
        & (seq_lens < max_tokens)
    )
    if not is_good.all():
        return None
    block_ids = columns.block_table[slots, positions // block_size].astype(np.int64)
    return DecodeRows(
        seq_lens=seq_lens,
        positions=positions,
        input_ids=columns.tokens[slots, positions].astype(np.int64),
        slot_mapping=block_ids * block_size + positions % block_size,
        max_blocks=-(-int(seq_lens.max(initial=0)) // block_size),
        is_greedy=bool(columns.is_greedy[slots].all()),
    )


def append_rows(slots: IntArray, token_ids: IntArray, columns: SequenceColumns) -> None:
    """Note a step's results: its tokens are computed, and `token_ids` [n] come after them. There is room for them."""
    kernel = native("append_rows")
    if kernel is None:
        append_rows_reference(slots, token_ids, columns)
    else:
        kernel(slots, token_ids, columns.num_tokens, columns.num_computed_tokens, columns.tokens)


def append_rows_reference(slots: IntArray, token_ids: IntArray, columns: SequenceColumns) -> None:
    """The specification of `append_rows`."""
    num_tokens = columns.num_tokens[slots]
    columns.num_computed_tokens[slots] = num_tokens
    columns.tokens[slots, num_tokens] = token_ids
    columns.num_tokens[slots] = num_tokens + 1
