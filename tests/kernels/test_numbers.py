"""Bounds of kernels, and small results that are worked out by hand."""

import importlib
from typing import Any

import numpy as np
import pytest
import torch

from pagoda_kernels.decoder.decode_rows import SequenceColumns, append_rows_reference, decode_rows_reference
from pagoda_kernels.lora.add_lora import GroupedRows, LoraPart, LoraTable, add_lora_reference, embed_lora_reference
from pagoda_kernels.recurrent.batch import RecurrentBatch
from pagoda_kernels.sampling.sample_tokens import CANDIDATES, filter_logits, sample_tokens

CPU = torch.device("cpu")
INF = float("inf")


@pytest.mark.parametrize(
    ("module", "name", "value"),
    [
        ("attention.mla_attention", "MAX_ABSORBED_TOKENS", 16),
        ("attention.mla_attention", "MAX_EXPANDED_BYTES", 268_435_456),
        ("attention.paged_attention", "MAX_SCORES", 33_554_432),
        ("attention.paged_attention", "MAX_TRITON_HEAD_DIM", 256),
        ("attention.quantized_cache", "SCALE_BYTES", 4),
        ("attention.quantized_cache", "MAX_CODE", 127),
        ("attention.quantized_cache", "MAX_FP8", 448.0),
        ("attention.rope_store", "MAX_HEAD_DIM", 1024),
        ("external.flash_attn", "MAX_HEAD_DIM", 256),
        ("external.flash_attn", "HEAD_DIM_STEP", 8),
        ("external.flashinfer", "MIN_WORKSPACE_BYTES", 134_217_728),
        ("external.flashinfer", "MAX_TILE", 128),
        ("external.flashinfer", "HEAD_DIMS", (64, 128, 256)),
        ("linear.packed_linear", "PANEL", 32),
        ("linear.quantized_matrix", "TILE", 32),
        ("linear.quantized_matrix", "QUAD", 4),
        ("linear.quantized_rows", "UNIT", 32),
        ("linear.quantized_rows", "PADDED_INPUTS", 128),
        ("lora.add_lora", "PANEL", 64),
        ("lora.add_lora", "BLOCK_ROWS", 16),
        ("lora.add_lora", "NUM_FIELDS", 5),
        ("native.compilation", "_ERROR_CHARACTERS", 2000),
        ("recurrent.gated_delta_rule", "NORM_EPS", 1e-6),
        ("recurrent.short_convolution", "MAX_NATIVE_WIDTH", 16),
        ("sampling.philox", "_ROUNDS", 10),
        ("sampling.sample_tokens", "CANDIDATES", (128, 2048)),
    ],
)
def test_a_bound_is_what_it_was_measured_or_agreed_to_be(module: str, name: str, value: object) -> None:
    assert getattr(importlib.import_module(f"pagoda_kernels.{module}"), name) == value


