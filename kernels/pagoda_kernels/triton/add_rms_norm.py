"""Residual sum and root-mean-square normalisation in one Triton kernel."""

import torch
from torch import Tensor

from pagoda_kernels.triton.rms_norm import launch_rms_norm


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, alpha: float = 1.0, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """`pagoda_kernels.layers.add_rms_norm.add_rms_norm`; the residual contiguous."""
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch_rms_norm(x, residual, weight, normed, total, eps, weight_offset, alpha=alpha, has_residual=True)
    return total, normed
