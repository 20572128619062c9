"""Paged attention of one layer: writes keys and values to the cache and attends over it. For models without the decoder
core."""

import torch.nn.functional as F
from torch import Tensor

from pagoda_kernels.attention.paged_attention import paged_attention
from pagoda_kernels.attention.store_kv_cache import store_kv_cache
from pagoda_worker.models.forward_context import ForwardContext
from pagoda_worker.models.model import AttentionLayer


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    context: ForwardContext,
    layer: AttentionLayer,
    index: int,
    *,
    sinks: Tensor | None = None,
) -> Tensor:
    """Write a step's keys and values, and attend.

    Args:
        query: [num_tokens, num_heads, head_dim], rotated if the model rotates.
        key, value: [num_tokens, num_kv_heads, head_dim]; values, or keys and queries, may be narrower than the layer.
        layer: the model's `attention_layers[index]`.
        sinks: [num_heads]; the score of each head for a key that every query sees, whose value is zero.

    Returns:
        [num_tokens, num_heads, value's head_dim], of the query's data type.
    """
    paged = context.paged(index)
    value_dim = value.shape[-1]
    rows = [_wide(x.to(paged.plan.dtype), layer.head_dim) for x in (query, key, value)]
    store_kv_cache(rows[1], rows[2], paged.k_cache, paged.v_cache, paged.slot_mapping, has_skips=context.has_skips)
    attended = paged_attention(
        rows[0],
        paged.k_cache,
        paged.v_cache,
        paged.plan,
        scale=layer.scale,
        window=layer.window,
        softcap=layer.softcap,
        sinks=None if sinks is None else sinks.float(),
    )
    heads = attended.view(attended.shape[0], layer.num_heads, layer.head_dim)
    return heads[..., :value_dim].to(query.dtype)


def _wide(x: Tensor, width: int) -> Tensor:
    """With zeros after each head's values, contiguous."""
    return F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x.contiguous()
