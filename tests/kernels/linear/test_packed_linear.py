"""Linear layers with packed weights against float64, on ragged sizes."""

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from pagoda_kernels.linear.packed_linear import (
    pack_weight,
    packed_embedding,
    packed_linear,
    packed_linear_reference,
    unpack_weight,
)
from pagoda_kernels.native.library import load_native, native
from pagoda_kernels.selection import use_references

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(0)
    load_native()
    yield
    use_references(())


@pytest.fixture
def kernel() -> Callable[..., None]:
    """The C++ function."""
    found: Callable[..., None] | None = native("packed_linear")
    if found is None:
        pytest.skip("this CPU has no AVX512-BF16, or this machine no compiler")
    return found


@pytest.fixture(params=["native", "reference"])
def each_path(request: pytest.FixtureRequest) -> None:
    """Once with what this machine has, once without."""
    if request.param == "reference":
        use_references(["pack_weight", "packed_embedding", "packed_linear"])


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape).to(BF16)


@pytest.mark.parametrize("rows", [1, 15, 33, 300])
@pytest.mark.parametrize("columns", [1, 2, 15, 33, 300])
@pytest.mark.usefixtures("each_path")
def test_packing_and_back(rows: int, columns: int) -> None:
    weight = drawn(rows, columns)
    packed = pack_weight(weight)
    assert packed.shape == (-(-rows // 32), -(-columns // 2), 32, 2)
    assert int(packed.count_nonzero()) <= weight.numel(), "padding is zero"
    assert torch.equal(unpack_weight(packed, rows, columns), weight)
    ids = torch.randint(rows, (40,))
    assert torch.equal(packed_embedding(ids, packed, columns), weight[ids])
    assert pack_weight(weight.to("meta")).shape == packed.shape


@pytest.mark.parametrize("num_tokens", [0, 1, 15, 17, 33, 300, 1000])
@pytest.mark.parametrize("in_features", [1, 15, 17, 33, 300, 1000])
def test_packed_linear(num_tokens: int, in_features: int) -> None:
    for out_features in (1, 33, 300) if in_features != 33 else (15, 17, 1000):
        compare(num_tokens, in_features, out_features)


def test_the_reference() -> None:
    use_references(["packed_linear"])
    compare(17, 33, 65)


def compare(num_tokens: int, in_features: int, out_features: int) -> None:
    """With and without bias and residual, against float64."""
    x, weight = drawn(num_tokens, in_features), drawn(out_features, in_features)
    bias, residual = drawn(out_features), drawn(num_tokens, out_features)
    packed, product = pack_weight(weight), x.double() @ weight.double().t()
    magnitude = x.double().abs() @ weight.double().abs().t() + 4
    for b, r in itertools.product((None, bias), (None, residual)):
        expected = product + (0 if b is None else b.double()) + (0 if r is None else r.double())
        actual = packed_linear(x, packed, out_features, bias=b, residual=r, out_dtype=torch.float32)
        # Sums of float32 in some order: an error of 2^-24 of what was added up, for each step.
        assert actual.shape == expected.shape
        assert not actual.isnan().any()
        assert ((actual - expected).abs() <= 1e-6 * magnitude).all()
        rounded = packed_linear(x, packed, out_features, bias=b, residual=r)
        assert rounded.dtype == BF16
        assert torch.equal(rounded, actual.to(BF16)), "rounded once"


def test_nothing_else_is_written(kernel: Callable[..., None]) -> None:
    """Into the middle of a larger tensor."""
    for num_tokens, out_features in itertools.product((1, 3, 14, 15, 40), (1, 31, 32, 33, 65)):
        x, weight = drawn(num_tokens, 34), drawn(out_features, 34)
        room = torch.full((num_tokens + 2, out_features), torch.nan, dtype=BF16)
        kernel(x, pack_weight(weight), None, None, room[1:-1])
        assert room[0].isnan().all()
        assert room[-1].isnan().all()
        assert not room[1:-1].isnan().any()


def test_rows_may_be_strided() -> None:
    wide, weight, other = drawn(17, 100), drawn(70, 40), drawn(17, 200)
    x, residual = wide[:, 30:70], other[:, 60:130]
    expected = packed_linear(x.contiguous(), pack_weight(weight), 70, residual=residual.contiguous())
    assert torch.equal(packed_linear(x, pack_weight(weight), 70, residual=residual), expected)
    turned = x.t().contiguous().t()
    assert torch.equal(packed_linear(turned, pack_weight(weight), 70, residual=residual), expected)


@pytest.mark.parametrize("in_features", [34, 768, 2048])
@pytest.mark.usefixtures("kernel")
def test_a_row_does_not_depend_on_the_others(in_features: int) -> None:
    out_features = 100
    x, packed = drawn(300, in_features), pack_weight(drawn(out_features, in_features))
    bias, residual = drawn(out_features), drawn(300, out_features)

    def rows(begin: int, end: int) -> Tensor:
        return packed_linear(
            x[begin:end], packed, out_features, bias=bias, residual=residual[begin:end], out_dtype=torch.float32
        )

    alone = torch.cat([rows(row, row + 1) for row in range(300)])
    for num_tokens in (*range(2, 60), 127, 128, 129, 299, 300):
        assert torch.equal(rows(0, num_tokens), alone[:num_tokens]), num_tokens
        assert torch.equal(rows(300 - num_tokens, 300), alone[300 - num_tokens :]), num_tokens


@pytest.mark.parametrize("num_tokens", [50, 700], ids=["one block", "blocks of their own"])
@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.usefixtures("kernel")
def test_a_result_does_not_depend_on_the_threads(num_threads: int, num_tokens: int) -> None:
    x, packed = drawn(num_tokens, 512), pack_weight(drawn(1000, 512))
    expected = torch.cat([packed_linear(row, packed, 1000, out_dtype=torch.float32) for row in x.split(1)])
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(num_threads)
        assert torch.equal(packed_linear(x, packed, 1000, out_dtype=torch.float32), expected)
    finally:
        torch.set_num_threads(before)


def test_what_is_not_finite_stays_in_its_row() -> None:
    x, packed = drawn(20, 64), pack_weight(drawn(40, 64))
    x[3, 5], x[4, 6] = torch.nan, torch.inf
    actual = packed_linear(x, packed, 40)
    assert actual[3].isnan().all()
    assert not actual[4].isfinite().any()
    assert actual[[row for row in range(20) if row not in (3, 4)]].isfinite().all()


def test_other_data_types_take_the_reference() -> None:
    x, weight = torch.randn(3, 20), torch.randn(7, 20)
    torch.testing.assert_close(packed_linear(x, pack_weight(weight), 7), x @ weight.t())
    half = packed_linear(x.half(), pack_weight(weight.half()), 7)
    assert half.dtype == torch.float16
    assert torch.equal(half, packed_linear_reference(x.half(), pack_weight(weight.half()), 7))


@pytest.mark.usefixtures("each_path")
def test_rows_that_are_not_there_are_refused() -> None:
    packed = pack_weight(drawn(40, 20))
    for wrong in (-1, 64):
        with pytest.raises(IndexError, match="must be from 0 to 63"):
            packed_embedding(torch.tensor([3, wrong]), packed, 20)


def test_shapes_that_do_not_fit_are_refused() -> None:
    x, packed = drawn(3, 20), pack_weight(drawn(40, 20))
    for wrong in (drawn(3, 18), drawn(20)):
        with pytest.raises(ValueError, match="x has shape"):
            packed_linear(wrong, packed, 40)
    with pytest.raises(ValueError, match="for 65 out_features"):
        packed_linear(x, packed, 65)
    with pytest.raises(ValueError, match="bias has shape"):
        packed_linear(x, packed, 40, bias=drawn(39))
    with pytest.raises(ValueError, match="residual has shape"):
        packed_linear(x, packed, 40, residual=drawn(2, 40))
    with pytest.raises(ValueError, match="residual is"):
        packed_linear(x, packed, 40, residual=torch.randn(3, 40))
    with pytest.raises(ValueError, match=r"packed is torch\.bfloat16 on cpu, must be torch\.float32"):
        packed_linear(x.float(), packed, 40)
