"""Attention over the paged cache equals one softmax per query token, for any mix of chunks and decodes."""

from typing import Any

import numpy as np
import pytest
import torch

from pagoda_kernels import attention_plan
from pagoda_kernels import paged_attention as paged_attention_module
from pagoda_kernels.attention_plan import AttentionPlan
from pagoda_kernels.paged_attention import paged_attention, paged_attention_reference

CPU = torch.device("cpu")
SIZES = (1, 15, 16, 17, 63, 64, 65, 300)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def make_case(
    query_lens: list[int],
    seq_lens: list[int],
    *,
    num_heads: int = 6,
    num_kv_heads: int = 2,
    head_dim: int = 20,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionPlan]:
    """Query, caches filled with NaN where no sequence has a block, and the plan."""
    generator = torch.Generator().manual_seed(0)
    num_blocks = [-(-length // block_size) for length in seq_lens]
    total = sum(num_blocks) + 5
    ids = torch.randperm(total, generator=generator).tolist()
    table = np.full((len(seq_lens), max(num_blocks, default=1) + 2), 2**31 - 1, dtype=np.int32)
    shape = (total, block_size, num_kv_heads, head_dim)
    k_cache, v_cache = (torch.full(shape, torch.nan, dtype=dtype) for _ in range(2))
    for row, count in enumerate(num_blocks):
        for column in range(count):
            block = ids.pop()
            table[row, column] = block
            for cache in (k_cache, v_cache):
                cache[block] = torch.randn(shape[1:], generator=generator).to(dtype)
    query = torch.randn(sum(query_lens), num_heads, head_dim, generator=generator).to(dtype)
    plan = AttentionPlan(np.array(query_lens), np.array(seq_lens), table, block_size, dtype, CPU)
    return query, k_cache, v_cache, plan


def check(
    query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, plan: AttentionPlan, **options: Any
) -> None:
    actual = paged_attention(query, k_cache, v_cache, plan, scale=0.3, **options)
    expected = paged_attention_reference(query, k_cache, v_cache, plan, scale=0.3, **options)
    assert torch.isfinite(expected).all()
    torch.testing.assert_close(actual, expected, atol=TOLERANCE[query.dtype], rtol=TOLERANCE[query.dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", SIZES)
def test_a_prompt_alone(size: int, dtype: torch.dtype) -> None:
    check(*make_case([size], [size], dtype=dtype))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_decodes_of_all_lengths_together(dtype: torch.dtype) -> None:
    check(*make_case([1] * len(SIZES), list(SIZES), dtype=dtype))


@pytest.mark.parametrize("window", [1, 2, 16, 17, 40, 1000])
def test_chunks_and_decodes_mixed_with_a_sliding_window(window: int) -> None:
    check(*make_case([1, 5, 17, 1, 64, 16, 1], [300, 65, 17, 1, 100, 200, 17]), window=window)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("window", [None, 17])
def test_soft_capped_scores(window: int | None, dtype: torch.dtype) -> None:
    case = make_case([1, 5, 17, 1, 64, 16, 1], [300, 65, 17, 1, 100, 200, 17], dtype=dtype)
    check(*case, window=window, softcap=0.5)
    capped = paged_attention(*case, scale=0.3, softcap=0.5)
    assert (capped - paged_attention(*case, scale=0.3)).abs().max() > 0.1


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("softcap", [None, 0.7])
def test_linear_biases(softcap: float | None, dtype: torch.dtype) -> None:
    case = make_case([1, 5, 17, 1, 64, 16, 1], [300, 65, 17, 1, 100, 200, 17], dtype=dtype)
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.01, 0.001, 0.0])
    check(*case, softcap=softcap, alibi_slopes=slopes)
    check(*case, softcap=softcap, alibi_slopes=slopes, window=30)


def test_soft_capped_scores_of_many_queries_are_held_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_attention_module, "MAX_SCORES", 1000)
    check(*make_case([64, 1, 100, 1], [200, 65, 100, 300]), softcap=0.5)
    check(*make_case([1, 1, 1], [200, 65, 100]), window=20, softcap=0.5)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (4, 4), (8, 1), (6, 3)])
def test_head_groups(num_heads: int, num_kv_heads: int) -> None:
    check(*make_case([1, 7, 1], [33, 20, 64], num_heads=num_heads, num_kv_heads=num_kv_heads))


@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
def test_block_sizes(block_size: int) -> None:
    check(*make_case([1, 7, 1, 40], [33, 20, 64, 41], block_size=block_size), window=10)


def test_a_batch_too_large_for_one_group_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_plan, "SMALL_BATCH_TOKENS", 64)
    monkeypatch.setattr(attention_plan, "MAX_GROUP_TOKENS", 128)
    lengths = [1, 300, 17, 64, 2, 65, 64, 63, 5]
    query, k_cache, v_cache, plan = make_case([1, 1, 1, 1, 2, 1, 1, 1, 1], lengths)
    assert len(plan.window(None).decodes) > 3
    check(query, k_cache, v_cache, plan)
    check(query, k_cache, v_cache, plan, window=20)


def test_an_empty_batch_gives_an_empty_output() -> None:
    query, k_cache, v_cache, plan = make_case([], [])
    assert paged_attention(query, k_cache, v_cache, plan, scale=1.0).shape == (0, 120)


def test_shapes_that_do_not_fit_are_refused() -> None:
    query, k_cache, v_cache, plan = make_case([1], [5], block_size=16)
    with pytest.raises(ValueError, match="does not fit"):
        paged_attention(query[..., :10], k_cache, v_cache, plan, scale=1.0)
    with pytest.raises(ValueError, match="does not fit"):
        paged_attention(query[:, :3], k_cache, v_cache, plan, scale=1.0)
    with pytest.raises(ValueError, match="blocks of 8"):
        paged_attention(query, k_cache[:, :8], v_cache[:, :8], plan, scale=1.0)
