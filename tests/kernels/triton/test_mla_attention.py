"""Attention over latents in Triton equals its reference."""

import numpy as np
import pytest
import torch

from pagoda_kernels.attention.mla_attention import mla_attention, mla_attention_reference
from pagoda_kernels.attention.quantized_cache import quantize_rows, to_fp8
from pagoda_kernels.attention.tables import AttentionTables
from pagoda_kernels.selection import triton_kernel
from tests.kernels.attention.test_mla_attention import BATCHES, TOLERANCE, Case, make_case
from tests.kernels.triton.outputs import nan_filled_outputs


def check(case: Case, *, num_splits: int | None = None) -> None:
    """Queries that have met key_up against the latents; the outputs hold NaN before."""
    query, cache, plan, up = case
    key_dim, rank = up["key_up"].shape[1:]
    narrow = torch.einsum("thd,hdr->thr", query[..., :key_dim].float(), up["key_up"].float()).to(query.dtype)
    kernel = triton_kernel("mla_attention", query)
    with nan_filled_outputs():
        rows = torch.cat((narrow, query[..., key_dim:]), dim=-1)
        summed = kernel(rows, cache, plan.tables(), rank=rank, scale=0.3, num_splits=num_splits)
    actual = torch.einsum("thr,hdr->thd", summed.float(), up["value_up"].float()).flatten(1).to(query.dtype)
    expected = mla_attention_reference(query, cache, plan, **up, scale=0.3)
    assert torch.isfinite(expected).all()
    torch.testing.assert_close(actual, expected, atol=TOLERANCE[query.dtype], rtol=TOLERANCE[query.dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("num_splits", [1, 4])
def test_decodes_of_all_lengths_together(dtype: torch.dtype, num_splits: int) -> None:
    check(make_case([1] * 5, [1, 15, 16, 17, 300], dtype=dtype, left=torch.nan), num_splits=num_splits)


@pytest.mark.parametrize("num_splits", [1, 2])
def test_sequences_with_drafts(num_splits: int) -> None:
    check(make_case(*BATCHES["drafts"], left=torch.nan), num_splits=num_splits)


@pytest.mark.parametrize("num_heads", [1, 16, 17, 40])
def test_heads(num_heads: int) -> None:
    check(make_case([1, 2], [40, 9], num_heads=num_heads, dtype=torch.float16))


def test_sizes_of_deepseek() -> None:
    check(make_case([1], [20], rank=512, rotary_dim=64, key_dim=128, value_dim=128))


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("quantized", [quantize_rows, to_fp8])
def test_caches_of_8_bits(quantized: object, num_splits: int) -> None:
    case = make_case([1, 2], [70, 40])
    check(case._replace(cache=quantized(case.cache.nan_to_num())), num_splits=num_splits)  # type: ignore[operator]  # case.cache: Tensor


def test_padding_belongs_to_no_sequence() -> None:
    query, cache, plan, up = make_case([1, 1, 1], [30, 5, 1])
    kernel, rank = triton_kernel("mla_attention", query), up["key_up"].shape[2]
    rows = torch.randn(3, 3, rank + 12)
    expected = kernel(rows, cache, plan.tables(), rank=rank, scale=0.3)
    tables = plan.tables()
    padded = AttentionTables(
        query_start_loc=torch.from_numpy(np.array([0, 1, 2, 2], dtype=np.int32)),
        seq_lens=torch.from_numpy(np.array([30, 5, 0], dtype=np.int32)),
        block_table=tables.block_table,
        num_singles=3,
        max_query_len=1,
        max_single_len=30,
    )
    for num_splits in (1, 2):
        actual = kernel(rows, cache, padded, rank=rank, scale=0.3, num_splits=num_splits)
        torch.testing.assert_close(actual[:2], expected[:2], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("batch", ["mixed", "chunks"])
def test_prompts_go_to_paged_attention(batch: str) -> None:
    case = make_case(*BATCHES[batch])
    with nan_filled_outputs():
        actual = mla_attention(case.query, case.cache, case.plan, **case.up, scale=0.3)
    expected = mla_attention_reference(case.query, case.cache, case.plan, **case.up, scale=0.3)
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)
