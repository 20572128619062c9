"""Pools the hidden states of packed sequences to one vector each. Knows only tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pagoda_common.config.pooler_config import PoolingType


def pool_sequences(hidden: Tensor, starts: Sequence[int], poolings: Sequence[PoolingType]) -> Tensor:
    """One vector for each sequence; the results of several poolings are concatenated.

    Args:
        hidden: [num_tokens, size] float32, packed sequences.
        starts: first token of each sequence, then the number of tokens.

    Returns:
        [num_sequences, size * len(poolings)] float32.
    """
    bounds = torch.tensor(starts, device=hidden.device)
    parts = [_pool(hidden, bounds[:-1], bounds.diff(), pooling) for pooling in poolings]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _pool(hidden: Tensor, firsts: Tensor, lengths: Tensor, pooling: PoolingType) -> Tensor:
    if pooling == "cls":
        return hidden.index_select(0, firsts)
    if pooling == "last":
        return hidden.index_select(0, firsts + lengths - 1)
    if pooling == "max":
        return torch.segment_reduce(hidden, "max", lengths=lengths, axis=0)
    if pooling == "mean":
        return torch.segment_reduce(hidden, "mean", lengths=lengths, axis=0)
    if pooling == "mean_sqrt_len":
        return torch.segment_reduce(hidden, "sum", lengths=lengths, axis=0) / lengths[:, None].sqrt()
    if pooling == "weightedmean":
        places = torch.arange(hidden.shape[0], device=hidden.device)
        weights = (places - firsts.repeat_interleave(lengths) + 1).float()
        sums = torch.segment_reduce(hidden * weights[:, None], "sum", lengths=lengths, axis=0)
        return sums / (lengths * (lengths + 1) / 2)[:, None]
    raise ValueError(f"{pooling} gives no single vector")
