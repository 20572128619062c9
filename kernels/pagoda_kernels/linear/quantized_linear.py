"""A linear layer whose weights are small integers with a scale for each group of inputs."""

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda_kernels.linear.packed_linear import dense
from pagoda_kernels.linear.quantized_matrix import PackedMatrix, unpack
from pagoda_kernels.linear.quantized_rows import RowMatrix, fits_rows, unpack_row_matrix
from pagoda_kernels.native.library import NATIVE_DTYPES, cpu_level, native
from pagoda_kernels.selection import TRITON_DTYPES, triton_kernel

_MAX_PART = 128
"""Inputs that the C++ kernel sums up before it scales: groups that are larger must be multiples."""
_TINY = 2.0**-100
"""Inputs that are all smaller become 0 when they are quantized."""


def quantized_linear(
    x: Tensor,
    weight: PackedMatrix | RowMatrix,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """x W^T + bias + residual, rounded once.

    On a CPU a row of the result does not depend on the other rows of x. A weight that `quantizes_inputs` meets
    bfloat16 x as `quantize_inputs` gives it, in products of integers, whose sums are exact within a part; any other x
    stays as it is, and the C++ kernel takes a tile of the weight at a time to x's data type in the nearest cache.

    On a GPU the Triton kernel takes codes to x's data type in registers, sums in float32 and divides the inputs among
    programs for a few rows, so sums depend on how many rows there are. Not measured: `benchmarks/gpu/run_all.py` does.

    Args:
        x: [num_tokens, num_inputs] float32, bfloat16 or float16, which the C++ kernel computes as float32.
        weight: a PackedMatrix for the C++ kernel, a RowMatrix for the Triton kernel; 4 or 8 bits, with groups or one
            scale an output, with or without zero points.
        bias: [num_outputs], as x.
        residual: [num_tokens, num_outputs], as x.
        out_dtype: x's, unless it is given: float32.
    Source: bfloat16 products with exact integers, as in Frantar et al. 2022 (arXiv 2210.17323); inputs in 8 bits by
        groups with 4-bit weights are llama.cpp's Q8 activations, by rows Dettmers et al. 2022's (arXiv 2208.07339).
    """
    if x.shape[-1] != weight.num_inputs:
        raise ValueError(f"x has {x.shape[-1]} columns, the weights have {weight.num_inputs} inputs")
    for name, other in (("bias", bias), ("residual", residual)):
        if other is not None and other.dtype != x.dtype:
            raise ValueError(f"{name} is {other.dtype}, must be {x.dtype} as x")
    out_dtype = out_dtype or x.dtype
    if out_dtype not in (x.dtype, torch.float32):
        raise ValueError(f"out_dtype is {out_dtype}, must be {x.dtype} or torch.float32")
    if isinstance(weight, RowMatrix):
        return _on_rows(x, weight, bias, residual, out_dtype)
    if x.dtype == torch.float16:
        wide = (None if other is None else other.float() for other in (bias, residual))
        return quantized_linear(x.float(), weight, *wide).to(out_dtype)
    kernel = native("quantized_linear") if x.is_cpu else None
    if kernel is None or x.dtype not in NATIVE_DTYPES or not has_kernel_for(weight):
        return quantized_linear_reference(x, weight, bias, residual, out_dtype=out_dtype)
    rows = _rows(x, weight.num_inputs)
    added = None if residual is None else _rows(residual, weight.num_outputs)
    out = torch.empty(*x.shape[:-1], weight.num_outputs, dtype=out_dtype)
    fields = weight.codes, weight.scales, weight.zeros, weight.group_size, weight.quantizes_inputs
    kernel(rows, *fields, dense(bias), added, out)
    return out


def _on_rows(
    x: Tensor, weight: RowMatrix, bias: Tensor | None, residual: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """`quantized_linear` with a weight for a GPU."""
    kernel = triton_kernel("quantized_linear", x)
    if kernel is None or x.dtype not in TRITON_DTYPES or not fits_rows(weight.num_inputs, weight.group_size):
        return quantized_linear_reference(x, weight, bias, residual, out_dtype=out_dtype)
    added = None if residual is None else _rows(residual, weight.num_outputs)
    out: Tensor = kernel(_rows(x, weight.num_inputs), weight, dense(bias), added, out_dtype=out_dtype)
    return out.view(*x.shape[:-1], weight.num_outputs)


def _rows(x: Tensor, columns: int) -> Tensor:
    return x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, columns).contiguous()


def has_kernel_for(weight: PackedMatrix) -> bool:
    """Whether the C++ kernel takes groups like these."""
    group_size = weight.group_size
    return group_size <= _MAX_PART or group_size % _MAX_PART == 0 or group_size >= weight.num_inputs


def multiplies_integers() -> bool:
    """Whether the C++ kernel takes inputs to 8 bits where weights ask for it: only with AVX512-VNNI."""
    return cpu_level() in ("amx", "avx512")


def quantize_inputs(x: Tensor, part: int) -> Tensor:
    """What is left of x after 8 bits: in each part of a row, its largest magnitude is 127 steps.

    Args:
        x: [..., num_inputs] of any float type.
        part: inputs that share a step; the last one may be smaller.

    Returns:
        As x, float32.
    """
    num_inputs = x.shape[-1]
    padded = F.pad(x.float(), (0, -num_inputs % part))
    parts = padded.view(*x.shape[:-1], padded.shape[-1] // part, part)
    largest = parts.abs().amax(-1, keepdim=True)
    numbers = (parts * (torch.full_like(largest, 127) / largest)).round()  # 127 / largest would divide 1 by it
    return torch.where(largest < _TINY, 0.0, numbers * (largest / 127)).flatten(-2)[..., :num_inputs]


def quantized_linear_reference(
    x: Tensor,
    weight: PackedMatrix | RowMatrix,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The specification of `quantized_linear`."""
    integers = unpack_row_matrix(weight) if isinstance(weight, RowMatrix) else unpack(weight)
    if x.dtype == torch.bfloat16 and isinstance(weight, PackedMatrix) and weight.quantizes_inputs:
        x, out_dtype = quantize_inputs(x, min(weight.group_size, _MAX_PART)), out_dtype or x.dtype
    out = F.linear(x.float(), integers.dequantize().to(x.device))
    for other in (bias, residual):
        if other is not None:
            out = out + other.float()
    return out.to(out_dtype or x.dtype)