def rows(*numbers: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(numbers, dtype=np.int64)


def test_rows_of_groups_are_cut_into_blocks() -> None:
    groups = [rows(3, 5), rows(), rows(*range(10, 27)), rows(*range(40, 56))]
    grouped = GroupedRows.of(groups, CPU)
    assert grouped.rows.tolist() == [3, 5, *range(10, 27), *range(40, 56)]
    assert grouped.starts.tolist() == [0, 2, 2, 19, 35]
    assert grouped.blocks.tolist() == [[0, 0, 2], [2, 2, 18], [2, 18, 19], [3, 19, 35]]
    assert [(group, of_group.tolist()) for group, of_group in grouped.each()][:2] == [
        (0, [3, 5]),
        (2, [*range(10, 27)]),
    ]
    empty = GroupedRows.of([], CPU)
    assert (empty.rows.tolist(), empty.starts.tolist(), empty.blocks.shape) == ([], [0], (0, 3))


def part(a: list[list[float]], b: list[list[float]], row_start: int) -> LoraPart:
    return LoraPart.of(torch.tensor(a), torch.tensor(b), row_start)


def test_a_part_lies_in_panels() -> None:
    made = part([[1.0, 2.0]], [[float(number)] for number in range(65)], 7)
    assert made.b.shape == (2, 1, 64)
    assert made.b[1, 0, :3].tolist() == [64, 0, 0]
    assert made.matrix.flatten().tolist() == list(range(65))
    assert made.num_bytes == 4 * (2 + 128)
    assert made.fields == (made.a.data_ptr(), made.b.data_ptr(), 1, 7, 65)


def test_a_table_has_a_line_for_each_part() -> None:
    one, two = part([[1.0]], [[1.0], [2.0]], 3), part([[1.0], [2.0], [3.0]], [[1.0, 1.0, 1.0]], 9)
    table = LoraTable.of([[one], [], [two, one]], CPU)
    assert table.fields.shape == (3, 2, 5)
    assert table.fields[0].tolist() == [list(one.fields), [0] * 5]
    assert table.fields[1].tolist() == [[0] * 5] * 2
    assert table.fields[2].tolist() == [list(two.fields), list(one.fields)]
    assert (table.max_rank, table.max_rows) == (3, 2)


def test_products_are_added_to_the_rows_and_outputs_of_their_part() -> None:
    grouped = GroupedRows.of([rows(2), rows(0)], CPU)
    table = LoraTable.of([[part([[1.0, 10.0]], [[2.0]], 1)], [part([[1.0, 0.0]], [[1.0], [3.0]], 0)]], CPU)
    x, out = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), torch.ones(3, 3)
    add_lora_reference(x, out, grouped, table)
    assert out.tolist() == [[2, 4, 1], [1, 1, 1], [1, 131, 1]]
    out = torch.ones(3, 2)
    table = LoraTable.of([[part([[1.0, 10.0, 100.0]], [[1.0], [2.0]], 0)], []], CPU)
    embed_lora_reference(torch.tensor([0, 1, 2]), out, grouped, table)
    assert out.tolist() == [[1, 1], [1, 1], [101, 201]]


def columns() -> SequenceColumns:
    """Slot 1 decodes place 4 of its tokens in block 9; slot 2 place 3 in block 5."""
    return SequenceColumns(
        is_in_use=np.array([False, True, True]),
        is_greedy=np.array([True, True, False]),
        num_tokens=rows(0, 5, 4),
        num_computed_tokens=rows(0, 4, 3),
        num_blocks=rows(0, 2, 1),
        tokens=np.array([[0] * 6, [10, 11, 12, 13, 14, 0], [20, 21, 22, 23, 0, 0]], dtype=np.int32),
        block_table=np.array([[0, 0], [7, 9], [5, 0]], dtype=np.int32),
    )


def test_rows_of_decodes() -> None:
    made = decode_rows_reference(rows(2, 1), columns(), block_size=4, max_tokens=6)
    assert made is not None
    assert (made.seq_lens.tolist(), made.positions.tolist(), made.input_ids.tolist()) == ([4, 5], [3, 4], [23, 14])
    assert (made.slot_mapping.tolist(), made.max_blocks, made.is_greedy) == ([23, 36], 2, False)
    alone = decode_rows_reference(rows(1), columns(), block_size=4, max_tokens=6)
    assert alone is not None
    assert alone.is_greedy


@pytest.mark.parametrize(
    ("slots", "max_tokens", "changes"),
    [
        (rows(0), 6, {}),
        (rows(3), 6, {}),
        (rows(1), 5, {}),
        (rows(1), 6, {"num_blocks": rows(0, 1, 1)}),
        (rows(1), 6, {"num_computed_tokens": rows(0, 3, 3)}),
        (rows(1), 6, {"num_computed_tokens": rows(0, 5, 3)}),
    ],
)
def test_what_is_no_decode(slots: Any, max_tokens: int, changes: dict[str, Any]) -> None:
    given = columns()._replace(**changes)
    assert decode_rows_reference(slots, given, block_size=4, max_tokens=max_tokens) is None


def test_decoded_tokens_are_appended() -> None:
    given = columns()
    append_rows_reference(rows(2, 1), rows(80, 90), given)
    assert (given.num_tokens.tolist(), given.num_computed_tokens.tolist()) == ([0, 6, 5], [0, 5, 4])
    assert given.tokens.tolist() == [[0] * 6, [10, 11, 12, 13, 14, 90], [20, 21, 22, 23, 80, 0]]


