"""Rotary position embedding, of pairs of halves (Llama in transformers' form) or of neighbours (Cohere)."""

import torch
from torch import Tensor


def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor, *, is_interleaved: bool = False) -> Tensor:
    """Rotate each pair of a head's first rotary_dim values by its position's angle; the rest pass as they are.

    Args:
        x: [num_tokens, num_heads, head_dim].
        cos, sin: [num_tokens, 1, rotary_dim / 2] float32, of each token's position; rotary_dim <= head_dim.
        is_interleaved: pairs are (x[2 i], x[2 i + 1]); else (x[i], x[i + rotary_dim / 2]).
    Source: Su et al. 2021 (arXiv 2104.09864).
    """
    if cos.shape[-1] * 2 > x.shape[-1]:
        raise ValueError(f"x has head_dim {x.shape[-1]}, cos has {cos.shape[-1]} angles")
    return rotary_embedding_reference(x, cos, sin, is_interleaved=is_interleaved)


def rotary_embedding_reference(x: Tensor, cos: Tensor, sin: Tensor, *, is_interleaved: bool = False) -> Tensor:
    """The specification of `rotary_embedding`; products in float32, cast at the end."""
    rotary_dim = cos.shape[-1] * 2
    if rotary_dim < x.shape[-1]:
        rotated = rotary_embedding_reference(x[..., :rotary_dim], cos, sin, is_interleaved=is_interleaved)
        return torch.cat((rotated, x[..., rotary_dim:]), dim=-1)
    if is_interleaved:
        first, second = x[..., ::2], x[..., 1::2]
        pairs = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return pairs.flatten(-2).to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
