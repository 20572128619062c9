"""Keys and values as int8 with a float32 scale for each token and KV head, both in one row of the cache.

A row is the head's numbers, zeros up to a multiple of 4, and the 4 bytes of the scale; so blocks are copied and swapped
as those of any other cache. Zeros are zeros: a fresh cache needs no initialisation.
"""

import torch
from torch import Tensor

SCALE_BYTES = 4
MAX_CODE = 127


def cache_width(head_dim: int, dtype: torch.dtype) -> int:
    """Elements of one token and KV head in a cache of this data type."""
    return _aligned(head_dim) + SCALE_BYTES if dtype == torch.int8 else head_dim


def quantize_rows(x: Tensor) -> Tensor:
    """[..., head_dim] to rows [..., cache_width] int8: x ≈ code * scale, scale = max |x| / 127, ties to even.

    A NaN or infinity makes the scale one, and so the whole row.
    """
    head_dim = x.shape[-1]
    wide = x.float()
    scale = wide.abs().amax(-1, keepdim=True) / MAX_CODE
    codes = (wide / scale).round().clamp(-MAX_CODE, MAX_CODE).nan_to_num(0)
    rows = torch.zeros(*x.shape[:-1], cache_width(head_dim, torch.int8), dtype=torch.int8, device=x.device)
    rows[..., :head_dim] = codes.to(torch.int8)
    rows[..., -SCALE_BYTES:] = scale.contiguous().view(torch.int8)
    return rows


def dequantize_rows(rows: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Rows of `quantize_rows` to [..., head_dim] of `dtype`."""
    return (rows[..., :head_dim].float() * scales_of(rows)[..., None]).to(dtype)


def scales_of(rows: Tensor) -> Tensor:
    """[...] float32, a view into rows [..., cache_width]."""
    return rows[..., -SCALE_BYTES:].view(torch.float32)[..., 0]


def _aligned(head_dim: int) -> int:
    return -(-head_dim // SCALE_BYTES) * SCALE_BYTES
