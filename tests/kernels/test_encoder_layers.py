"""The C++ kernels of encoders against their references, on ragged sizes."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pagoda_kernels.attention.sequence_attention import sequence_attention, sequence_attention_reference
from pagoda_kernels.layers.act_and_mul import ACTIVATIONS
from pagoda_kernels.layers.activate import activate, activate_reference
from pagoda_kernels.layers.layer_norm import layer_norm, layer_norm_reference
from pagoda_kernels.linear.packed_gelu_linear import packed_gelu_linear, packed_gelu_linear_reference
from pagoda_kernels.linear.packed_linear import pack_weight
from pagoda_kernels.native.library import load_native
from pagoda_kernels.selection import use_references

DTYPES = (torch.float32, torch.bfloat16)
TOLERANCES = {torch.float32: {"atol": 2e-6, "rtol": 1e-5}, torch.bfloat16: {"atol": 1e-3, "rtol": 0.016}}
LENGTHS = (1, 2, 17, 48, 49, 0, 100, 130, 3)
STARTS = [sum(LENGTHS[:place]) for place in range(len(LENGTHS) + 1)]


@pytest.fixture(autouse=True)
def with_kernels() -> Iterator[None]:
    torch.manual_seed(0)
    assert load_native()
    yield
    use_references(())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("has_slopes", [False, True])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "value_dim"),
    [(3, 3, 32, 32), (4, 2, 64, 64), (2, 1, 20, 12), (1, 1, 7, 65)],
)
def test_each_sequence_sees_itself_alone(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    value_dim: int,
    has_slopes: bool,
    is_causal: bool,
    dtype: torch.dtype,
) -> None:
    query = torch.randn(STARTS[-1], num_heads, head_dim).to(dtype)
    key = torch.randn(STARTS[-1], num_kv_heads, head_dim).to(dtype)
    value = torch.randn(STARTS[-1], num_kv_heads, value_dim).to(dtype)
    slopes = torch.rand(num_heads) if has_slopes else None
    options: dict[str, Any] = {"scale": head_dim**-0.5, "is_causal": is_causal, "slopes": slopes}
    made = sequence_attention(query, key, value, STARTS, **options)
    wanted = sequence_attention_reference(query.double(), key.double(), value.double(), STARTS, **options).to(dtype)
    if dtype == torch.float32:
        torch.testing.assert_close(made, wanted, **TOLERANCES[dtype])
    else:  # weights are rounded before values are summed up, and sums once more
        sizes = sequence_attention_reference(query.double(), key.double(), value.double().abs(), STARTS, **options)
        assert bool(((made.double() - wanted.double()).abs() <= 2**-8 * (sizes + wanted.double().abs())).all())
    alone = sequence_attention(
        query[STARTS[6] : STARTS[7]], key[STARTS[6] : STARTS[7]], value[STARTS[6] : STARTS[7]], [0, 100], **options
    )
    assert torch.equal(alone, made[STARTS[6] : STARTS[7]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_may_lie_in_any_order(dtype: torch.dtype) -> None:
    """As transformers' modules give them: [heads, tokens, size] of one projection of all three."""
    qkv = torch.randn(STARTS[-1], 3, 4, 32).to(dtype)
    query, key, value = (qkv[:, place].transpose(0, 1).transpose(0, 1) for place in range(3))
    made = sequence_attention(query, key, value, STARTS, scale=0.2)
    wanted = sequence_attention(*(one.contiguous() for one in (query, key, value)), STARTS, scale=0.2)
    assert torch.equal(made, wanted)


def test_large_scores_do_not_overflow() -> None:
    query = torch.randn(20, 2, 32) * 100
    made = sequence_attention(query, query, query, [0, 20], scale=1.0)
    torch.testing.assert_close(made, sequence_attention_reference(query, query, query, [0, 20], scale=1.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activate(activation: str, dtype: torch.dtype) -> None:
    for size in (0, 1, 7, 33, 20_000):
        x = (torch.randn(size) * 4).to(dtype)
        wanted = activate_reference(x.double(), activation).to(dtype)
        torch.testing.assert_close(activate(x, activation), wanted, **TOLERANCES[dtype])
    ends = torch.tensor([0.0, -0.0, 30.0, -30.0, 200.0, -200.0, 1e30, torch.nan]).to(dtype)
    torch.testing.assert_close(
        activate(ends, activation), activate_reference(ends, activation), equal_nan=True, **TOLERANCES[dtype]
    )


def test_the_tail_of_gelu_is_exact_to_the_last_place() -> None:
    """In bfloat16: below zero results are small, and as exact as others for all that."""
    x = torch.linspace(-12, 6, 20_001).bfloat16()
    wanted = x.double() / 2 * torch.special.erfc(-x.double() / 2**0.5)
    error = (activate(x, "gelu").double() - wanted).abs() / wanted.abs().clamp(min=1e-30)
    assert float(error.max()) <= 2**-8


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("size", [1, 7, 16, 33, 384, 1000])
def test_layer_norm(size: int, has_bias: bool, dtype: torch.dtype) -> None:
    for shape in ((0, size), (1, size), (3, 37, size)):
        x = (torch.randn(shape) * 3 + 5).to(dtype)
        weight, bias = torch.randn(size).to(dtype), torch.randn(size).to(dtype) if has_bias else None
        made = layer_norm(x, weight, bias, 1e-12)
        wanted = layer_norm_reference(x.double(), weight.double(), None if bias is None else bias.double(), 1e-12)
        torch.testing.assert_close(made, wanted.to(dtype), **TOLERANCES[dtype] | {"atol": 2e-5 if size > 1 else 1e-3})


@pytest.mark.parametrize("size", [1, 7, 33])
def test_eps_of_layer_norm_counts(size: int) -> None:
    x, weight, bias = 0.1 * torch.randn(9, size), torch.randn(size), torch.randn(size)
    torch.testing.assert_close(layer_norm(x, weight, bias, 0.5), layer_norm_reference(x, weight, bias, 0.5))


def test_weights_of_another_data_type_go_to_the_reference() -> None:
    x, weight = torch.randn(3, 20).bfloat16(), torch.randn(20)
    assert torch.equal(layer_norm(x, weight, None, 1e-5), layer_norm_reference(x, weight, None, 1e-5))


@pytest.mark.parametrize("num_rows", [0, 1, 5, 33, 300])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 48), (70, 34), (20, 7)])
def test_gelu_after_a_product(outputs: int, inputs: int, num_rows: int) -> None:
    x, weight = torch.randn(num_rows, inputs).bfloat16(), torch.randn(outputs, inputs).bfloat16()
    packed = pack_weight(weight)
    for bias in (None, torch.randn(outputs).bfloat16()):
        made = packed_gelu_linear(x, packed, outputs, bias=bias)
        wanted = packed_gelu_linear_reference(x, packed, outputs, bias=bias)
        torch.testing.assert_close(made, wanted, atol=2e-3, rtol=0.016)
