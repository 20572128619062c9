"""Keys and values of 8 bits: int8 with a scale in each row of the cache, or floats.

An int8 row, of one token and KV head, is the head's numbers, zeros up to a multiple of 4, and the 4 bytes of a float32
scale; so blocks are copied and swapped as those of any other cache. Zeros are zeros: a fresh cache needs no
initialisation.

An FP8 row is the head's numbers as float8 e4m3, as they are: the scale is 1, which is vLLM's default as well. A float's
error is relative, so a scale would gain nothing but room at the ends (448, and 2^-9 below), and rows without one are
aligned for the widest loads. Source of the format: Micikevicius et al. 2022 (arXiv 2209.05433).
"""

import torch
from torch import Tensor

SCALE_BYTES = 4
MAX_CODE = 127
FP8 = torch.float8_e4m3fn
MAX_FP8 = 448.0


def cache_width(head_dim: int, dtype: torch.dtype) -> int:
    """Elements of one token and KV head in a cache of this data type."""
    return aligned(head_dim) + SCALE_BYTES if dtype == torch.int8 else head_dim


def quantize_rows(x: Tensor) -> Tensor:
    """[..., head_dim] to rows [..., cache_width] int8: x ≈ code * scale, scale = max |x| / 127, ties to even.

    A NaN or infinity makes the scale one, and so the whole row.
    """
    head_dim = x.shape[-1]
    wide = x.float()
    peak = wide.abs().amax(-1, keepdim=True)
    # A tensor as divisor: on CUDA, torch multiplies by the reciprocal of a number, and ties would fall otherwise.
    scale = peak / peak.new_full((), MAX_CODE)
    codes = (wide / scale).round().clamp(-MAX_CODE, MAX_CODE).nan_to_num(0)
    rows = torch.zeros(*x.shape[:-1], cache_width(head_dim, torch.int8), dtype=torch.int8, device=x.device)
    rows[..., :head_dim] = codes.to(torch.int8)
    rows[..., -SCALE_BYTES:] = scale.contiguous().view(torch.int8)
    return rows


def dequantize_rows(rows: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Rows of `quantize_rows` to [..., head_dim] of `dtype`."""
    return (rows[..., :head_dim].float() * scales_of(rows)[..., None]).to(dtype)


def to_fp8(x: Tensor) -> Tensor:
    """The nearest numbers, ties to even; beyond 448 it is 448. Infinity has no code, and is NaN."""
    wide = x.float()
    return torch.where(wide.isinf(), torch.nan, wide).clamp(-MAX_FP8, MAX_FP8).to(FP8)


def holds(cache: Tensor, dtype: torch.dtype) -> bool:
    """Whether this may be the cache of keys or values of `dtype`: of that data type, or of one of the two of 8 bits."""
    return cache.dtype in (dtype, torch.int8, FP8)


def scales_of(rows: Tensor) -> Tensor:
    """[...] float32, a view into rows [..., cache_width]."""
    return rows[..., -SCALE_BYTES:].view(torch.float32)[..., 0]


def aligned(head_dim: int) -> int:
    """Bytes of an int8 row before its scale."""
    return -(-head_dim // SCALE_BYTES) * SCALE_BYTES
