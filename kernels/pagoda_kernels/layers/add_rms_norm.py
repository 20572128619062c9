"""Residual sum and root-mean-square normalisation in one."""

import torch
from torch import Tensor

from pagoda_kernels.layers.rms_norm import rms_norm, rms_norm_reference
from pagoda_kernels.selection import TRITON_DTYPES, triton_kernel


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, alpha: float = 1.0, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """total = residual + alpha * x, and rms_norm(total).

    Args:
        x, residual: [num_tokens, hidden_size], same dtype.
        weight: [hidden_size].
        eps, weight_offset: as in `rms_norm`.

    Returns:
        total and its norm, as x; total is rounded before it is normalised.
    """
    if x.shape != residual.shape or x.shape[-1] != weight.shape[0]:
        raise ValueError(f"x is {tuple(x.shape)}, residual {tuple(residual.shape)}, weight {tuple(weight.shape)}")
    kernel = triton_kernel("add_rms_norm", x)
    if kernel is not None and x.dtype == residual.dtype in TRITON_DTYPES and x.dim() == 2 and x.stride(1) == 1:
        both: tuple[Tensor, Tensor] = kernel(
            x, residual.contiguous(), weight.contiguous(), eps, alpha=alpha, weight_offset=weight_offset
        )
        return both
    total = torch.add(residual, x, alpha=alpha)
    return total, rms_norm(total, weight, eps, weight_offset=weight_offset)


def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, alpha: float = 1.0, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The specification of `add_rms_norm`."""
    total = (residual.float() + alpha * x.float()).to(x.dtype)
    return total, rms_norm_reference(total, weight, eps, weight_offset=weight_offset)
