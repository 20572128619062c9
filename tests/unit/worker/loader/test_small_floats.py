"""Small floats that stay as they are stored: which checkpoints give them, and what a rank takes of their parts."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from pagoda_kernels.linear.scaled_matrix import ScaledMatrix
from pagoda_worker.loader.formats.compressed_tensors import CompressedTensors
from pagoda_worker.loader.formats.scaled import Float8, scale_blocks, scaled_matrix
from pagoda_worker.loader.scaled_parts import join_scaled
from pagoda_worker.models.weights import WeightSource
from tests.unit.worker.loader.rank_part import Sharding

FP8 = torch.float8_e4m3fn
CPU = torch.device("cpu")
WIDTH = 128


def codes(rows: int, columns: int, first: int = 1) -> Tensor:
    """Whole numbers that both kinds of FP8 have, none like its neighbours."""
    return ((torch.arange(rows * columns) * 3 + first) % 7 + 1.0).view(rows, columns).to(FP8)


@pytest.mark.parametrize(
    ("scale", "block", "group_size"),
    [
        (torch.tensor(2.0), None, 5),
        (torch.tensor([2.0]), None, 5),
        (torch.tensor([[2.0]]), (2, 3), 5),
        (torch.tensor([1.0, 2.0, 4.0]), None, 5),
        (torch.tensor([[1.0], [2.0], [4.0]]), None, 5),
        (torch.tensor([[1.0, 2.0], [4.0, 8.0]]).bfloat16(), (2, 3), 3),
        (torch.tensor([[1.0, 2.0, 4.0]]), (4, 2), 2),
    ],
)
def test_scales_of_blocks_become_those_of_outputs(
    scale: Tensor, block: tuple[int, int] | None, group_size: int
) -> None:
    weight = codes(3, 5)
    matrix = scaled_matrix(weight, scale, block)
    assert matrix is not None
    assert matrix.codes is weight
    assert (matrix.group_size, matrix.scales.dtype, matrix.scales.is_contiguous()) == (group_size, torch.float32, True)
    assert matrix.scales.shape == (3, -(-5 // group_size))
    assert torch.equal(matrix.dequantize(), scale_blocks(weight, scale, block))


@pytest.mark.parametrize(
    ("weight", "scale", "block"),
    [
        (codes(3, 5)[None], torch.tensor(2.0), None),
        (codes(3, 5).to(torch.float8_e5m2), torch.tensor(2.0), None),
        (codes(3, 5).float(), torch.tensor(2.0), None),
        (codes(3, 5), torch.ones(5), None),
        (codes(3, 5), torch.ones(1, 3), None),
        (codes(3, 5), torch.ones(3, 2), (2, 3)),
        (codes(3, 5), torch.ones(2, 1), (2, 3)),
    ],
)
def test_what_the_kernel_does_not_know_is_no_such_matrix(
    weight: Tensor, scale: Tensor, block: tuple[int, int] | None
) -> None:
    assert scaled_matrix(weight, scale, block) is None


def test_formats_give_small_floats_and_floats_where_they_are_others() -> None:
    weight, scale = codes(3, 5), torch.tensor([[1.0, 2.0], [4.0, 8.0]])
    expected = scale_blocks(weight, scale, (2, 3))
    weights = {"type": "float", "num_bits": 8, "strategy": "block", "block_structure": [2, 3]}
    groups = CompressedTensors({"format": "float-quantized", "config_groups": {"a": {"weights": weights}}})
    for stored, name in ((Float8({"weight_block_size": [2, 3]}), "scale"), (groups.of("a.weight"), "weight_scale")):
        kept = stored.read_scaled({"weight": weight, name: scale})
        assert isinstance(kept, ScaledMatrix)
        assert (kept.group_size, kept.codes.dtype) == (3, FP8)
        assert torch.equal(kept.dequantize(), expected)
        floats = stored.read_scaled({"weight": weight.to(torch.float8_e5m2), name: scale})
        assert isinstance(floats, Tensor)
        assert torch.equal(floats, expected)


def test_blocks_of_compressed_tensors_are_128_by_128_where_none_are_named() -> None:
    weights = {"type": "float", "num_bits": 8, "strategy": "block"}
    stored = CompressedTensors({"format": "float-quantized", "config_groups": {"a": {"weights": weights}}})
    scale = torch.arange(1.0, 7.0).view(2, 3)
    found = stored.of("a.weight").read({"weight": torch.ones(129, 257).to(FP8), "weight_scale": scale})
    assert isinstance(found, Tensor)
    assert [float(found[row, column]) for row in (127, 128) for column in (127, 128, 255, 256)] == [
        *(1, 2, 2, 3),
        *(4, 5, 5, 6),
    ]


class ScaledSharding(Sharding):
    """Its columns are those of the codes, or of their scales: there are `count` in all."""

    def columns(self, parameter: str, count: int) -> range:
        return range(self._columns.start * count // WIDTH, self._columns.stop * count // WIDTH)


def part(start: int, rows: int, group_size: int) -> tuple[WeightSource, ScaledMatrix]:
    scales = torch.arange(1.0, 1 + rows * -(-WIDTH // group_size)).view(rows, -1) + 100 * start
    source = WeightSource(name="x", parameter="p", row_start=start, num_rows=rows)
    return source, ScaledMatrix(codes(rows, WIDTH, start), scales, group_size)


def joined(
    parts: list[tuple[WeightSource, ScaledMatrix]], rows: list[range], columns: range, num_rows: int = 5
) -> ScaledMatrix | None:
    layer: Any = SimpleNamespace(rows=sum(map(len, rows)), columns=len(columns))
    sharding = cast("Any", ScaledSharding(rows, columns))
    return join_scaled(parts, layer, sharding, num_rows=num_rows, device=CPU)


def test_parts_lie_one_after_the_other_with_groups_that_fit_all() -> None:
    parts = [part(0, 2, 64), part(2, 3, WIDTH)]
    found = joined(parts, [range(5)], range(WIDTH))
    assert found is not None
    assert (found.group_size, found.codes.dtype, found.scales.shape) == (64, FP8, (5, 2))
    whole = torch.cat([matrix.dequantize() for _, matrix in parts])
    assert torch.equal(found.dequantize(), whole)


@pytest.mark.parametrize(
    ("rows", "columns", "group_size"),
    [
        ([range(1, 2), range(3, 5)], range(WIDTH), 64),
        ([range(5)], range(64, 128), 64),
        ([range(5)], range(32, 64), 32),
        ([range(2, 5)], range(96, 128), 32),
    ],
)
def test_a_rank_takes_its_rows_and_columns_in_groups_that_fit_both(
    rows: list[range], columns: range, group_size: int
) -> None:
    parts = [part(0, 2, 64), part(2, 3, WIDTH)]
    found = joined(parts, rows, columns)
    assert found is not None
    assert found.group_size == group_size
    whole = torch.cat([matrix.dequantize() for _, matrix in parts])
    wanted = torch.cat([whole[some.start : some.stop] for some in rows])[:, columns.start : columns.stop]
    assert torch.equal(found.dequantize(), wanted)


def test_groups_that_no_kernel_reads_and_bits_of_two_kinds_are_none() -> None:
    assert joined([part(0, 2, 48), part(2, 3, WIDTH)], [range(5)], range(WIDTH)) is None
    four = ScaledMatrix(torch.zeros(3, WIDTH // 2, dtype=torch.uint8), torch.zeros(3, 4, dtype=torch.uint8), 32)
    source = WeightSource(name="x", parameter="p", row_start=2, num_rows=3)
    assert joined([part(0, 2, 32), (source, four)], [range(5)], range(WIDTH)) is None
