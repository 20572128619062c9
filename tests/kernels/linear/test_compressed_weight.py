"""Weights in 12 bits a number: the same numbers again, and the same products to the bit."""

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from pagoda_kernels.linear.compressed_weight import (
    NUMBERS_OF_OUTLIER,
    CompressedRows,
    compress_weight,
    compressed_bytes,
    compressed_embedding,
    compressed_linear,
    decompress_weight,
)
from pagoda_kernels.linear.packed_linear import pack_weight, packed_linear, unpack_weight
from pagoda_kernels.native.library import load_native, native
from pagoda_kernels.selection import use_references

BF16 = torch.bfloat16

load_native()
pytestmark = pytest.mark.skipif(native("compressed_linear") is None, reason="no AVX-512 BF16, or no compiler")


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    use_references(())


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int16)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape).to(BF16)


def compressed(weight: Tensor) -> Tensor:
    found = compress_weight(weight)
    assert found is not None
    assert found.shape == (compressed_bytes(*weight.shape),)
    return found


@pytest.mark.parametrize("rows", [16, 32, 33, 300])
@pytest.mark.parametrize("columns", [30, 32, 34, 300, 1024])
def test_compression_and_back(rows: int, columns: int) -> None:
    weight = drawn(rows, columns)
    if rows * columns >= 20 * NUMBERS_OF_OUTLIER:
        # Zeros of both signs, the least number there is, tiny ones beside a large one: all stay what they are.
        weight[0, :6] = torch.tensor([0.0, -0.0, 2.0**-133, -(2.0**-133), 2.0**-40, 1.2e-38]).to(BF16)
        weight[rows - 1, columns - 2 :] = torch.tensor([1.5e-5, -100.0]).to(BF16)
    held = compressed(weight)
    packed = decompress_weight(held, rows, columns)
    assert torch.equal(bits(packed), bits(pack_weight(weight)))
    ids = torch.randint(rows, (40,))
    expected = bits(weight[ids])
    assert torch.equal(bits(compressed_embedding(ids, held, rows, columns)), expected)
    use_references(["compressed_embedding"])
    assert torch.equal(bits(compressed_embedding(ids, held, rows, columns)), expected)
    meta = compress_weight(weight.to("meta"))
    assert meta is not None
    assert meta.shape == held.shape


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan, 3e38])
def test_a_number_of_another_size_costs_its_neighbours_their_codes(value: float) -> None:
    weight = drawn(1024, 1024)
    weight[100, 200] = value
    assert compress_weight(drawn(32, 512).index_fill(1, torch.tensor([5]), value)) is None, "too many"
    held = compress_weight(weight)
    assert held is not None, "one unit of 1,024 has no codes, there is room for four"
    assert torch.equal(bits(unpack_weight(decompress_weight(held, 1024, 1024), 1024, 1024)), bits(weight))


@pytest.mark.parametrize("num_tokens", [0, 1, 15, 17, 32, 33, 70, 300, 1000, 1600])
@pytest.mark.parametrize("in_features", [30, 32, 300, 1000, 1024])
def test_products_are_those_of_the_packed_weight(num_tokens: int, in_features: int) -> None:
    for out_features in (33, 256):
        x, weight = drawn(num_tokens, in_features), drawn(out_features, in_features)
        bias, residual = drawn(out_features), drawn(num_tokens, out_features)
        held, packed = compressed(weight), pack_weight(weight)
        for b, r in itertools.product((None, bias), (None, residual)):
            for dtype in (torch.float32, BF16):
                expected = packed_linear(x, packed, out_features, bias=b, residual=r, out_dtype=dtype)
                actual = compressed_linear(x, held, out_features, bias=b, residual=r, out_dtype=dtype)
                assert torch.equal(actual, expected)


def test_the_reference() -> None:
    x, weight, bias = drawn(17, 64), drawn(70, 64), drawn(70)
    held = compressed(weight)
    expected = compressed_linear(x, held, 70, bias=bias, out_dtype=torch.float32)
    use_references(["compressed_linear"])
    torch.testing.assert_close(compressed_linear(x, held, 70, bias=bias, out_dtype=torch.float32), expected)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("num_tokens", [1, 50, 700, 1600])
