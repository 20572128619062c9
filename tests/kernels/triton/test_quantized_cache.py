"""Caches of 8 bits in Triton: what is stored is what the references store, to the bit, and attention reads it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from pagoda_kernels.attention.copy_blocks import copy_blocks
from pagoda_kernels.attention.paged_attention import paged_attention, paged_attention_reference
from pagoda_kernels.attention.quantized_cache import FP8, MAX_FP8, cache_width, dequantize_rows, quantize_rows, to_fp8
from pagoda_kernels.attention.rope_store import HeadNorms, rope_store
from pagoda_kernels.attention.rope_store_int8 import rope_store_int8
from pagoda_kernels.attention.store_kv_cache import store_kv_cache, store_kv_cache_reference
from pagoda_kernels.selection import triton_kernel, use_references
from tests.kernels.attention.test_paged_attention import make_case
from tests.kernels.triton.outputs import nan_filled_outputs

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""As with a cache of floats: both sides read the same rows."""
SIZES = (1, 15, 16, 17, 300)
KINDS = {"int8": quantize_rows, "fp8": to_fp8}


def codes_of(cache: Tensor) -> Tensor:
    """Bytes, with one code for all NaNs of FP8."""
    codes = cache.view(torch.uint8)
    return codes if cache.dtype == torch.int8 else torch.where(codes & 127 == 127, 127, codes)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's, of NaNs
@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [*((head_dim, torch.float32) for head_dim in (1, 20, 33, 64, 128)), (33, torch.bfloat16), (33, torch.float16)],
)
@pytest.mark.parametrize("kind", [torch.int8, FP8])
def test_rows_are_stored_as_by_the_reference(kind: torch.dtype, head_dim: int, dtype: torch.dtype) -> None:
    heads = (torch.randn(17, 5, head_dim) * torch.logspace(-5, 5, 17)[:, None, None]).to(dtype)
    key, value = heads[:, :2], heads[:, 2:4]  # strided rows
    key[3], value[4] = 0, torch.finfo(dtype).max
    key[6, 0, 0], value[7, 1, -1], key[8, 1, 0] = torch.nan, torch.inf, -torch.inf
    slots = torch.randperm(64)[:17]
    slots[5] = -1
    shape = (4, 16, 2, cache_width(head_dim, kind))
    caches = [torch.full(shape, 9, dtype=torch.uint8).view(kind) for _ in range(4)]
    store_kv_cache(key, value, caches[0], caches[1], slots)
    store_kv_cache_reference(key, value, caches[2], caches[3], slots)
    for one, other in ((caches[0], caches[2]), (caches[1], caches[3])):
        if kind == torch.int8:  # a scale that is no number may be any NaN
            assert torch.equal(one[..., :-4], other[..., :-4])
            one, other = (dequantize_rows(rows, head_dim, torch.float32) for rows in (one, other))
            torch.testing.assert_close(one, other, atol=0, rtol=0, equal_nan=True)
        else:
            assert torch.equal(codes_of(one), codes_of(other))
    untouched = torch.ones(64, dtype=torch.bool)
    untouched[slots[slots >= 0]] = False
    assert (caches[0].view(torch.uint8).flatten(0, 1)[untouched] == 9).all()


def test_every_code_of_fp8_comes_back_and_what_lies_between_goes_to_the_nearest() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    exact = codes.view(FP8).float()
    numbers = exact[codes & 127 != 127]
    sorted_numbers = numbers.unique()
    middles = (sorted_numbers[1:] + sorted_numbers[:-1]) / 2
    below, above = (torch.nextafter(middles, torch.full_like(middles, end)) for end in (-torch.inf, torch.inf))
    key = torch.cat((numbers, middles, below, above, torch.tensor([449.0, 1e30, -500.0])))
    key = torch.nn.functional.pad(key, (0, -len(key) % 32)).view(-1, 1, 32)
    caches = torch.zeros(2, 2, 16, 1, 32, dtype=torch.uint8).view(FP8)
    slots = torch.arange(key.shape[0])
    store_kv_cache(key, -key, caches[0], caches[1], slots)
    stored = [cache.flatten()[: key.numel()].float() for cache in caches]
    assert torch.equal(stored[0], -stored[1])
    assert torch.equal(stored[0], key.flatten().clamp(-MAX_FP8, MAX_FP8).to(FP8).float())
    assert torch.equal(stored[0][: numbers.numel()], numbers)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(6, 2, 20), (4, 4, 33), (2, 1, 128)])
