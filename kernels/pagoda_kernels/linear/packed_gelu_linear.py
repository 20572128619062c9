"""Linear layers of encoders on a CPU, with bfloat16 weights as `packed_linear` reads them, and GELU after them."""

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda_kernels.linear.packed_linear import check_packed, dense, dense_rows, packed_linear, packed_linear_reference
from pagoda_kernels.native.library import native


def packed_gelu_linear(x: Tensor, packed: Tensor, out_features: int, *, bias: Tensor | None = None) -> Tensor:
    """gelu(x W^T + bias), summed and activated in float32 and rounded once.

    Args:
        x: [num_tokens, in_features] bfloat16.
        packed: W [out_features, in_features] bfloat16, as `pack_weight` gives it.
        bias: [out_features] bfloat16.

    Returns:
        [num_tokens, out_features] bfloat16.

    Without the C++ kernel, or for other data types, the product is rounded before it is activated.
    """
    check_packed(x, packed, out_features, bias, None)
    kernel = native("packed_gelu_linear") if x.is_cpu and x.dtype == torch.bfloat16 and not x.shape[1] % 2 else None
    if kernel is None:
        return F.gelu(packed_linear(x, packed, out_features, bias=bias))
    out = torch.empty(x.shape[0], out_features, dtype=x.dtype)
    kernel(dense_rows(x), packed, dense(bias), out)
    return out


def packed_gelu_linear_reference(x: Tensor, packed: Tensor, out_features: int, *, bias: Tensor | None = None) -> Tensor:
    """The specification of `packed_gelu_linear`."""
    product = packed_linear_reference(x, packed, out_features, bias=bias, out_dtype=torch.float32)
    return F.gelu(product).to(x.dtype)
