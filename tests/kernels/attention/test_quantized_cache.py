"""The int8 cache: what is stored, what attention reads of it, and how far that is from a cache of floats."""

from collections.abc import Iterator

import pytest
import torch

from pagoda_kernels.attention.paged_attention import paged_attention, paged_attention_reference
from pagoda_kernels.attention.quantized_cache import cache_width, dequantize_rows, quantize_rows, scales_of
from pagoda_kernels.attention.rope_store import HeadNorms, rope_store
from pagoda_kernels.attention.rope_store_int8 import rope_store_int8
from pagoda_kernels.attention.store_kv_cache import store_kv_cache, store_kv_cache_reference
from pagoda_kernels.native.library import load_native
from pagoda_kernels.selection import use_references
from tests.kernels.attention.test_paged_attention import MIXED, TOLERANCE, make_case


@pytest.fixture(autouse=True, params=["native", "torch"])
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every test runs with the C++ kernels and without."""
    assert load_native(), "this machine has a compiler"
    use_references(() if request.param == "native" else ("paged_attention", "store_int8"))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield request.param
    torch.set_num_threads(before)
    use_references(())


@pytest.mark.parametrize("head_dim", [1, 20, 33, 64, 128])
def test_a_row_is_within_half_a_step_of_what_was_stored(head_dim: int) -> None:
    x = torch.randn(50, 3, head_dim)
    x[0] = 0
    rows = quantize_rows(x)
    assert rows.shape == (50, 3, cache_width(head_dim, torch.int8))
    assert cache_width(head_dim, torch.int8) % 4 == 0
    error = (dequantize_rows(rows, head_dim, torch.float32) - x).abs().amax(-1)
    assert (error <= x.abs().amax(-1) / 254 * 1.0001).all()
    assert (rows[0] == 0).all()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("head_dim", [1, 20, 33, 64, 128])
def test_both_ways_store_the_same_bits(head_dim: int, dtype: torch.dtype) -> None:
    heads = torch.randn(40, 5, head_dim).to(dtype)
    key, value = heads[:, :2], heads[:, 2:4]  # strided rows
    key[3], value[4] = 0, torch.full_like(value[4], 3e38)
    slots = torch.randperm(64)[:40]
    slots[5] = -1
    shape = (4, 16, 2, cache_width(head_dim, torch.int8))
    caches = [torch.full(shape, 9, dtype=torch.int8) for _ in range(4)]
    store_kv_cache(key, value, caches[0], caches[1], slots)
    store_kv_cache_reference(key, value, caches[2], caches[3], slots)
    assert torch.equal(caches[0], caches[2])
    assert torch.equal(caches[1], caches[3])
    untouched = torch.ones(64, dtype=torch.bool)
    untouched[slots[slots >= 0]] = False
    assert (caches[0].flatten(0, 1)[untouched] == 9).all()


@pytest.mark.parametrize("apart", ["key", "value"])
def test_heads_that_do_not_lie_one_after_the_other_are_stored_the_same(apart: str) -> None:
    wide = torch.randn(2, 5, 2, 40)
    key, value = (
        rows[..., :20] if name == apart else rows[..., 20:].contiguous()
        for name, rows in zip(("key", "value"), wide, strict=True)
    )
    caches = torch.zeros(4, 1, 16, 2, cache_width(20, torch.int8), dtype=torch.int8)
    store_kv_cache(key, value, caches[0], caches[1], torch.arange(5))
    store_kv_cache_reference(key, value, caches[2], caches[3], torch.arange(5))
    assert torch.equal(caches[0], caches[2])
    assert torch.equal(caches[1], caches[3])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_with_a_nan_or_an_infinity_is_no_number(bad: float) -> None:
    key = torch.randn(3, 2, 20)
    key[1, 0, 7] = bad
    k_cache, v_cache = torch.zeros(2, 1, 16, 2, cache_width(20, torch.int8), dtype=torch.int8)
    store_kv_cache(key, torch.randn(3, 2, 20), k_cache, v_cache, torch.arange(3))
    restored = dequantize_rows(k_cache[0, :3], 20, torch.float32)
    assert restored[1, 0].isnan().all()
    restored[1, 0] = 0
    assert restored.isfinite().all()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(6, 2, 20), (4, 4, 33), (8, 1, 64), (2, 1, 128)])
def test_attention_over_rows_of_int8(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    query, k_cache, v_cache, plan = make_case(*MIXED, dtype=dtype, **shape)
    k_rows, v_rows = quantize_rows(k_cache), quantize_rows(v_cache)
    assert scales_of(k_rows).isnan().any(), "foreign blocks hold NaN"
    for window in (None, 30):
        actual = paged_attention(query, k_rows, v_rows, plan, scale=0.3, window=window)
        expected = paged_attention_reference(query, k_rows, v_rows, plan, scale=0.3, window=window)
        assert expected.isfinite().all()
        torch.testing.assert_close(actual, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_attention_is_close_to_that_over_floats() -> None:
    """Normal keys and values, scores of deviation 1: at most 0.03 off, 0.004 in the mean square."""
    query, k_cache, v_cache, plan = make_case(*MIXED, head_dim=64)
    exact = paged_attention(query, k_cache, v_cache, plan, scale=64**-0.5)
    rounded = paged_attention(query, quantize_rows(k_cache), quantize_rows(v_cache), plan, scale=64**-0.5)
    error = rounded - exact
    assert error.abs().max() < 0.03
    assert 1e-5 < error.square().mean().sqrt() < 0.004


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_keys_are_normed_and_rotated_before_they_are_quantized(dtype: torch.dtype) -> None:
    qkv = torch.randn(7, 6 * 20).to(dtype)
    angles = torch.randn(7, 10)
    norms = HeadNorms(torch.randn(20).to(dtype), torch.randn(20).to(dtype), 1e-6)
    slots = torch.randperm(32)[:7]
    floats = torch.zeros(2, 2, 16, 1, 20, dtype=dtype)
    rows = torch.zeros(2, 2, 16, 1, cache_width(20, torch.int8), dtype=torch.int8)
    rotary = (angles.cos(), angles.sin())
    expected = rope_store(qkv.clone(), *floats, slots, rotary=rotary, norms=norms)
    actual = rope_store_int8(qkv.clone(), *rows, slots, head_dim=20, rotary=rotary, norms=norms)
    assert torch.equal(actual, expected)
    assert torch.equal(rows, quantize_rows(floats))
