"""Norms, gates, rotation, cache writes, penalties, masks and block copies in Triton equal their references."""

import pytest
import torch
from torch import Tensor

from pagoda_kernels.attention.copy_blocks import copy_blocks, copy_blocks_reference
from pagoda_kernels.attention.rope_store import HeadNorms, rope_store, rope_store_reference
from pagoda_kernels.attention.store_kv_cache import store_kv_cache, store_kv_cache_reference
from pagoda_kernels.layers.act_and_mul import ACTIVATIONS, act_and_mul, act_and_mul_reference
from pagoda_kernels.layers.add_rms_norm import add_rms_norm, add_rms_norm_reference
from pagoda_kernels.layers.rms_norm import rms_norm, rms_norm_reference
from pagoda_kernels.sampling.apply_penalties import apply_token_penalties, apply_token_penalties_reference
from pagoda_kernels.sampling.apply_token_bitmask import apply_token_bitmask, apply_token_bitmask_reference
from tests.kernels.triton.outputs import nan_filled_outputs

SIZES = (0, 1, 15, 16, 17)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""Relative and absolute; two units in the last place of 16 bits: the interpreter rounds bfloat16 towards zero."""


def assert_close(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("num_tokens", SIZES)
@pytest.mark.parametrize("dim", [1, 60, 1000])
def test_rms_norm(num_tokens: int, dim: int) -> None:
    x, weight = torch.randn(num_tokens, dim), torch.randn(dim)
    with nan_filled_outputs():
        actual = rms_norm(x, weight, 1e-5)
    assert_close(actual, rms_norm_reference(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_heads_that_are_a_view(dtype: torch.dtype) -> None:
    x, weight = torch.randn(17, 9, 80).to(dtype)[:, 2:6], (0.01 * torch.randn(80)).to(dtype)
    with nan_filled_outputs():
        actual = rms_norm(x, weight, 1e-5, weight_offset=1.0)
    assert_close(actual, rms_norm_reference(x, weight, 1e-5, weight_offset=1.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [0, 1, 17])
def test_add_rms_norm(num_tokens: int, dtype: torch.dtype) -> None:
    x, residual, weight = (torch.randn(shape, 300).to(dtype) for shape in (num_tokens, num_tokens, 1))
    with nan_filled_outputs():
        actual = add_rms_norm(x, residual, weight[0], 1e-5, alpha=0.3, weight_offset=1.0)
    for one, other in zip(
        actual, add_rms_norm_reference(x, residual, weight[0], 1e-5, alpha=0.3, weight_offset=1.0), strict=True
    ):
        assert_close(one, other)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_act_and_mul(activation: str, dtype: torch.dtype) -> None:
    for num_tokens, size in ((0, 7), (1, 15), (17, 1100)):
        x = torch.randn(num_tokens, 2 * size).to(dtype)
        with nan_filled_outputs():
            actual = act_and_mul(x, activation)
        assert_close(actual, act_and_mul_reference(x.double(), activation).to(dtype))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_of_large_values_are_no_nan(activation: str) -> None:
    x = torch.tensor([[-200.0, 200.0, 1.0, 1.0], [-1e4, 1e4, 1.0, 1.0]])
    assert_close(act_and_mul(x, activation), act_and_mul_reference(x, activation))


def test_eps_counts() -> None:
    x, residual, weight = 0.1 * torch.randn(3, 20), 0.1 * torch.randn(3, 20), torch.randn(20)
    assert_close(rms_norm(x, weight, 0.5), rms_norm_reference(x, weight, 0.5))
    made, wanted = (norm(x, residual, weight, 0.5) for norm in (add_rms_norm, add_rms_norm_reference))
    assert_close(made[0], wanted[0])
    assert_close(made[1], wanted[1])


def caches(num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Of 10 blocks of 3 tokens, full of NaN; the values' are a view."""
    shape = (10, 3, num_kv_heads, head_dim)
    k_cache = torch.full(shape, torch.nan, dtype=dtype)
    return k_cache, torch.full((2, *shape), torch.nan, dtype=dtype)[1]


