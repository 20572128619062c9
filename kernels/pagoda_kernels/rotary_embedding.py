"""Rotary position embedding on halves (the form of transformers and Llama checkpoints there)."""

import torch
from torch import Tensor


def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + head_dim / 2]) by its position's angle.

    Args:
        x: [num_tokens, num_heads, head_dim].
        cos, sin: [num_tokens, 1, head_dim / 2] float32, of each token's position.
    Source: Su et al. 2021 (arXiv 2104.09864).
    """
    if cos.shape[-1] * 2 != x.shape[-1]:
        raise ValueError(f"x has head_dim {x.shape[-1]}, cos has {cos.shape[-1]} angles")
    return rotary_embedding_reference(x, cos, sin)


def rotary_embedding_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The specification of `rotary_embedding`; products in float32, cast at the end."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
