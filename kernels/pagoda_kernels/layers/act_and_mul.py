"""The gate of gated feed-forward layers (SwiGLU, GeGLU and relatives)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda_kernels.native.library import NATIVE_DTYPES, native
from pagoda_kernels.selection import TRITON_DTYPES, triton_kernel


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _relu_squared(x: Tensor) -> Tensor:
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "relu": F.relu,
    "relu2": _relu_squared,
}
"""In the order of the enum in csrc/ops.h, whose last one is ClampedSwiglu."""
_INDICES = {name: index for index, name in enumerate(ACTIVATIONS)}


@dataclass(frozen=True, kw_only=True, slots=True)
class ClampedSwiglu:
    """With g = min(gate, limit) and u = clamp(up, -limit, limit): g * sigmoid(alpha * g) * (u + up_offset).

    gpt-oss has alpha 1.702, limit 7 and up_offset 1. Source: OpenAI 2025 (arXiv 2508.10925).
    """

    limit: float
    alpha: float = 1.0
    up_offset: float = 0.0


def act_and_mul(x: Tensor, activation: str | ClampedSwiglu) -> Tensor:
    """activation(gate) * up, or a ClampedSwiglu of both.

    Args:
        x: [num_tokens, 2 * intermediate_size]; the first half of the columns is gate, the second up.
        activation: a name in ACTIVATIONS, or a ClampedSwiglu, which Triton has no kernel for.

    Returns:
        [num_tokens, intermediate_size]. The kernels round once, PyTorch rounds the activation as well.
    Source: Shazeer 2020 (arXiv 2002.05202).
    """
    num_tokens, columns = x.shape
    if columns % 2:
        raise ValueError(f"x has {columns} columns, must be even")
    kernel = None if isinstance(activation, ClampedSwiglu) else triton_kernel("act_and_mul", x)
    if kernel is not None and x.dtype in TRITON_DTYPES and x.stride(1) == 1:
        gated: Tensor = kernel(x, activation)
        return gated
    kernel = native("act_and_mul") if x.is_cpu else None
    if kernel is not None and x.dtype in NATIVE_DTYPES and x.stride(1) == 1:
        out = x.new_empty((num_tokens, columns // 2))
        kernel(x, out, *activation_arguments(activation))
        return out
    return act_and_mul_reference(x, activation)


def activation_arguments(activation: str | ClampedSwiglu) -> tuple[int, float, float, float]:
    """What the C++ kernels know an activation by: its number, and the three of a ClampedSwiglu."""
    if isinstance(activation, ClampedSwiglu):
        return len(_INDICES), activation.limit, activation.alpha, activation.up_offset
    return _INDICES[activation], 0.0, 1.0, 0.0


def act_and_mul_reference(x: Tensor, activation: str | ClampedSwiglu) -> Tensor:
    """The specification of `act_and_mul`."""
    gate, up = x.chunk(2, dim=-1)
    if isinstance(activation, ClampedSwiglu):
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
        return gate * torch.sigmoid(activation.alpha * gate) * (up + activation.up_offset)
    return ACTIVATIONS[activation](gate) * up
