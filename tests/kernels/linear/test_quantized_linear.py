"""Matrices of int4 and int8: quantized, packed, multiplied with, against plain arithmetic."""

import dataclasses

import pytest
import torch
from torch import Tensor

from pagoda_kernels.linear.quantized_linear import (
    multiplies_integers,
    quantize_inputs,
    quantized_linear,
    quantized_linear_reference,
)
from pagoda_kernels.linear.quantized_matrix import QuantizedMatrix, pack, quantize, unpack, unpack_rows
from pagoda_kernels.native.library import load_native, native
from pagoda_kernels.selection import use_references


@pytest.fixture(autouse=True, params=["native", "reference"])
def kernel(request: pytest.FixtureRequest) -> object:
    torch.manual_seed(0)
    assert load_native()
    assert native("quantized_linear") is not None
    use_references(["quantized_linear"] if request.param == "reference" else [])
    yield request.param
    use_references(())


def random_matrix(rows: int, columns: int, *, bits: int, group_size: int, has_zeros: bool) -> QuantizedMatrix:
    half, groups = 1 << (bits - 1), -(-columns // group_size)
    return QuantizedMatrix(
        numbers=torch.randint(-half, half, (rows, columns)).to(torch.int8),
        scales=torch.randn(rows, groups) / half,
        zeros=torch.randint(-half, half + 1, (rows, groups)).float() if has_zeros else None,
        bits=bits,
        group_size=group_size,
    )


def assert_close(actual: Tensor, expected: Tensor, weights: Tensor, x: Tensor) -> None:
    """To within the data type's rounding of the result, and float32's of the sum of all magnitudes."""
    bound = 4e-3 * expected.abs() if actual.dtype == torch.bfloat16 else 0.0
    bound = bound + 1e-5 * (1 + x.double().abs() @ weights.double().abs().t())
    assert actual.shape == expected.shape
    assert bool(((actual.double() - expected).abs() <= bound).all())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 63, 64, 65, 200])
def test_what_is_packed_comes_back(bits: int, rows: int) -> None:
    matrix = random_matrix(rows, 40, bits=bits, group_size=16, has_zeros=True)
    matrix.numbers[0, :2] = torch.tensor([-(1 << (bits - 1)), (1 << (bits - 1)) - 1])
    back = unpack(pack(matrix))
    assert torch.equal(back.numbers, matrix.numbers)
    assert torch.equal(back.scales, matrix.scales)
    assert back.zeros is not None
    assert matrix.zeros is not None
    assert torch.equal(back.zeros, matrix.zeros)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("has_zeros", [False, True])
def test_rows_can_be_looked_up(bits: int, has_zeros: bool) -> None:
    matrix = random_matrix(200, 40, bits=bits, group_size=16, has_zeros=has_zeros)
    matrix.numbers[:, 0] = -(1 << (bits - 1))
    ids = torch.randint(0, 200, (500,))
    assert torch.equal(unpack_rows(pack(matrix), ids), matrix.dequantize()[ids])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("rows", "columns", "group_size"),
    [
        (1, 4, 4),
        (63, 64, 64),
        (64, 96, 32),
        (65, 300, 128),
        (130, 256, 256),
        (200, 384, 384),
        (70, 200, 200),
        (64, 320, 64),
    ],
)
@pytest.mark.parametrize("has_zeros", [False, True])
def test_products_are_those_of_the_numbers(
    dtype: torch.dtype, bits: int, rows: int, columns: int, group_size: int, has_zeros: bool
) -> None:
    matrix = random_matrix(rows, columns, bits=bits, group_size=group_size, has_zeros=has_zeros)
    packed, weights = pack(matrix), matrix.dequantize()
    for num_tokens in (0, 1, 5, 6, 7, 200):
        x = torch.randn(num_tokens, columns).to(dtype)
        assert_close(quantized_linear(x, packed), x.double() @ weights.double().t(), weights, x)


