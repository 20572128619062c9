"""Attention over latents equals keys and values made of them, one query token at a time."""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from pagoda_kernels.attention import mla_attention as module
from pagoda_kernels.attention.mla_attention import mla_attention, mla_attention_reference
from pagoda_kernels.attention.plan import AttentionPlan
from pagoda_kernels.attention.quantized_cache import quantize_rows

BLOCK_SIZE = 16
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


class Case(NamedTuple):
    """A batch over latents."""

    query: Tensor
    cache: Tensor
    plan: AttentionPlan
    up: dict[str, Tensor]


def make_case(
    query_lens: list[int],
    seq_lens: list[int],
    *,
    num_heads: int = 3,
    rank: int = 20,
    rotary_dim: int = 12,
    key_dim: int = 10,
    value_dim: int = 14,
    dtype: torch.dtype = torch.float32,
    left: float = 9.0,
) -> Case:
    """Random blocks, NaN in those of no sequence.

    Args:
        left: what stands after a sequence's last row, in its block.
    """
    num_blocks = [-(-length // BLOCK_SIZE) for length in seq_lens]
    table = np.zeros((len(seq_lens), max(num_blocks, default=0)), dtype=np.int32)
    cache = torch.full((sum(num_blocks) + 1, BLOCK_SIZE, 1, rank + rotary_dim), torch.nan, dtype=dtype)
    ids = iter(torch.randperm(sum(num_blocks) + 1).tolist())
    for row, length in enumerate(seq_lens):
        for index in range(num_blocks[row]):
            table[row, index] = block = next(ids)
            cache[block] = left
            count = min(BLOCK_SIZE, length - index * BLOCK_SIZE)
            cache[block, :count] = torch.randn(count, 1, rank + rotary_dim).to(dtype)
    query = torch.randn(sum(query_lens), num_heads, key_dim + rotary_dim).to(dtype)
    up = {
        "key_up": (torch.randn(num_heads, key_dim, rank) * rank**-0.5).to(dtype),
        "value_up": (torch.randn(num_heads, value_dim, rank) * rank**-0.5).to(dtype),
    }
    plan = AttentionPlan(np.array(query_lens), np.array(seq_lens), table, BLOCK_SIZE, dtype, query.device)
    return Case(query, cache, plan, up)


def check(case: Case, *, like: Case | None = None, tolerance: float | None = None) -> None:
    """The operation against its reference, over the cache of `like` if it is given."""
    actual = mla_attention(case.query, case.cache, case.plan, **case.up, scale=0.3)
    other = like or case
    expected = mla_attention_reference(other.query, other.cache, other.plan, **other.up, scale=0.3)
    assert torch.isfinite(expected).all()
    close = tolerance or TOLERANCE[case.query.dtype]
    torch.testing.assert_close(actual, expected, atol=close, rtol=close)


BATCHES: dict[str, tuple[list[int], list[int]]] = {
    "decodes": ([1, 1, 1, 1], [1, 15, 17, 300]),
    "drafts": ([4, 1, 5], [30, 20, 100]),
    "prompts": ([1, 17, 300], [1, 17, 300]),
    "chunks": ([50, 60], [100, 333]),
    "mixed": ([1, 60, 3, 100, 1], [40, 60, 80, 210, 1]),
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_batches(batch: str, dtype: torch.dtype) -> None:
    check(make_case(*BATCHES[batch], dtype=dtype))


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_heads": 1, "rank": 8, "key_dim": 16, "value_dim": 30},  # absorbing is always cheaper
        {"num_heads": 5, "rank": 64, "rotary_dim": 16, "key_dim": 7, "value_dim": 33},
        {"num_heads": 2, "rank": 512, "rotary_dim": 64, "key_dim": 128, "value_dim": 128},
    ],
)
def test_sizes(sizes: dict[str, int]) -> None:
    check(make_case([1, 40, 2], [33, 70, 18], **sizes))


def test_some_heads_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_EXPANDED_BYTES", 1)
    check(make_case([60, 1], [90, 5]))


@pytest.mark.parametrize("batch", ["decodes", "mixed"])
def test_a_cache_of_8_bits(batch: str) -> None:
    case = make_case(*BATCHES[batch])
    quantized = case._replace(cache=quantize_rows(case.cache))
    check(quantized)
    check(quantized, like=case, tolerance=0.1)


def test_no_tokens() -> None:
    case = make_case([], [])
    assert mla_attention(case.query, case.cache, case.plan, **case.up, scale=0.3).shape == (0, 3 * 14)


@pytest.mark.parametrize("wrong", ["cache", "key_up", "value_up"])
def test_what_does_not_fit_is_refused(wrong: str) -> None:
    case = make_case([1], [5])
    options: dict[str, Any] = {"cache": case.cache, **case.up}
    options[wrong] = options[wrong][..., :-1]
    with pytest.raises(ValueError, match="do not fit"):
        mla_attention(case.query, plan=case.plan, scale=0.3, **options)
