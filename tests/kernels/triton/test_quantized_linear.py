"""Products with int4 and int8 weights in Triton are those of the numbers, rounded once."""

import pytest
import torch
from torch import Tensor

from pagoda_kernels.linear.quantized_linear import quantized_linear, quantized_linear_reference
from pagoda_kernels.linear.quantized_matrix import quantize
from pagoda_kernels.linear.quantized_rows import look_up_rows, pack_rows, unpack_row_matrix
from pagoda_kernels.selection import triton_kernel, use_references
from tests.kernels.linear.test_quantized_linear import random_matrix
from tests.kernels.triton.outputs import nan_filled_outputs

NUM_ROWS = (0, 1, 15, 16, 17, 130)
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""Of one result: a unit in the last place, which the interpreter cuts off of bfloat16."""


def assert_close(actual: Tensor, expected: Tensor, x: Tensor, weights: Tensor) -> None:
    """To within the rounding of a result, and 1e-5 of the sum of all magnitudes."""
    bound = ROUNDING[actual.dtype] * expected.abs() + 1e-5 * (1 + x.double().abs() @ weights.double().abs().t())
    assert actual.shape == expected.shape
    assert bool(((actual.double() - expected).abs() <= bound).all())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("columns", [40, 128, 300])
def test_what_is_packed_comes_back(bits: int, columns: int) -> None:
    matrix = random_matrix(65, columns, bits=bits, group_size=32, has_zeros=True)
    matrix.numbers[0, :2] = torch.tensor([-(1 << (bits - 1)), (1 << (bits - 1)) - 1])
    packed = pack_rows(matrix)
    back = unpack_row_matrix(packed)
    assert torch.equal(back.numbers, matrix.numbers)
    assert torch.equal(back.dequantize(), matrix.dequantize())
    ids = torch.randint(0, 65, (200,))
    assert torch.equal(look_up_rows(packed, ids), matrix.dequantize()[ids])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("rows", "columns", "group_size"),
    [(1, 32, 32), (63, 96, 32), (130, 300, 64), (200, 384, 128), (65, 100, 100), (64, 520, 520), (70, 288, 96)],
)
@pytest.mark.parametrize("has_zeros", [False, True])
def test_products_are_those_of_the_numbers(
    bits: int, rows: int, columns: int, group_size: int, has_zeros: bool
) -> None:
    matrix = random_matrix(rows, columns, bits=bits, group_size=group_size, has_zeros=has_zeros)
    packed, weights = pack_rows(matrix), matrix.dequantize()
    for num_tokens in NUM_ROWS:
        x = torch.randn(num_tokens, columns).bfloat16()
        with nan_filled_outputs():
            actual = quantized_linear(x, packed)
        assert_close(actual, x.double() @ weights.double().t(), x, weights)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("num_tokens", [1, 17, 70])
@pytest.mark.parametrize("num_splits", [1, 2, 8])
def test_bias_and_residual_are_added_once_however_the_inputs_are_divided(
    dtype: torch.dtype, num_tokens: int, num_splits: int
) -> None:
    matrix = random_matrix(100, 400, bits=4, group_size=64, has_zeros=True)
    weights, packed = matrix.dequantize(), pack_rows(matrix)
    x, bias = torch.randn(num_tokens, 450).to(dtype)[:, 30:430], torch.randn(100).to(dtype)
    residual = torch.randn(num_tokens, 300).to(dtype)[:, 50:150]
    expected = x.double() @ weights.double().t() + bias.double() + residual.double()
    kernel = triton_kernel("quantized_linear", x)
    for out_dtype in (dtype, torch.float32):
        with nan_filled_outputs():
            actual = kernel(x, packed, bias, residual, out_dtype=out_dtype, num_splits=num_splits)
        assert actual.dtype == out_dtype
        assert_close(actual, expected, x, weights)


def test_more_dimensions_and_views_are_taken() -> None:
    matrix = random_matrix(50, 64, bits=8, group_size=64, has_zeros=False)
    weights = matrix.dequantize()
    x, residual = torch.randn(3, 64, 5).transpose(1, 2), torch.randn(3, 5, 50)
    actual = quantized_linear(x, pack_rows(matrix), None, residual)
    assert_close(
        actual.flatten(0, 1), (x.double() @ weights.double().t() + residual).flatten(0, 1), x.reshape(15, 64), weights
    )


def test_the_kernel_and_the_reference_agree_on_quantized_floats() -> None:
    packed = pack_rows(quantize(torch.randn(80, 256), bits=4, group_size=32))
    x = torch.randn(9, 256)
    actual = quantized_linear(x, packed)
    use_references(["quantized_linear"])
    try:
        expected = quantized_linear(x, packed)
    finally:
        use_references(())
    assert not torch.equal(actual, expected), "one of them is the kernel's"
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(expected, quantized_linear_reference(x, packed))


@pytest.mark.parametrize("references", [[], ["quantized_linear"]])
def test_a_wider_result_is_not_rounded_to_the_type_of_the_inputs(references: list[str]) -> None:
    packed, x = pack_rows(quantize(torch.randn(40, 64), bits=4, group_size=32)), torch.randn(3, 64).bfloat16()
    use_references(references)
    actual = quantized_linear(x, packed, out_dtype=torch.float32)
    assert actual.dtype == torch.float32
    expected = x.double() @ unpack_row_matrix(packed).dequantize().double().t()
    torch.testing.assert_close(actual.double(), expected, atol=1e-4, rtol=1e-4)


def test_a_nan_stays_in_its_row() -> None:
    x = torch.randn(20, 300)
    x[3, 299] = torch.nan
    actual = quantized_linear(x, pack_rows(random_matrix(50, 300, bits=4, group_size=32, has_zeros=False)))
    assert actual[3].isnan().all()
    assert not actual[torch.arange(20) != 3].isnan().any()


def test_groups_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="group_size is 48, must be a multiple of 32, or at least 96"):
        pack_rows(random_matrix(4, 96, bits=8, group_size=48, has_zeros=False))
