"""Activations of feed-forward layers without a gate."""

from torch import Tensor

from pagoda_kernels.layers.act_and_mul import ACTIVATIONS, activation_arguments
from pagoda_kernels.native.library import NATIVE_DTYPES, native


def activate(x: Tensor, activation: str) -> Tensor:
    """activation(x), rounded once.

    Args:
        x: of any shape.
        activation: a name in ACTIVATIONS.

    On the CPU, float32 and bfloat16 go to csrc/decoder/activate.cpp.
    """
    kernel = native("activate") if x.is_cpu and x.dtype in NATIVE_DTYPES and x.is_contiguous() else None
    if kernel is None:
        return activate_reference(x, activation)
    out = x.new_empty(x.shape)
    kernel(x, out, activation_arguments(activation)[0])
    return out


def activate_reference(x: Tensor, activation: str) -> Tensor:
    """The specification of `activate`."""
    return ACTIVATIONS[activation](x)
