"""Plans of attention, number by number: groups, rows, parts, copies and chunks of batches worked out by hand."""

from typing import Any

import numpy as np
import pytest
import torch

from pagoda_kernels.attention import plan as plan_module
from pagoda_kernels.attention.plan import MAX_GROUP_TOKENS, SMALL_BATCH_TOKENS, AttentionPlan, DecodeGroup, PrefillRow
from pagoda_kernels.external.adapter import AttentionNeeds, Scoring, plain_refusal
from pagoda_kernels.external.flashinfer import pages_of, workspace_bytes

CPU = torch.device("cpu")
INF = float("inf")


def make_plan(query_lens: list[int], seq_lens: list[int], *, block_size: int = 4, columns: int = 4) -> AttentionPlan:
    """Block i of sequence s is 10 s + i + 1."""
    table = np.array([[10 * row + column + 1 for column in range(columns)] for row in range(len(seq_lens))])
    return AttentionPlan(
        np.array(query_lens), np.array(seq_lens), table.astype(np.int32), block_size, torch.float32, CPU
    )


def group_of(plan: AttentionPlan, window: int | None = None) -> DecodeGroup:
    (group,) = plan.window(window).decodes
    return group


def row_of(plan: AttentionPlan, window: int | None = None) -> PrefillRow:
    (row,) = plan.window(window).prefills
    return row


def seen(mask: torch.Tensor) -> list[list[int]]:
    """Columns that each row sees."""
    assert set(mask.unique().tolist()) <= {0.0, -INF}
    return [torch.nonzero(row == 0).flatten().tolist() for row in mask.reshape(-1, mask.shape[-1])]


def test_the_bounds_of_groups() -> None:
    assert (SMALL_BATCH_TOKENS, MAX_GROUP_TOKENS) == (16384, 65536)


def test_decodes_are_padded_with_their_own_last_block() -> None:
    group = group_of(make_plan([1, 1, 1], [3, 4, 9]))
    assert group.query_rows is None, "these are all rows in order"
    assert group.block_ids.tolist() == [1, 1, 1, 11, 11, 11, 21, 22, 23]
    assert group.mask.shape == (3, 1, 1, 12)
    assert group.mask.dtype == torch.float32
    assert seen(group.mask) == [list(range(3)), list(range(4)), list(range(9))]
    assert group.distances[:, 0].tolist() == [-2, -3, -8]
    assert group.distances[2].tolist() == list(range(-8, 4))


def test_decodes_of_a_window_begin_at_its_first_block() -> None:
    group = group_of(make_plan([1, 1], [9, 3]), window=3)
    # The window of the first sequence is tokens 6 to 8: of its blocks 1 and 2, and no token before its third one.
    assert group.block_ids.tolist() == [2, 3, 11, 11]
    assert seen(group.mask) == [[2, 3, 4], [0, 1, 2]]
    assert group.distances[0].tolist() == [-4, -3, -2, -1, 0, 1, 2, 3]


@pytest.mark.parametrize(("window", "blocks"), [(1, [3]), (2, [2, 3]), (5, [2, 3]), (6, [1, 2, 3]), (9, [1, 2, 3])])
def test_the_blocks_of_a_window_at_its_edges(window: int, blocks: list[int]) -> None:
    group = group_of(make_plan([1], [9]), window=window)
    assert group.block_ids.tolist() == blocks
    first = 9 - window - (3 - len(blocks)) * 4
    assert seen(group.mask) == [list(range(first, first + window))]


def test_decodes_beside_prompts_know_their_rows_of_the_query() -> None:
    plan = make_plan([1, 3, 1, 2], [2, 3, 5, 6])
    assert group_of(plan).query_rows is not None
    assert group_of(plan).query_rows.tolist() == [0, 4]  # type: ignore[union-attr]  # asserted in the line above
    assert group_of(plan).block_ids.tolist() == [1, 1, 21, 22]
    starts = [(row.query_start, row.query_len) for row in plan.window(None).prefills]
    assert starts == [(1, 3), (5, 2)]


def test_a_plain_prompt_has_no_mask() -> None:
    row = row_of(make_plan([5], [5]))
    assert (row.query_start, row.query_len, row.first, row.num_keys) == (0, 5, 0, 5)
    assert row.block_ids.tolist() == [1, 2]
    assert row.mask is None


@pytest.mark.parametrize(("window", "is_masked"), [(4, True), (5, False), (6, False)])
def test_a_prompt_within_its_window_has_no_mask(window: int, is_masked: bool) -> None:
    row = row_of(make_plan([5], [5]), window=window)
    assert (row.first, row.num_keys) == (0, 5)
    assert (row.mask is not None) is is_masked
    if row.mask is not None:
        assert seen(row.mask) == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [1, 2, 3, 4]]


def test_a_chunk_sees_what_was_computed_before() -> None:
    row = row_of(make_plan([2], [6]))
    assert (row.query_len, row.first, row.num_keys, row.block_ids.tolist()) == (2, 0, 6, [1, 2])
    assert row.mask is not None
    assert seen(row.mask) == [list(range(5)), list(range(6))]