def test_prompts_chunks_and_decodes_read_rows_of_8_bits(
    kind: str, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    sizes: dict[str, Any] = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    check(kind, make_case([1, 5, 17, 1, 1], [300, 65, 17, 1, 17], dtype=dtype, **sizes))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_splits", [1, 8])
def test_decodes_may_be_split(kind: str, num_splits: int) -> None:
    check(kind, make_case([1] * len(SIZES), list(SIZES)), num_splits=num_splits)
    check(kind, make_case([1, 5, 40, 1], [150, 65, 100, 17]), window=16, num_splits=num_splits)


@pytest.mark.parametrize("kind", KINDS)
def test_scores_may_be_capped_and_biased(kind: str) -> None:
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.01, 0.001, 0.0])
    check(kind, make_case([1, 17, 1], [200, 40, 17]), softcap=0.5, alibi_slopes=slopes)


def check(kind: str, case: tuple[Any, ...], **options: Any) -> None:
    """The kernel, and what runs where there is none, against the reference; the output holds NaN before."""
    query, k_cache, v_cache, plan = case
    k_rows, v_rows = KINDS[kind](k_cache), KINDS[kind](v_cache)
    kernel = triton_kernel("paged_attention", query)
    with nan_filled_outputs():
        actual = kernel(query, k_rows, v_rows, plan.tables(), scale=0.3, **options)
    options.pop("num_splits", None)
    expected = paged_attention_reference(query, k_rows, v_rows, plan, scale=0.3, **options)
    tolerance = TOLERANCE[query.dtype]
    assert expected.isfinite().all()
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)
    if query.dtype == torch.float32:
        use_references(["paged_attention"])
        composed = paged_attention(query, k_rows, v_rows, plan, scale=0.3, **options)
        use_references(())
        torch.testing.assert_close(composed, expected, atol=tolerance, rtol=tolerance)
    assert paged_attention(query[:0], k_rows, v_rows, make_case([], [])[3], scale=0.3).shape[0] == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_norms", [False, True])
def test_keys_are_normed_and_rotated_before_they_are_quantized(kind: str, has_norms: bool) -> None:
    qkv = torch.randn(17, 6 * 20)
    angles = torch.randn(17, 1, 10)
    norms = HeadNorms(torch.randn(20), torch.randn(20), 1e-6) if has_norms else None
    slots = torch.randperm(32)[:17]
    floats = torch.zeros(2, 2, 16, 1, 20)
    rows = KINDS[kind](floats)
    rotary = (angles.cos(), angles.sin())
    expected = rope_store(qkv.clone(), *floats, slots, rotary=rotary, norms=norms)
    if kind == "int8":
        actual = rope_store_int8(qkv.clone(), *rows, slots, head_dim=20, rotary=rotary, norms=norms)
    else:
        actual = rope_store(qkv.clone(), *rows, slots, rotary=rotary, norms=norms)
    assert torch.equal(actual, expected)
    assert torch.equal(codes_of(rows), codes_of(KINDS[kind](floats)))


def test_blocks_of_fp8_are_copied() -> None:
    blocks = to_fp8(torch.randn(5, 16, 2, 20))
    before = codes_of(blocks).clone()
    copy_blocks(blocks, blocks, torch.tensor([0, 1]), torch.tensor([3, 4]))
    assert torch.equal(codes_of(blocks)[3:], before[:2])
    use_references(["copy_blocks"])
    copy_blocks(blocks, blocks, torch.tensor([2]), torch.tensor([0]))
    use_references(())
    assert torch.equal(codes_of(blocks)[0], before[2])
