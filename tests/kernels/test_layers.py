"""Norm, rotation, gate and cache writes against loops, on ragged sizes."""

import math

import pytest
import torch
from torch import Tensor

from pagoda_kernels.attention.copy_blocks import copy_blocks
from pagoda_kernels.attention.rotary_embedding import rotary_embedding
from pagoda_kernels.attention.store_kv_cache import store_kv_cache
from pagoda_kernels.layers.act_and_mul import act_and_mul
from pagoda_kernels.layers.rms_norm import rms_norm

SIZES = (0, 1, 15, 16, 17, 63, 64, 65, 300)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("num_tokens", SIZES)
@pytest.mark.parametrize("dim", [1, 60, 65, 128])
def test_rms_norm(num_tokens: int, dim: int) -> None:
    x, weight = torch.randn(num_tokens, dim), torch.randn(dim)
    expected = torch.stack(
        [row / math.sqrt(float((row.double() ** 2).mean()) + 1e-5) * weight for row in x] or [torch.zeros(dim)]
    )[:num_tokens]
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), expected)


def test_rms_norm_of_16_bit_rows_is_computed_in_float32() -> None:
    x, weight = torch.full((1, 512), 200.0, dtype=torch.float16), torch.ones(512, dtype=torch.float16)
    assert rms_norm(x, weight, 1e-6)[0, 0] == 1.0  # 200 squared and summed overflows float16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_with_weights_stored_less_one(dtype: torch.dtype) -> None:
    x, weight = torch.randn(17, 65).to(dtype), (0.01 * torch.randn(65)).to(dtype)
    wide = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * (1 + weight.double())
    # The sum of one and a small weight must not be rounded to 16 bits.
    torch.testing.assert_close(rms_norm(x, weight, 1e-5, weight_offset=1.0), wide.to(dtype))


@pytest.mark.parametrize("num_tokens", SIZES)
@pytest.mark.parametrize("head_dim", [2, 60, 128])
def test_rotary_embedding(num_tokens: int, head_dim: int) -> None:
    x, angles = torch.randn(num_tokens, 3, head_dim), torch.randn(num_tokens, 1, head_dim // 2)
    expected = x.clone()
    for token in range(num_tokens):
        for pair in range(head_dim // 2):
            cos, sin = math.cos(float(angles[token, 0, pair])), math.sin(float(angles[token, 0, pair]))
            first, second = x[token, :, pair], x[token, :, pair + head_dim // 2]
            expected[token, :, pair] = first * cos - second * sin
            expected[token, :, pair + head_dim // 2] = second * cos + first * sin
    torch.testing.assert_close(rotary_embedding(x, angles.cos(), angles.sin()), expected)


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [2, 6, 10])
def test_rotary_embedding_of_neighbours_and_of_parts(rotary_dim: int, is_interleaved: bool) -> None:
    x, angles = torch.randn(5, 3, 10), torch.randn(5, 1, rotary_dim // 2)
    expected = x.clone()
    for pair in range(rotary_dim // 2):
        one, other = (2 * pair, 2 * pair + 1) if is_interleaved else (pair, pair + rotary_dim // 2)
        cos, sin = angles[..., pair].cos(), angles[..., pair].sin()
        expected[..., one] = x[..., one] * cos - x[..., other] * sin
        expected[..., other] = x[..., other] * cos + x[..., one] * sin
    actual = rotary_embedding(x, angles.cos(), angles.sin(), is_interleaved=is_interleaved)
    torch.testing.assert_close(actual, expected)
    assert torch.equal(actual[..., rotary_dim:], x[..., rotary_dim:])


@pytest.mark.parametrize("num_tokens", SIZES)
def test_gates(num_tokens: int) -> None:
    x = torch.randn(num_tokens, 14)
    gate, up = x[:, :7], x[:, 7:]
    torch.testing.assert_close(act_and_mul(x, "silu"), gate / (1 + torch.exp(-gate)) * up)


def stored(num_tokens: int, slots: Tensor, **options: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    key, value = torch.randn(num_tokens, 2, 6), torch.randn(num_tokens, 2, 6)
    caches = [torch.full((40, 16, 2, 6), torch.nan) for _ in range(2)]
    store_kv_cache(key, value, *caches, slots, **options)
    return key, value, *caches


@pytest.mark.parametrize("num_tokens", SIZES)
def test_store_kv_cache_writes_its_slots_and_nothing_else(num_tokens: int) -> None:
    slots = torch.randperm(40 * 16)[:num_tokens]
    slots[::3] = -1
    key, value, k_cache, v_cache = stored(num_tokens, slots)
    expected = [torch.full((40, 16, 2, 6), torch.nan) for _ in range(2)]
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[0][slot // 16, slot % 16], expected[1][slot // 16, slot % 16] = key[token], value[token]
    torch.testing.assert_close(k_cache, expected[0], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(v_cache, expected[1], rtol=0, atol=0, equal_nan=True)


def test_store_kv_cache_takes_strided_rows_and_a_promise_of_no_skips() -> None:
    qkv = torch.randn(5, 6, 6)
    k_cache, v_cache = torch.zeros(2, 16, 2, 6), torch.zeros(2, 16, 2, 6)
    store_kv_cache(qkv[:, 2:4], qkv[:, 4:6], k_cache, v_cache, torch.arange(14, 19), has_skips=False)
    assert torch.equal(k_cache.flatten(0, 1)[14:19], qkv[:, 2:4])
    assert torch.equal(v_cache.flatten(0, 1)[14:19], qkv[:, 4:6])


def test_copy_blocks_reads_everything_before_it_writes() -> None:
    cache = torch.arange(6.0)[:, None].repeat(1, 4)
    copy_blocks(cache, cache, torch.tensor([0, 1, 5]), torch.tensor([1, 2, 0]))
    assert cache[:, 0].tolist() == [5, 0, 1, 3, 4, 5]


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="3 columns"):
        rms_norm(torch.zeros(1, 3), torch.zeros(4), 1e-5)
    with pytest.raises(ValueError, match="must be even"):
        act_and_mul(torch.zeros(1, 3), "silu")
    with pytest.raises(ValueError, match="4 angles"):
        rotary_embedding(torch.zeros(1, 1, 6), torch.zeros(1, 1, 4), torch.zeros(1, 1, 4))
    with pytest.raises(ValueError, match="do not fit"):
        store_kv_cache(*[torch.zeros(1, 2, 4)] * 2, *[torch.zeros(1, 16, 2, 6)] * 2, torch.zeros(1, dtype=torch.int64))