def test_a_result_does_not_depend_on_the_threads(num_threads: int, num_tokens: int) -> None:
    x, weight = drawn(num_tokens, 512), drawn(1000, 512)
    held = compressed(weight)
    expected = packed_linear(x, pack_weight(weight), 1000)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(num_threads)
        assert torch.equal(bits(decompress_weight(compressed(weight), 1000, 512)), bits(pack_weight(weight)))
        assert torch.equal(compressed_linear(x, held, 1000), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("rows", "columns"), [(300, 300), (128, 64), (1000, 1024)])
def test_rows_may_come_in_any_order_and_of_any_threads(rows: int, columns: int) -> None:
    weight = drawn(rows, columns)
    weight[::7, 3] = 1e-8  # numbers without a code, in every part
    expected = compressed(weight)
    for size in (32, 96, 1024):
        out = torch.full_like(expected, 0xA5)
        parts = CompressedRows(out, rows, columns)
        with ThreadPoolExecutor(3) as threads:
            for first in reversed(range(0, rows, size)):
                threads.submit(parts.add, weight[first : first + size], first)
        assert parts.finish()
        num_outliers = int(out[: -(rows * columns // NUMBERS_OF_OUTLIER * 4)][-4:].view(torch.int32))
        end = out.numel() - (rows * columns // NUMBERS_OF_OUTLIER - num_outliers) * 4
        assert num_outliers >= rows // 7
        assert torch.equal(out[:end], expected[:end])


@pytest.mark.parametrize(("num_tiny", "fits"), [(0, True), (15, True), (16, True), (17, False)])
def test_there_is_room_for_one_number_of_256_without_a_code(num_tiny: int, fits: bool) -> None:
    """64 * 64 numbers; those without a code are of the first rows."""
    weight = torch.ones(64, 64, dtype=BF16)
    weight[0, :num_tiny] = 1e-8
    held = compress_weight(weight)
    assert (held is not None) is fits
    for size in (32, 64):
        out = torch.empty(compressed_bytes(64, 64), dtype=torch.uint8)
        parts = CompressedRows(out, 64, 64)
        for first in range(0, 64, size):
            parts.add(weight[first : first + size], first)
        assert parts.finish() is fits
        if fits:
            assert torch.equal(unpack_weight(decompress_weight(out, 64, 64), 64, 64), weight)


def test_rows_of_too_many_sizes_do_not_fit() -> None:
    hopeless = drawn(64, 256).index_fill(1, torch.tensor([5]), torch.inf)
    out = torch.empty(compressed_bytes(1024, 256), dtype=torch.uint8)
    parts = CompressedRows(out, 1024, 256)
    for first in range(0, 1024, 64):
        parts.add(hopeless, first)
    assert not parts.finish()


@pytest.mark.parametrize(("shape", "first_row"), [((32, 62), 0), ((32, 64), 16), ((40, 64), 0), ((32, 64), 96)])
def test_rows_that_are_no_panels_of_the_matrix_are_refused(shape: tuple[int, int], first_row: int) -> None:
    parts = CompressedRows(torch.empty(compressed_bytes(100, 64), dtype=torch.uint8), 100, 64)
    with pytest.raises(ValueError, match=r"must be whole panels of 32 rows of a matrix of 100 rows of 64"):
        parts.add(drawn(*shape), first_row)


def test_what_has_no_kernel_is_not_compressed() -> None:
    assert compress_weight(torch.randn(64, 64)) is None
    assert compress_weight(drawn(64, 63)) is None
    use_references(["compress_weight"])
    assert compress_weight(drawn(64, 64)) is None


def test_what_does_not_fit_is_refused() -> None:
    x, held = drawn(3, 20), compressed(drawn(40, 20))
    for wrong in (drawn(3, 19), drawn(20)):
        with pytest.raises(ValueError, match="x has shape"):
            compressed_linear(wrong, held, 40)
    for other in (held[:-1], held.view(torch.int32)):
        with pytest.raises(ValueError, match="for 40 out_features"):
            compressed_linear(x, other, 40)
    with pytest.raises(ValueError, match="bias has shape"):
        compressed_linear(x, held, 40, bias=drawn(39))
    with pytest.raises(ValueError, match="residual has shape"):
        compressed_linear(x, held, 40, residual=drawn(2, 40))
    for wrong_id in (-1, 40):
        with pytest.raises(IndexError, match="must be from 0 to 39"):
            compressed_embedding(torch.tensor([3, wrong_id]), held, 40, 20)
