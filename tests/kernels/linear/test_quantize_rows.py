"""Rows that are quantized straight into a packed matrix are the numbers of the reference, to the bit."""

from collections.abc import Callable
from typing import TypeAlias

import pytest
import torch
from torch import Tensor

from pagoda_kernels.linear.quantize_rows import new_packed, quantize_rows, quantize_rows_reference
from pagoda_kernels.linear.quantized_matrix import PackedMatrix, pack, quantize
from pagoda_kernels.native.library import load_native, native

Fill: TypeAlias = Callable[..., None]

SCHEMES = [(8, 0), (8, 64), (4, 32), (4, 128), (4, 0)]
SHAPES = [(32, 64), (1, 4), (33, 20), (70, 300), (95, 1028)]


@pytest.fixture(autouse=True)
def library() -> None:
    assert load_native()
    assert native("quantize_rows") is not None


@pytest.fixture(params=["native", "reference"])
def fill(request: pytest.FixtureRequest) -> Fill:
    if request.param == "reference":
        return quantize_rows_reference
    return quantize_rows


def weight_of(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rows * columns)
    weight = torch.randn(rows, columns, generator=generator) * torch.rand(rows, 1, generator=generator).exp2()
    weight[0] = 0.0
    weight[-1, columns // 2 :] = weight[-1].abs().max() * 4  # one sign only
    weight[rows // 2, :2] = torch.tensor([4.0, -4.0])  # as far to both sides
    return weight.to(dtype)


def assert_same(actual: PackedMatrix, expected: PackedMatrix) -> None:
    assert torch.equal(actual.codes, expected.codes)
    assert torch.equal(actual.scales, expected.scales)
    assert actual.zeros is None
    assert (actual.bits, actual.num_outputs, actual.num_inputs) == (
        expected.bits,
        expected.num_outputs,
        expected.num_inputs,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize(("bits", "group_size"), SCHEMES)
def test_a_whole_matrix_is_that_of_the_reference(
    bits: int, group_size: int, rows: int, columns: int, dtype: torch.dtype
) -> None:
    weight, group_size = weight_of(rows, columns, dtype), group_size or columns
    packed = new_packed(rows, columns, bits=bits, group_size=group_size)
    quantize_rows(weight, packed, first_row=0)
    assert_same(packed, pack(quantize(weight, bits=bits, group_size=group_size)))


@pytest.mark.parametrize(("bits", "group_size"), SCHEMES)
def test_parts_make_the_same_matrix_in_any_order(bits: int, group_size: int, fill: Fill) -> None:
    """Parts end within tiles, and where two rows share bytes."""
    weight, group_size = weight_of(150, 64, torch.bfloat16), group_size or 64
    packed = new_packed(150, 64, bits=bits, group_size=group_size)
    for first, last in ((17, 90), (0, 17), (149, 150), (90, 149)):
        fill(weight[first:last], packed, first_row=first)
    assert_same(packed, pack(quantize(weight, bits=bits, group_size=group_size)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_may_lie_in_any_way_in_memory(dtype: torch.dtype) -> None:
    weight = weight_of(48, 96, torch.float32).to(dtype)
    expected = pack(quantize(weight, bits=8, group_size=96))
    for view in (weight.t().contiguous().t(), torch.cat([weight, weight], dim=1)[:, :96]):
        packed = new_packed(48, 96, bits=8, group_size=96)
        quantize_rows(view, packed, first_row=0)
        assert_same(packed, expected)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [64, 65, 128, 4096])
def test_a_group_that_is_longer_than_a_row_is_a_scale_for_each_output(bits: int, group_size: int, fill: Fill) -> None:
    weight = weight_of(40, 64, torch.float32)
    packed = new_packed(40, 64, bits=bits, group_size=group_size)
    assert packed.group_size == 64
    assert packed.scales.shape == (2, 1, 32)
    fill(weight, packed, first_row=0)
    assert_same(packed, pack(quantize(weight, bits=bits, group_size=64)))
    assert pack(quantize(weight, bits=bits, group_size=group_size)).group_size == 64


def test_rows_are_rounded_to_a_type_before() -> None:
    weight = weight_of(40, 64, torch.float32)
    packed = new_packed(40, 64, bits=8, group_size=64)
    quantize_rows(weight, packed, first_row=0, dtype=torch.bfloat16)
    assert_same(packed, pack(quantize(weight.bfloat16(), bits=8, group_size=64)))


def test_rows_that_do_not_fit_are_refused() -> None:
    packed = new_packed(40, 64, bits=8, group_size=64)
    for rows, first_row in ((torch.zeros(2, 60), 0), (torch.zeros(2, 64), 39), (torch.zeros(2, 64), -1)):
        with pytest.raises(ValueError, match="the matrix has 40 rows of 64"):
            quantize_rows(rows, packed, first_row=first_row)
