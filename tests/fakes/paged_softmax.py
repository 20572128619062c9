"""One sequence's attention as FlashInfer and FlashAttention describe it: the last query has the last key's place."""

import torch
from torch import Tensor


def paged_softmax(
    query: Tensor, keys: Tensor, values: Tensor, num_keys: int, *, scale: float, causal: bool, left: int, softcap: float
) -> Tensor:
    """[num_queries, num_heads, head_dim] over the first `num_keys` of [num_slots, num_kv_heads, head_dim].

    Args:
        left: keys before its own that a query sees; -1: all.
        softcap: 0: none.
    """
    group = query.shape[1] // keys.shape[1]
    key = keys[:num_keys].float().repeat_interleave(group, dim=1)
    value = values[:num_keys].float().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,lhd->hql", query.float(), key) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    places = torch.arange(num_keys)
    distance = places[num_keys - query.shape[0] :, None] - places
    if causal:
        scores = scores.masked_fill(distance < 0, -torch.inf)
    if left >= 0:
        scores = scores.masked_fill(distance > left, -torch.inf)
    return torch.einsum("hql,lhd->qhd", scores.softmax(dim=-1), value).to(query.dtype)