@pytest.mark.parametrize("num_tokens", [9, 200, 400])
def test_each_token_has_a_residual_of_its_own(num_tokens: int) -> None:
    matrix = random_matrix(40, 64, bits=8, group_size=32, has_zeros=True)
    weights = matrix.dequantize()
    for dtype in (torch.float32, torch.bfloat16):
        x, residual = torch.randn(num_tokens, 64).to(dtype), 10 * torch.randn(num_tokens, 40).to(dtype)
        expected = x.double() @ weights.double().t() + residual.double()
        assert_close(quantized_linear(x, pack(matrix), None, residual, out_dtype=torch.float32), expected, weights, x)


def test_bias_and_residual_are_added_before_the_only_rounding() -> None:
    matrix = random_matrix(100, 128, bits=4, group_size=32, has_zeros=False)
    weights = matrix.dequantize()
    x, bias = torch.randn(9, 128).bfloat16(), torch.randn(100).bfloat16()
    residual = torch.randn(9, 300).bfloat16()[:, 50:150]  # a view
    expected = x.double() @ weights.double().t() + bias.double() + residual.double()
    for out_dtype in (torch.bfloat16, torch.float32):
        out = quantized_linear(x, pack(matrix), bias, residual, out_dtype=out_dtype)
        assert out.dtype == out_dtype
        assert_close(out, expected, weights, x)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("rows", "columns", "group_size"), [(1, 4, 4), (65, 300, 128), (130, 256, 256), (70, 200, 200), (64, 320, 36)]
)
@pytest.mark.parametrize("has_zeros", [False, True])
def test_quantized_inputs_are_those_of_the_reference(
    kernel: str, bits: int, rows: int, columns: int, group_size: int, has_zeros: bool
) -> None:
    if kernel == "native" and not multiplies_integers():
        pytest.skip("this CPU's kernel leaves them as they are")
    matrix = random_matrix(rows, columns, bits=bits, group_size=group_size, has_zeros=has_zeros)
    packed, weights = pack(matrix, quantizes_inputs=True), matrix.dequantize()
    for num_tokens in (0, 1, 2, 5, 14, 15, 200):
        x = torch.randn(num_tokens, columns).bfloat16() * torch.logspace(-3, 2, num_tokens).bfloat16()[:, None]
        x[:1, : columns // 2] = 0
        seen = quantize_inputs(x, min(group_size, 128))
        assert bool(((seen - x).abs() <= x.abs().amax(dim=1, keepdim=True) * 0.504 / 127).all())
        out = quantized_linear(x, packed, out_dtype=torch.float32)
        assert_close(out, seen.double() @ weights.double().t(), weights, seen)
    wide = torch.randn(3, columns)
    assert torch.equal(quantized_linear(wide, packed), quantized_linear(wide, pack(matrix)))


def test_inputs_of_8_bits_lose_nothing_where_8_bits_hold_them() -> None:
    numbers = torch.randint(-127, 128, (3, 256)).float()
    numbers[:, ::32] = 127
    assert torch.equal(quantize_inputs(numbers, 32), numbers)
    assert torch.equal(quantize_inputs(torch.full((1, 8), 1e-38), 8), torch.zeros(1, 8))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_reaches_the_sums(value: float) -> None:
    matrix = random_matrix(40, 256, bits=8, group_size=256, has_zeros=False)
    x = torch.randn(4, 256).bfloat16()
    x[2, 200] = value
    out = quantized_linear(x, pack(matrix, quantizes_inputs=True))
    assert bool(out[[0, 1, 3]].isfinite().all())
    assert not bool(out[2].isfinite().any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("quantizes_inputs", [False, True])
def test_a_row_does_not_depend_on_its_neighbours(
    kernel: str, dtype: torch.dtype, bits: int, quantizes_inputs: bool
) -> None:
    if kernel == "reference":
        pytest.skip("PyTorch's sums depend on the number of rows")
    matrix = random_matrix(150, 300, bits=bits, group_size=128, has_zeros=True)
    packed = pack(matrix, quantizes_inputs=quantizes_inputs)
    x = torch.randn(400, 300).to(dtype)
    together = quantized_linear(x, packed)
    for start, stop in ((0, 1), (3, 7), (10, 16), (20, 33), (100, 320)):
        assert torch.equal(quantized_linear(x[start:stop], packed), together[start:stop])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [32, 64, 100, 128, 400])
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("quantizes_inputs", [False, True])
def test_a_row_does_not_depend_on_how_many_there_are(
    kernel: str, bits: int, group_size: int, has_zeros: bool, quantizes_inputs: bool
) -> None:
    if kernel == "reference":
        pytest.skip("PyTorch's sums depend on the number of rows")
    matrix = random_matrix(72, 400, bits=bits, group_size=group_size, has_zeros=has_zeros)
    packed = pack(matrix, quantizes_inputs=quantizes_inputs)
    x = torch.randn(600, 400).bfloat16()
    x[0, 150] = float("inf")
    together = quantized_linear(x, packed, out_dtype=torch.float32).view(torch.int32)
    for num_rows in (1, 2, 4, 5, 14, 15, 16, 17, 31, 32, 33, 64, 65, 100):
        out = quantized_linear(x[:num_rows], packed, out_dtype=torch.float32)
        assert torch.equal(out.view(torch.int32), together[:num_rows])


def test_other_data_types_are_computed_as_well() -> None:
    matrix = random_matrix(10, 64, bits=8, group_size=64, has_zeros=False)
    x, bias, residual = torch.randn(3, 64).half(), torch.randn(10).half(), torch.randn(3, 10).half()
    for out_dtype in (None, torch.float16, torch.float32):
        out = quantized_linear(x, pack(matrix), bias, residual, out_dtype=out_dtype)
        assert out.dtype == (out_dtype or torch.float16)
        torch.testing.assert_close(
            out, quantized_linear_reference(x, pack(matrix), bias, residual, out_dtype=out_dtype)
        )


def test_a_group_that_does_not_divide_into_parts_is_computed_as_well() -> None:
    matrix = random_matrix(10, 320, bits=8, group_size=160, has_zeros=False)
    x = torch.randn(3, 320)
    assert_close(
        quantized_linear(x, pack(matrix)), x.double() @ matrix.dequantize().double().t(), matrix.dequantize(), x
    )


@pytest.mark.parametrize(("bits", "bound"), [(8, 0.5 / 127), (4, 0.14 + 0.11)])
@pytest.mark.parametrize("group_size", [32, 128, 1000])
def test_quantizing_errs_by_no_more_than_a_step(bits: int, bound: float, group_size: int) -> None:
    weight = torch.randn(70, 200)
    matrix = quantize(weight, bits=bits, group_size=group_size)
    assert matrix.scales.shape == (70, -(-200 // group_size))
    for start in range(0, 200, group_size):
        part = weight[:, start : start + group_size]
        error = (matrix.dequantize()[:, start : start + group_size] - part).abs().amax(dim=1)
        assert bool((error <= part.abs().amax(dim=1) * bound * 1.001).all())


def test_zeros_stay_zeros_and_quantizing_again_changes_nothing() -> None:
    assert bool((quantize(torch.zeros(3, 8), bits=4, group_size=4).dequantize() == 0).all())
    once = quantize(torch.randn(64, 128), bits=8, group_size=32).dequantize()
    torch.testing.assert_close(quantize(once, bits=8, group_size=32).dequantize(), once)


def test_what_does_not_fit_is_named() -> None:
    matrix = random_matrix(4, 8, bits=8, group_size=8, has_zeros=False)
    with pytest.raises(ValueError, match="x has 5 columns, the weights have 8 inputs"):
        quantized_linear(torch.randn(1, 5), pack(matrix))
    with pytest.raises(ValueError, match=r"bias is torch\.bfloat16, must be torch\.float32 as x"):
        quantized_linear(torch.randn(1, 8), pack(matrix), torch.zeros(4).bfloat16())
    with pytest.raises(ValueError, match=r"residual is torch\.float16, must be torch\.float32 as x"):
        quantized_linear(torch.randn(1, 8), pack(matrix), residual=torch.zeros(1, 4).half())
    with pytest.raises(ValueError, match=r"out_dtype is torch\.float16, must be torch\.bfloat16 or torch\.float32"):
        quantized_linear(torch.randn(1, 8).bfloat16(), pack(matrix), out_dtype=torch.float16)
    with pytest.raises(ValueError, match="8 inputs in groups of 6: both must be multiples of 4"):
        pack(dataclasses.replace(matrix, group_size=6))
