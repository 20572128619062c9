"""Random batches for attention."""

import numpy as np
import torch
from torch import Tensor

from pagoda_kernels.attention.plan import AttentionPlan

BLOCK_SIZE = 16


def attention_case(
    query_lens: list[int], seq_lens: list[int], num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor, AttentionPlan]:  # fmt: skip
    """A query, caches with random blocks, NaN where no sequence has one, and the plan."""
    num_blocks = [-(-length // BLOCK_SIZE) for length in seq_lens]
    total = sum(num_blocks) + 2
    ids = torch.randperm(total).int().numpy()
    table = np.zeros((len(seq_lens), max(num_blocks)), dtype=np.int32)
    used = 0
    for row, count in enumerate(num_blocks):
        table[row, :count] = ids[used : used + count]
        used += count
    caches = [torch.randn(total, BLOCK_SIZE, num_kv_heads, head_dim, device=device, dtype=dtype) for _ in range(2)]
    for cache in caches:
        cache[torch.from_numpy(ids[used:]).long().to(device)] = torch.nan
    query = torch.randn(sum(query_lens), num_heads, head_dim, device=device, dtype=dtype)
    plan = AttentionPlan(np.array(query_lens), np.array(seq_lens), table, BLOCK_SIZE, dtype, device)
    return query, *caches, plan
