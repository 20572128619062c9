"""Linear operations give the same, to the bit, however their inputs lie in memory."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from pagoda_kernels.linear.compressed_weight import compress_weight, compressed_embedding, compressed_linear
from pagoda_kernels.linear.packed_linear import pack_weight, packed_embedding, packed_linear
from pagoda_kernels.linear.quantized_linear import quantized_linear
from pagoda_kernels.linear.quantized_matrix import pack, quantize
from pagoda_kernels.native.library import load_native
from pagoda_kernels.selection import use_references

OPERATIONS = ("pack_weight", "packed_linear", "packed_embedding", "compressed_linear", "compressed_embedding")
OPERATIONS += ("quantized_linear",)
ROWS, OUTPUTS, INPUTS = 3, 70, 40
Layout = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(0)
    load_native()
    yield
    use_references(())


@pytest.fixture(params=["native", "reference"], autouse=True)
def each_path(request: pytest.FixtureRequest) -> None:
    """Once with what this machine has, once without."""
    if request.param == "reference":
        use_references(OPERATIONS)


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape).to(dtype)


def turned(tensor: Tensor) -> Tensor:
    """The same values, with neighbours in the last dimension apart."""
    return tensor.repeat_interleave(2, dim=-1)[..., ::2]


def cut(tensor: Tensor) -> Tensor:
    """The same values within longer rows."""
    return torch.cat((torch.full_like(tensor, torch.nan), tensor), dim=-1)[..., tensor.shape[-1] :]


def compressed_of(weight: Tensor) -> Tensor:
    found = compress_weight(weight)
    if found is None:
        pytest.skip("this CPU has no AVX2, or this machine no compiler")
    return found


def packed(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return packed_linear(x, pack_weight(weight), OUTPUTS, bias=bias, residual=residual)


def compressed(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return compressed_linear(x, compressed_of(weight), OUTPUTS, bias=bias, residual=residual)


def quantized(bits: int) -> Callable[..., Tensor]:
    def apply(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        return quantized_linear(x, pack(quantize(weight, bits=bits, group_size=20)), bias, residual)

    return apply


@pytest.mark.parametrize("layout", [turned, cut])
@pytest.mark.parametrize(
    ("linear", "dtype"),
    [
        (packed, torch.bfloat16),
        (packed, torch.float32),
        (compressed, torch.bfloat16),
        (quantized(4), torch.bfloat16),
        (quantized(8), torch.float32),
        (quantized(4), torch.float16),
    ],
    ids=["packed", "packed-float32", "compressed", "int4", "int8-float32", "int4-float16"],
)
def test_layouts_of_inputs_change_no_sum(linear: Callable[..., Tensor], dtype: torch.dtype, layout: Layout) -> None:
    given = {"x": drawn(ROWS, INPUTS, dtype=dtype), "weight": drawn(OUTPUTS, INPUTS, dtype=dtype)}
    given |= {"bias": drawn(OUTPUTS, dtype=dtype), "residual": drawn(ROWS, OUTPUTS, dtype=dtype)}
    expected = linear(**given)
    for name, tensor in given.items():
        assert torch.equal(linear(**given | {name: layout(tensor)}), expected), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_layouts_of_ids_change_no_row(dtype: torch.dtype) -> None:
    weight, ids = drawn(OUTPUTS, INPUTS, dtype=dtype), torch.randint(OUTPUTS, (9,))
    assert torch.equal(packed_embedding(turned(ids), pack_weight(weight), INPUTS), weight[ids])


def test_layouts_of_ids_change_no_compressed_row() -> None:
    weight, ids = drawn(OUTPUTS, INPUTS), torch.randint(OUTPUTS, (9,))
    assert torch.equal(compressed_embedding(turned(ids), compressed_of(weight), OUTPUTS, INPUTS), weight[ids])