def slots(num_tokens: int) -> Tensor:
    """Different slots; every fifth token has none."""
    mapping = torch.randperm(30)[:num_tokens]
    mapping[::5] = -1
    return mapping


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [0, 1, 16, 17])
def test_store_kv_cache(num_tokens: int, dtype: torch.dtype) -> None:
    both = torch.randn(num_tokens, 6, 80).to(dtype)
    actual, expected = caches(3, 80, dtype), caches(3, 80, dtype)
    mapping = slots(num_tokens)
    store_kv_cache(both[:, :3], both[:, 3:], *actual, mapping)
    store_kv_cache_reference(both[:, :3], both[:, 3:], *expected, mapping)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("head_dim", "rotary_dim", "is_interleaved", "norms_are_last"),
    [
        (64, 64, False, False),
        (80, 80, True, False),
        (96, 96, True, None),
        (128, 32, False, False),
        (128, 128, False, None),
        (256, 0, False, False),
        (20, 0, False, None),
        (64, 64, False, True),
        (80, 80, True, True),
        (128, 32, False, True),
        (20, 0, False, True),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rope_store(
    head_dim: int, rotary_dim: int, is_interleaved: bool, norms_are_last: bool | None, dtype: torch.dtype
) -> None:
    """`norms_are_last`: None is without norms."""
    qkv, weights = torch.randn(17, 8 * head_dim).to(dtype), torch.randn(2, head_dim).to(dtype)
    angles = torch.randn(17, 1, rotary_dim // 2)
    actual, expected = caches(2, head_dim, dtype), caches(2, head_dim, dtype)
    mapping = slots(17)
    rotary = (angles.cos(), angles.sin()) if rotary_dim else None
    norms = None if norms_are_last is None else HeadNorms(weights[0], weights[1], 1e-6, 1.0, norms_are_last)
    with nan_filled_outputs():
        query = rope_store(qkv, *actual, mapping, rotary=rotary, is_interleaved=is_interleaved, norms=norms)
    turned = rope_store_reference(qkv, *expected, mapping, rotary=rotary, is_interleaved=is_interleaved, norms=norms)
    assert_close(query, turned)
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one.isnan(), other.isnan())
        assert_close(one.nan_to_num(), other.nan_to_num())


@pytest.mark.parametrize("is_last", [False, True])
def test_eps_of_the_norms_of_heads_counts(is_last: bool) -> None:
    qkv, angles, weights = 0.1 * torch.randn(3, 4 * 20), torch.randn(3, 1, 10), torch.randn(2, 20)
    rotary, norms = (angles.cos(), angles.sin()), HeadNorms(weights[0], weights[1], 0.5, 1.0, is_last)
    actual, expected = caches(1, 20, torch.float32), caches(1, 20, torch.float32)
    made = rope_store(qkv, *actual, torch.arange(3), rotary=rotary, norms=norms)
    assert_close(made, rope_store_reference(qkv, *expected, torch.arange(3), rotary=rotary, norms=norms))
    assert_close(actual[0].nan_to_num(), expected[0].nan_to_num())


@pytest.mark.parametrize("n", [0, 1, 5])
def test_token_penalties(n: int) -> None:
    vocab_size = 3001
    logits, in_prompt = torch.randn(n, vocab_size), torch.rand(n, vocab_size) < 0.3
    counts = torch.randint(0, 3, (n, vocab_size)).float()
    penalties = {"presence": torch.randn(n), "frequency": torch.randn(n), "repetition": torch.rand(n) + 0.5}
    with nan_filled_outputs():
        actual = apply_token_penalties(logits, in_prompt, counts, **penalties)
    assert_close(actual, apply_token_penalties_reference(logits, in_prompt, counts, **penalties))


@pytest.mark.parametrize("n", [0, 1, 5])
def test_token_bitmask(n: int) -> None:
    logits = torch.randn(n, 3001)
    logits[:, 7] = torch.nan
    bitmask = torch.randint(0, 256, (n, 380), dtype=torch.uint8)
    with nan_filled_outputs():
        actual = apply_token_bitmask(logits, bitmask)
    torch.testing.assert_close(actual, apply_token_bitmask_reference(logits, bitmask), equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 2, 5), (16, 8, 64), (1,)])
def test_copied_blocks(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    blocks = torch.randn(9, *shape).to(dtype)
    others = torch.randn(7, *shape).to(dtype)
    from_ids, to_ids = torch.tensor([8, 0, 3]), torch.tensor([1, 6, 0])
    expected, same = others.clone(), blocks.clone()
    copy_blocks(blocks, others, from_ids, to_ids)
    copy_blocks_reference(blocks, expected, from_ids, to_ids)
    assert torch.equal(others, expected)
    # Within one tensor, where a block is both read and written.
    copy_blocks(same, same, from_ids, to_ids)
    assert torch.equal(same[torch.tensor([1, 6, 0])], blocks[from_ids])
    copy_blocks(same, same, torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.int64))
