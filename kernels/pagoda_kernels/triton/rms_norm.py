"""Root-mean-square normalisation in Triton: a row a program, read once."""

import torch
import triton
import triton.language as tl
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, weight_offset: float = 0.0) -> Tensor:
    """`pagoda_kernels.layers.rms_norm.rms_norm`; x of two or three dimensions, contiguous in the last."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch_rms_norm(x, x, weight, out, out, eps, weight_offset, alpha=1.0, has_residual=False)
    return out


def launch_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    out: Tensor,
    total: Tensor,
    eps: float,
    weight_offset: float,
    *,
    alpha: float,
    has_residual: bool,
) -> None:
    """Normalise x, or with a residual (of x's shape, contiguous) residual + alpha * x, which goes into `total`."""
    if x.stride(-1) != 1 or x.dim() not in (2, 3):
        raise ValueError(f"x has shape {tuple(x.shape)} and strides {x.stride()}, must be rows of contiguous values")
    dim = x.shape[-1]
    num_rows = x.numel() // dim
    if not num_rows:
        return
    block = triton.next_power_of_2(dim)
    _rms_norm_kernel[(num_rows,)](
        x,
        residual,
        weight,
        out,
        total,
        x.shape[1] if x.dim() == 3 else 1,
        x.stride(0),
        x.stride(1) if x.dim() == 3 else 0,
        eps,
        weight_offset,
        alpha,
        DIM=dim,
        BLOCK=block,
        HAS_RESIDUAL=has_residual,
        num_warps=min(max(block // 512, 1), 8),
    )


@triton.jit
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, total_ptr,
    num_heads, token_stride, head_stride, eps, weight_offset, alpha,
    DIM: tl.constexpr, BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Program: one row of x, and of out, residual and total, which are contiguous."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_column = columns < DIM
    x_ptr += row // num_heads * token_stride + row % num_heads * head_stride
    x = tl.load(x_ptr + columns, mask=is_column, other=0.0).to(tl.float32)  # [BLOCK]
    if HAS_RESIDUAL:
        x = tl.load(residual_ptr + row * DIM + columns, mask=is_column, other=0.0).to(tl.float32) + alpha * x
        rounded = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * DIM + columns, rounded, mask=is_column)
        x = rounded.to(tl.float32)  # what the next layers see is what is normalised
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / DIM + eps)
    weight = tl.load(weight_ptr + columns, mask=is_column, other=0.0).to(tl.float32) + weight_offset
    tl.store(out_ptr + row * DIM + columns, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=is_column)
