"""Layer normalization of rows."""

import torch.nn.functional as F
from torch import Tensor

from pagoda_kernels.native.library import NATIVE_DTYPES, native


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias, rounded once.

    Args:
        x: [..., size].
        weight, bias: [size]; None: nothing is added.

    Returns:
        The shape of x.

    On the CPU, float32 and bfloat16 with weights of the same data type go to csrc/decoder/layer_norm.cpp.
    Source: Ba et al. 2016 (arXiv 1607.06450).
    """
    is_plain = x.is_cpu and x.dtype in NATIVE_DTYPES and x.is_contiguous() and weight.is_contiguous()
    is_plain = (
        is_plain and weight.dtype == x.dtype and (bias is None or (bias.dtype == x.dtype and bias.is_contiguous()))
    )
    if weight.shape != x.shape[-1:] or (bias is not None and bias.shape != weight.shape):
        raise ValueError(f"weight {tuple(weight.shape)} must have the {x.shape[-1]} values of a row, as bias")
    kernel = native("layer_norm") if is_plain else None
    if kernel is None:
        return layer_norm_reference(x, weight, bias, eps)
    out = x.new_empty(x.shape)
    kernel(x, weight, bias, eps, out)
    return out


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """The specification of `layer_norm`."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