def test_a_recurrent_batch_is_told_by_its_starts() -> None:
    batch = RecurrentBatch(
        query_lens=rows(2, 1, 3), rows=rows(5, 0, 2), device=CPU, kept_rows=rows(-1, 9, -1, -1, 7, -1)
    )
    starts, slots, kept = batch.columns()
    assert (starts.tolist(), slots.tolist()) == ([0, 2, 3, 6], [5, 0, 2])
    assert kept is not None
    assert kept.tolist() == [-1, 9, -1, -1, 7, -1]
    assert batch.columns() is batch.columns()


LOGITS = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1]]))


def kept(logits: torch.Tensor = LOGITS, **filters: Any) -> list[int]:
    dtypes = {"top_k": torch.int64, "top_p": torch.float32, "min_p": torch.float32}
    given: dict[str, Any] = {name: torch.tensor([value], dtype=dtypes[name]) for name, value in filters.items()}
    filtered = filter_logits(logits, **given)
    places = torch.nonzero(filtered[0] > -INF).flatten().tolist()
    assert filtered[0][places].tolist() == logits[0][places].tolist()
    drawn = {int(sample_tokens(logits, torch.tensor([key * 7919]), **given)[0]) for key in range(60)}
    assert drawn <= set(places), "no other token is ever sampled"
    result: list[int] = places
    return result


@pytest.mark.parametrize(
    ("filters", "places"),
    [
        ({}, [0, 1, 2, 3]),
        ({"top_k": 0}, [0, 1, 2, 3]),
        ({"top_k": 1}, [0]),
        ({"top_k": 3}, [0, 1, 2]),
        ({"top_k": 4}, [0, 1, 2, 3]),
        ({"top_k": 9}, [0, 1, 2, 3]),
        ({"top_p": 1.0}, [0, 1, 2, 3]),
        ({"top_p": 0.39}, [0]),
        ({"top_p": 0.41}, [0, 1]),
        ({"top_p": 0.69}, [0, 1]),
        ({"top_p": 0.71}, [0, 1, 2]),
        ({"top_p": 0.0001}, [0]),
        ({"min_p": 0.0}, [0, 1, 2, 3]),
        ({"min_p": 0.49}, [0, 1, 2]),
        ({"min_p": 0.51}, [0, 1]),
        ({"min_p": 1.0}, [0]),
        ({"top_k": 2, "top_p": 0.56}, [0]),  # of the two 0.4 / 0.7 is 0.571
        ({"top_k": 2, "top_p": 0.58}, [0, 1]),
        ({"top_k": 3, "min_p": 0.6}, [0, 1]),
        ({"top_p": 0.56, "min_p": 0.6}, [0]),
    ],
)
def test_filters_keep_the_likeliest(filters: dict[str, float], places: list[int]) -> None:
    assert kept(**filters) == places


def test_of_equals_the_lower_ids_stay() -> None:
    equal = torch.zeros(1, 4)
    assert kept(equal, top_k=2) == [0, 1]
    assert kept(equal, top_p=0.6) == [0, 1, 2]
    assert kept(equal, min_p=1.0) == [0, 1, 2, 3]


@pytest.mark.parametrize("size", [2 * CANDIDATES[0], 2 * CANDIDATES[0] + 1])
@pytest.mark.parametrize("top_k", [CANDIDATES[0] - 1, CANDIDATES[0], CANDIDATES[0] + 1])
def test_candidates_give_what_all_tokens_give(size: int, top_k: int) -> None:
    """With this temperature nearly all kept tokens are equally likely."""
    logits = torch.arange(size, dtype=torch.float32)[None] * 1e-4
    keys = torch.arange(300) * 104_729
    drawn = sample_tokens(logits.expand(300, -1), keys, top_k=torch.full((300,), top_k))
    assert int(drawn.min()) >= size - top_k
    assert int(drawn.max()) < size


def test_keys_are_as_many_as_rows() -> None:
    with pytest.raises(ValueError, match=r"^2 keys for 1 rows$"):
        sample_tokens(LOGITS, torch.tensor([1, 2]))
