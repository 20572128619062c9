"""A gate, and a root-mean-square norm over groups of columns, on what a recurrent layer gives."""

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda_kernels.native.library import NATIVE_DTYPES, native


def gate_and_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, *, num_groups: int = 1, is_gate_first: bool = True
) -> Tensor:
    """norm(x * silu(gate)), or norm(x) * silu(gate); without a weight, x * silu(gate) alone.

    Args:
        x: [num_tokens, size] float32.
        gate: [num_tokens, size].
        weight: [size]; None: there is no norm.
        num_groups: parts of the columns, each with a mean square of its own.

    Returns:
        [num_tokens, size] of gate's data type.
    """
    if x.shape != gate.shape or x.shape[1] % num_groups:
        raise ValueError(f"x {tuple(x.shape)} and gate {tuple(gate.shape)} do not fit {num_groups} groups")
    kernel = native("gate_and_norm") if x.is_cpu and gate.dtype in NATIVE_DTYPES else None
    if (
        kernel is not None
        and gate.stride(1) == 1
        and (weight is None or (weight.dtype == gate.dtype and weight.is_contiguous()))
    ):
        output = torch.empty_like(gate, memory_format=torch.contiguous_format)
        kernel(x.contiguous(), gate, weight, eps, num_groups, is_gate_first, output)
        return output
    return gate_and_norm_reference(x, gate, weight, eps, num_groups=num_groups, is_gate_first=is_gate_first)


def gate_and_norm_reference(
    x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, *, num_groups: int = 1, is_gate_first: bool = True
) -> Tensor:
    """The specification of `gate_and_norm`."""
    opened = F.silu(gate.float())
    if weight is None:
        return (x * opened).to(gate.dtype)
    groups = (x * opened if is_gate_first else x).reshape(x.shape[0], num_groups, -1)
    normed = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)
    output: Tensor = normed.flatten(1) * weight.float()
    return (output if is_gate_first else output * opened).to(gate.dtype)
