"""Attention of whole sequences that lie one after the other, without a cache."""

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda_kernels.native.library import NATIVE_DTYPES, native


def sequence_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Sequence[int],
    *,
    scale: float,
    is_causal: bool = False,
    slopes: Tensor | None = None,
) -> Tensor:
    """softmax(q k^T * scale - slope * distance) v, each token over the tokens of its own sequence.

    Args:
        query: [num_tokens, num_heads, head_dim].
        key: [num_tokens, num_kv_heads, head_dim]; num_heads is a multiple of num_kv_heads.
        value: [num_tokens, num_kv_heads, value_dim].
        starts: first token of each sequence, then the number of tokens.
        is_causal: a token sees those up to itself.
        slopes: [num_heads] float32 on the same device; what a score loses for each token between query and key, in
            both directions (ALiBi). None: nothing.

    Returns:
        [num_tokens, num_heads, value_dim].

    On the CPU, float32 and bfloat16 go to csrc/attention/sequence_attention.cpp: sums are float32, and a sequence's
    outputs are the same to the bit whatever stands beside it. With instructions for bfloat16, the softmax is rounded to
    bfloat16 before values are summed up. `benchmarks/cpu/embeddings.py` measures it.
    """
    if query.shape[1] % key.shape[1] or key.shape[:2] != value.shape[:2] or query.shape[2] != key.shape[2]:
        raise ValueError(f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)} do not fit")
    if slopes is not None and (slopes.shape != query.shape[1:2] or slopes.dtype != torch.float32):
        raise ValueError(f"slopes {tuple(slopes.shape)} {slopes.dtype}, must be {query.shape[1]} of torch.float32")
    kernel = native("sequence_attention") if query.is_cpu and query.dtype in NATIVE_DTYPES else None
    if kernel is None:
        return sequence_attention_reference(query, key, value, starts, scale=scale, is_causal=is_causal, slopes=slopes)
    given = [one if one.stride(2) == 1 else one.contiguous() for one in (query, key, value)]
    out = query.new_empty((query.shape[0], query.shape[1], value.shape[2]))
    kernel(*given, list(starts), scale, is_causal, None if slopes is None else slopes.contiguous(), out)
    return out


def sequence_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Sequence[int],
    *,
    scale: float,
    is_causal: bool = False,
    slopes: Tensor | None = None,
) -> Tensor:
    """The specification of `sequence_attention`."""
    out = query.new_empty((query.shape[0], query.shape[1], value.shape[2]))
    for start, end in pairwise(starts):
        q, k, v = (one[start:end].transpose(0, 1)[None] for one in (query, key, value))
        mask: Tensor | None = None
        if slopes is not None:
            places = torch.arange(end - start, device=query.device)
            distance = places[:, None] - places
            mask = -slopes[:, None, None].to(query.dtype) * distance.abs()
            mask = mask.masked_fill(distance < 0, -torch.inf) if is_causal else mask
        part = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=is_causal and mask is None and end - start > 1,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        out[start:end] = part[0].transpose(0, 1)
    return out
