"""Root-mean-square normalisation."""

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda_kernels.native.library import NATIVE_DTYPES, native
from pagoda_kernels.selection import TRITON_DTYPES, triton_kernel


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, weight_offset: float = 0.0) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (weight + weight_offset) over the last dimension, computed in float32.

    Args:
        x: [..., hidden_size].
        weight: [hidden_size].
        eps: added to the mean square.
        weight_offset: some models store the weight less one (Gemma).
    Source: Zhang and Sennrich 2019 (arXiv 1910.07467).
    """
    if x.shape[-1] != weight.shape[0]:
        raise ValueError(f"x has {x.shape[-1]} columns, weight has {weight.shape[0]}")
    weight = weight.contiguous()
    kernel = triton_kernel("rms_norm", x)
    if kernel is not None and x.dtype in TRITON_DTYPES and x.dim() in (2, 3) and x.stride(-1) == 1:
        normed: Tensor = kernel(x, weight, eps, weight_offset=weight_offset)
        return normed
    kernel = native("rms_norm") if x.is_cpu else None
    if kernel is not None and x.dtype == weight.dtype in NATIVE_DTYPES:
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        kernel(rows, weight, out, eps, weight_offset)
        return out
    if weight_offset:
        return F.rms_norm(x.float(), weight.shape, weight.float() + weight_offset, eps).to(x.dtype)
    return F.rms_norm(x, weight.shape, weight, eps)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, *, weight_offset: float = 0.0) -> Tensor:
    """The specification of `rms_norm`."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return ((weight.float() + weight_offset) * normed).to(x.dtype)
