"""The C++ kernels beside linear layers and attention against their references, on ragged sizes."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pagoda_kernels.attention.rope_store import HeadNorms, rope_store, rope_store_reference
from pagoda_kernels.layers.act_and_mul import ACTIVATIONS, act_and_mul, act_and_mul_reference
from pagoda_kernels.layers.rms_norm import rms_norm, rms_norm_reference
from pagoda_kernels.native.library import load_native, native
from pagoda_kernels.sampling.argmax import argmax, argmax_reference
from pagoda_kernels.sampling.philox import philox_keys
from pagoda_kernels.sampling.sample_tokens import sample_tokens
from pagoda_kernels.sampling.token_exponentials import token_exponentials
from pagoda_kernels.selection import use_references

DTYPES = (torch.float32, torch.bfloat16)
TOLERANCES = {torch.float32: {"atol": 2e-6, "rtol": 1e-5}, torch.bfloat16: {"atol": 1e-3, "rtol": 0.016}}
NUM_BLOCKS, BLOCK_SIZE = 40, 16
HIGHEST = (-5786151744590384058, 17)
"""A key and a token whose 24 random bits are all ones."""


@pytest.fixture(autouse=True)
def with_kernels() -> Iterator[None]:
    torch.manual_seed(0)
    assert load_native()
    yield
    use_references(())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("size", [1, 7, 16, 33, 300])
def test_act_and_mul(size: int, activation: str, dtype: torch.dtype) -> None:
    for num_tokens in (0, 1, 5, 100):
        x = (torch.randn(num_tokens, 2 * size) * 4).to(dtype)
        expected = act_and_mul_reference(x.double(), activation).to(dtype)
        torch.testing.assert_close(act_and_mul(x, activation), expected, **TOLERANCES[dtype])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_act_and_mul_at_the_ends(activation: str) -> None:
    gate = torch.tensor([0.0, -0.0, 30.0, -30.0, 200.0, -200.0, 1e30, torch.nan])
    x = torch.cat((gate, torch.ones(8)))[None]
    torch.testing.assert_close(
        act_and_mul(x, activation), act_and_mul_reference(x, activation), atol=2e-6, rtol=1e-5, equal_nan=True
    )


def test_rms_norm_takes_strided_rows() -> None:
    x, weight = torch.randn(9, 70), torch.randn(33)
    torch.testing.assert_close(rms_norm(x[:, 5:38], weight, 1e-5), rms_norm_reference(x[:, 5:38], weight, 1e-5))
    heads = torch.randn(9, 6, 33)[:, 1:3]
    torch.testing.assert_close(rms_norm(heads, weight, 1e-5), rms_norm_reference(heads, weight, 1e-5))


def test_eps_of_rms_norm_counts() -> None:
    x, weight = 0.1 * torch.randn(9, 33), torch.randn(33)
    torch.testing.assert_close(rms_norm(x, weight, 0.5), rms_norm_reference(x, weight, 0.5))


def caches(num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> list[Tensor]:
    return [torch.full((NUM_BLOCKS, BLOCK_SIZE, num_kv_heads, head_dim), torch.nan, dtype=dtype) for _ in range(2)]


def equal_to_the_reference(
    qkv: Tensor,
    num_kv_heads: int,
    head_dim: int,
    *,
    rotary_dim: int | None,
    is_interleaved: bool = False,
    norms: HeadNorms | None = None,
) -> None:
    num_tokens = qkv.shape[0]
    slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE)[:num_tokens]
    slots[::3] = -1
    rotary = None
    if rotary_dim is not None:
        angles = torch.randn(num_tokens, 1, rotary_dim // 2)
        rotary = (angles.cos(), angles.sin())
    expected, actual = caches(num_kv_heads, head_dim, qkv.dtype), caches(num_kv_heads, head_dim, qkv.dtype)
    query = rope_store_reference(
        qkv, *expected, slots, rotary=rotary, is_interleaved=is_interleaved, norms=norms
    ).clone()
    for is_native in (True, False):
        copy = qkv.clone()
        use_references(() if is_native else ["rope_store"])
        result = rope_store(copy, *actual, slots, rotary=rotary, is_interleaved=is_interleaved, norms=norms)
        torch.testing.assert_close(result, query)
        for one, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(one, other, equal_nan=True)
        if is_native:
            assert result.untyped_storage().data_ptr() == copy.untyped_storage().data_ptr(), "no copy of the queries"


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 65, 200])
@pytest.mark.parametrize("head_dim", [6, 60, 64, 128])
@pytest.mark.parametrize("is_interleaved", [False, True])
def test_rope_store(num_tokens: int, head_dim: int, is_interleaved: bool) -> None:
    qkv = torch.randn(num_tokens, (5 + 2 * 2) * head_dim)
    equal_to_the_reference(qkv, 2, head_dim, rotary_dim=head_dim, is_interleaved=is_interleaved)
    equal_to_the_reference(qkv, 2, head_dim, rotary_dim=2, is_interleaved=is_interleaved)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (4, 1), (3, 3), (6, 3)])
def test_rope_store_of_any_numbers_of_heads(num_heads: int, num_kv_heads: int) -> None:
    qkv = torch.randn(7, (num_heads + 2 * num_kv_heads) * 16)
    equal_to_the_reference(qkv, num_kv_heads, 16, rotary_dim=16)
    equal_to_the_reference(qkv, num_kv_heads, 16, rotary_dim=None, norms=HeadNorms(qkv[0, :16], qkv[1, :16], 1e-6, 0.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [6, 32, 64, 100, 128])
@pytest.mark.parametrize("is_last", [False, True])
def test_rope_store_with_norms(is_last: bool, head_dim: int, dtype: torch.dtype) -> None:
    qkv = torch.randn(33, 8 * head_dim).to(dtype)
    weights = [torch.randn(head_dim).to(dtype) for _ in range(2)]
    norms = HeadNorms(weights[0], weights[1], 1e-6, 1.0, is_last)
    if dtype == torch.float32:  # 16-bit PyTorch rounds between norm and rotation, the kernel does not
        equal_to_the_reference(qkv, 2, head_dim, rotary_dim=head_dim, norms=norms)
        equal_to_the_reference(qkv, 2, head_dim, rotary_dim=4, norms=norms, is_interleaved=True)
        equal_to_the_reference(qkv, 2, head_dim, rotary_dim=None, norms=norms)
    angles = torch.randn(33, 1, head_dim // 2)
    expected, actual = caches(2, head_dim, dtype), caches(2, head_dim, dtype)
    options: dict[str, Any] = {"rotary": (angles.cos(), angles.sin()), "norms": norms}
    query = rope_store_reference(qkv, *expected, torch.arange(33), **options)
    torch.testing.assert_close(rope_store(qkv, *actual, torch.arange(33), **options), query)
    torch.testing.assert_close(actual[0], expected[0], equal_nan=True)


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("head_dim", [20, 64])
def test_eps_of_the_norms_of_heads_counts(head_dim: int, is_last: bool) -> None:
    qkv = 0.1 * torch.randn(5, 8 * head_dim)
    norms = HeadNorms(torch.randn(head_dim), torch.randn(head_dim), 0.5, 1.0, is_last)
    equal_to_the_reference(qkv, 2, head_dim, rotary_dim=head_dim, norms=norms)


def test_norms_of_rotated_heads_take_what_the_rotation_scales() -> None:
    """A rotation whose cosines and sines have a factor, as of yarn, changes the mean square."""
    qkv, angles, weight = torch.randn(9, 8 * 64), torch.randn(9, 1, 32), torch.randn(64)
    results = []
    for is_last, factor in ((False, 1.0), (True, 1.0), (True, 3.0)):
        rotary = (factor * angles.cos(), factor * angles.sin())
        norms = HeadNorms(weight, weight, 0.0, 0.0, is_last)
        copy = qkv.clone()
        results.append(rope_store(copy, *caches(2, 64, qkv.dtype), torch.arange(9), rotary=rotary, norms=norms))
    assert not torch.allclose(results[0], results[1], atol=0.1)
    torch.testing.assert_close(results[1], results[2])


def test_rope_store_without_a_rotation_and_of_rows_with_gaps() -> None:
    wide = torch.randn(5, 100)
    equal_to_the_reference(wide[:, :72], 2, 8, rotary_dim=None)
    k_cache, v_cache = caches(2, 8, torch.float32)
    rope_store(wide[:, :72], k_cache, v_cache, torch.arange(14, 19))
    assert torch.equal(v_cache.flatten(0, 1)[14:19].flatten(1), wide[:, 56:72])


def test_rope_store_follows_the_strides_of_the_cache() -> None:
    qkv = torch.randn(4, 6 * 8)
    by_head = [torch.zeros(3, 2, 16, 8).transpose(1, 2) for _ in range(2)]
    plain = [torch.zeros(3, 16, 2, 8) for _ in range(2)]
    slots = torch.tensor([0, 17, -1, 40])
    rope_store(qkv.clone(), *by_head, slots)
    rope_store(qkv, *plain, slots)
    assert torch.equal(by_head[0], plain[0])
    assert torch.equal(by_head[1], plain[1])


def test_rope_store_refuses_what_does_not_fit() -> None:
    cache = torch.zeros(2, 16, 2, 8)
    with pytest.raises(ValueError, match="does not fit a cache"):
        rope_store(torch.zeros(1, 4 * 8), cache, cache, torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ValueError, match="2 entries for 1 tokens"):
        rope_store(torch.zeros(1, 6 * 8), cache, cache, torch.zeros(2, dtype=torch.int64))
    angles = torch.zeros(1, 1, 5)
    with pytest.raises(ValueError, match="5 angles"):
        rope_store(torch.zeros(1, 48), cache, cache, torch.zeros(1, dtype=torch.int64), rotary=(angles, angles))


@pytest.mark.parametrize("size", [1, 15, 4096, 4097, 50_000])
def test_argmax(size: int) -> None:
    x = torch.randn(7, size)
    x[1], x[2], x[3] = -torch.inf, -0.0, torch.randint(-3, 0, (size,)).float()
    x[2, size // 2 :] = 0.0
    x[4, size // 2] = torch.inf
    x[5, size // 3] = torch.nan
    x[6, size - 1] = 99.0
    values, indices = argmax(x)
    expected = argmax_reference(x)
    torch.testing.assert_close(values, expected[0], rtol=0, atol=0, equal_nan=True)
    rows = [0, 1, 3, 4, 5, 6]
    assert indices[rows].tolist() == expected[1][rows].tolist()
    assert indices[2] == 0, "the zeros are equal"


def keys_of(n: int) -> Tensor:
    return torch.from_numpy(philox_keys(np.arange(n, dtype=np.uint64), np.zeros(n, np.uint64)))


@pytest.mark.parametrize("size", [1, 3, 1024, 1025, 32_000])
def test_the_same_tokens_win_the_race(size: int) -> None:
    keys = keys_of(200)
    for spread in (0.0, 1.0, 8.0):
        logits = torch.randn(200, size) * spread
        drawn = sample_tokens(logits, keys)
        use_references(["race"])
        assert torch.equal(drawn, sample_tokens(logits, keys))
        use_references(())


def test_a_dead_heat_is_left_to_the_exact_logarithms() -> None:
    keys = keys_of(1)
    clocks = token_exponentials(keys, torch.arange(2000))
    probs = torch.zeros(1, 2000)
    probs[0, 3], probs[0, 1999] = clocks[0, 3], clocks[0, 1999] * (1 + 1e-6)
    winners = torch.zeros(1, dtype=torch.int64)
    native("race")(probs, keys, winners)
    assert winners.tolist() == [-1]
    probs[0, 3] *= 1.1
    native("race")(probs, keys, winners)
    assert winners.tolist() == [3]


@pytest.mark.parametrize("first", [0, 3, 1023, 1024, 1999])
@pytest.mark.parametrize("second", [1, 1022, 1025, 1998])
def test_a_dead_heat_is_seen_wherever_its_tokens_are(first: int, second: int) -> None:
    """Scores are made in parts of 1024 tokens; a third token, in another part or not, is slower than both."""
    keys = keys_of(1)
    clocks = token_exponentials(keys, torch.arange(2000))
    winners = torch.zeros(1, dtype=torch.int64)
    for third in (2, 1500):
        probs = torch.zeros(1, 2000)
        probs[0, first], probs[0, second] = clocks[0, first], clocks[0, second] * (1 + 1e-6)
        probs[0, third] = clocks[0, third] * 0.9
        native("race")(probs, keys, winners)
        assert winners.tolist() == [-1]
        probs[0, first] *= 1.001
        native("race")(probs, keys, winners)
        assert winners.tolist() == [first]
        probs[0, second] *= 1.002
        native("race")(probs, keys, winners)
        assert winners.tolist() == [second]


@pytest.mark.parametrize("is_native", [True, False])
def test_the_highest_random_number_draws_no_token_without_probability(is_native: bool) -> None:
    use_references(() if is_native else ["race"])
    key, token = HIGHEST
    logits = torch.zeros(1, 50)
    logits[0, token] = -torch.inf
    assert int(sample_tokens(logits, torch.tensor([key]))) != token
    logits[0, token] = 0.0
    assert int(sample_tokens(logits, torch.tensor([key]))) == token, "first of all"
