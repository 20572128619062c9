"""The gate of gated feed-forward layers (SwiGLU and relatives)."""

import torch.nn.functional as F
from torch import Tensor


def silu_and_mul(x: Tensor) -> Tensor:
    """silu(gate) * up.

    Args:
        x: [num_tokens, 2 * intermediate_size]; the first half of the columns is gate, the second up.

    Returns:
        [num_tokens, intermediate_size].
    Source: Shazeer 2020 (arXiv 2002.05202).
    """
    if x.shape[-1] % 2:
        raise ValueError(f"x has {x.shape[-1]} columns, must be even")
    return silu_and_mul_reference(x)


def silu_and_mul_reference(x: Tensor) -> Tensor:
    """The specification of `silu_and_mul`."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up