@pytest.mark.parametrize(
    ("window", "blocks", "first", "num_keys"),
    [(2, [2, 3], 3, 3), (3, [2, 3], 2, 4), (5, [2, 3], 0, 6), (6, [1, 2, 3], 3, 7), (20, [1, 2, 3], 0, 10)],
)
def test_a_chunk_of_a_window(window: int, blocks: list[int], first: int, num_keys: int) -> None:
    row = row_of(make_plan([2], [10]), window=window)
    assert (row.block_ids.tolist(), row.first, row.num_keys) == (blocks, first, num_keys)
    assert row.mask is not None
    last = seen(row.mask)[1]
    assert last == list(range(max(0, num_keys - window), num_keys))
    assert seen(row.mask)[0] == list(range(max(0, num_keys - 1 - window), num_keys - 1))


def test_a_window_is_worked_out_once() -> None:
    plan = make_plan([1, 2], [2, 3])
    assert plan.window(None) is plan.window(None)
    assert plan.window(2) is plan.window(2)
    assert plan.window(2) is not plan.window(None)


@pytest.mark.parametrize(("small", "num_groups"), [(48, 1), (47, 2)])
def test_a_small_batch_is_one_group(small: int, num_groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three sequences of at most 4 blocks of 4 tokens: 48 tokens, padded."""
    monkeypatch.setattr(plan_module, "SMALL_BATCH_TOKENS", small)
    groups = make_plan([1, 1, 1], [4, 16, 9]).window(None).decodes
    assert len(groups) == num_groups
    if num_groups == 2:  # blocks: 1; and 4 and 3, both of which need 2 bits
        assert [group.block_ids.tolist() for group in groups] == [[1], [11, 12, 13, 14, 21, 22, 23, 23]]
        assert [group.query_rows.tolist() for group in groups if group.query_rows is not None] == [[0], [1, 2]]


@pytest.mark.parametrize(("bound", "sizes"), [(16, [2, 1]), (15, [1, 1, 1]), (24, [3]), (4, [1, 1, 1])])
def test_a_large_group_is_split(bound: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "SMALL_BATCH_TOKENS", 0)
    monkeypatch.setattr(plan_module, "MAX_GROUP_TOKENS", bound)
    groups = make_plan([1, 1, 1], [8, 8, 7]).window(None).decodes
    assert [group.mask.shape[0] for group in groups] == sizes


def test_columns_are_what_a_kernel_reads() -> None:
    plan = AttentionPlan(
        np.array([1, 2], dtype=np.int32),  # type: ignore[arg-type]  # other widths are turned into 64 bits
        np.array([3, 7]),
        np.array([[1, 2], [3, 4], [5, 6]], dtype=np.int32)[:2, ::-1],
        4,
        torch.float32,
        CPU,
    )
    query_lens, seq_lens, table = plan.columns()
    assert (query_lens.dtype, seq_lens.dtype, table.dtype) == (torch.int64, torch.int64, torch.int32)
    assert (query_lens.tolist(), seq_lens.tolist(), table.tolist()) == ([1, 2], [3, 7], [[2, 1], [4, 3]])
    assert table.is_contiguous()
    assert plan.columns() is plan.columns()


def test_tables_are_made_once() -> None:
    plan = make_plan([1, 2], [2, 3])
    assert plan.device_tables is None
    assert plan.tables() is plan.tables()


def test_parts_are_of_short_and_of_long_queries() -> None:
    plan = make_plan([1, 3, 2, 4], [9, 3, 5, 8])
    short, long = plan.parts(2)
    assert short is not None
    assert long is not None
    assert short.rows is not None
    assert long.rows is not None
    assert (short.rows.tolist(), long.rows.tolist()) == ([0, 4, 5], [1, 2, 3, 6, 7, 8, 9])
    assert (short.plan.query_lens.tolist(), short.plan.seq_lens.tolist()) == ([1, 2], [9, 5])
    assert (long.plan.query_lens.tolist(), long.plan.seq_lens.tolist()) == ([3, 4], [3, 8])
    assert (short.plan.block_table[:, 0].tolist(), long.plan.block_table[:, 0].tolist()) == ([1, 21], [11, 31])
    for part in (short, long):
        assert (part.plan.block_size, part.plan.dtype, part.plan.device) == (4, torch.float32, CPU)
    assert plan.parts(2) is plan.parts(2)


def test_a_part_of_all_is_the_plan_itself() -> None:
    plan = make_plan([1, 2], [3, 4])
    all_short, none_long = plan.parts(2)
    assert all_short is not None
    assert (all_short.rows, none_long) == (None, None)
    assert all_short.plan is plan
    none_short, all_long = plan.parts(0)
    assert none_short is None
    assert all_long is not None
    assert all_long.plan is plan
    empty = AttentionPlan(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, 1), np.int32), 4, torch.half, CPU)
    assert empty.parts(1) == (None, None)


def test_gathered_blocks_lie_one_after_the_other() -> None:
    plan = make_plan([1, 2, 1], [5, 4, 9])
    gathered = plan.gathered()
    assert gathered.block_ids.tolist() == [1, 2, 11, 21, 22, 23]
    assert gathered.block_ids.dtype == torch.int64
    assert gathered.plan.block_table.tolist() == [[0, 1, 0, 0], [2, 0, 0, 0], [3, 4, 5, 0]]
    assert gathered.plan.block_table.dtype == np.int32
    assert gathered.plan.query_lens.tolist() == [1, 2, 1]
    assert gathered.plan.seq_lens.tolist() == [5, 4, 9]
    assert (gathered.plan.block_size, gathered.plan.dtype, gathered.plan.device) == (4, torch.float32, CPU)
    assert plan.gathered() is gathered


def test_a_sequence_is_one_for_each_chunk_of_its_queries() -> None:
    plan = make_plan([1, 6, 16], [5, 9, 16])
    chunked = plan.chunked(8)
    # The first one is in its first chunk; the second's queries are 3 to 8; the third one is all of two chunks.
    assert chunked.query_lens.tolist() == [1, 5, 1, 8, 8]
    assert chunked.seq_lens.tolist() == [5, 8, 1, 8, 8]
    assert chunked.block_table.tolist() == [[1, 2], [11, 12], [13, 14], [21, 22], [23, 24]]
    assert (chunked.block_size, chunked.dtype, chunked.device) == (4, torch.float32, CPU)
    assert plan.chunked(8) is chunked
    assert plan.chunked(12) is not chunked


@pytest.mark.parametrize(("length", "query_lens", "seq_lens"), [(16, [1], [8]), (17, [1], [1]), (15, [1], [7])])
def test_a_decode_sees_its_own_chunk(length: int, query_lens: list[int], seq_lens: list[int]) -> None:
    chunked = make_plan([1], [length], columns=5).chunked(8)
    assert (chunked.query_lens.tolist(), chunked.seq_lens.tolist()) == (query_lens, seq_lens)
    assert chunked.block_table[0, 0] == (5 if length == 17 else 3)


def test_a_batch_within_its_first_chunk_is_as_it_is() -> None:
    plan = make_plan([1, 2], [8, 3])
    assert plan.chunked(8) is plan
    longer = make_plan([1, 2], [9, 3])
    assert longer.chunked(8) is not longer


def test_a_chunk_is_of_whole_blocks() -> None:
    with pytest.raises(ValueError, match=r"^chunk is 6, must be a multiple of block_size, 4$"):
        make_plan([1], [2]).chunked(6)


def test_pages_are_those_that_are_read() -> None:
    pages = pages_of(make_plan([1, 3, 2], [4, 9, 5]), CPU)
    assert pages.query_start_loc.tolist() == [0, 1, 4, 6]
    assert pages.page_start_loc.tolist() == [0, 1, 4, 6]
    assert pages.page_ids.tolist() == [1, 11, 12, 13, 21, 22]
    assert pages.last_page_lens.tolist() == [4, 1, 1]
    assert {column.dtype for column in pages} == {torch.int32}


def make_needs(**fields: Any) -> AttentionNeeds:
    values: dict[str, Any] = {
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 64,
        "block_size": 16,
        "dtype": torch.bfloat16,
        "cache_dtype": torch.bfloat16,
        "layers": (Scoring(0.5),),
    }
    return AttentionNeeds(**{**values, **fields})


def test_needs_have_defaults() -> None:
    needs = make_needs()
    assert (needs.has_biases, needs.capability) == (False, (0, 0))
    assert Scoring(0.5) == (0.5, None, None)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, None),
        ({"dtype": torch.float16, "cache_dtype": torch.float16}, None),
        ({"has_biases": True}, "scores have linear biases"),
        (
            {"dtype": torch.float32, "cache_dtype": torch.float32},
            "the data type is float32, must be bfloat16 or float16",
        ),
        ({"cache_dtype": torch.int8}, "the KV cache is of int8, must be of bfloat16 like the queries"),
    ],
)
def test_what_stands_in_the_way_of_every_package(fields: dict[str, Any], reason: str | None) -> None:
    assert plain_refusal(make_needs(**fields)) == reason


def test_the_workspace_is_at_least_what_is_recommended() -> None:
    assert workspace_bytes(make_needs(), CPU) == 128 << 20
    # 1024 heads, one tile of 128 rows of 256 values and a sum, 4 bytes each, and a MiB.
    needs = make_needs(num_heads=1024, num_kv_heads=1024, head_dim=256)
    assert workspace_bytes(needs, CPU) == 4 * 1024 * 128 * 257 + 2**20
    # Two tiles where there is one head of keys.
    needs = make_needs(num_heads=1024, num_kv_heads=1, head_dim=256)
    assert workspace_bytes(needs, CPU) == 2 * 4 * 1024 * 128 * 257 + 2**20
