"""Gated activations in Triton: a program a part of a row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def act_and_mul(x: Tensor, activation: str) -> Tensor:
    """`pagoda_kernels.layers.act_and_mul.act_and_mul`; contiguous rows. Rounds once."""
    size = x.shape[1] // 2
    out = torch.empty((x.shape[0], size), dtype=x.dtype, device=x.device)
    if out.numel():
        grid = (x.shape[0], triton.cdiv(size, BLOCK))
        _act_and_mul_kernel[grid](x, out, size, x.stride(0), ACTIVATION=activation, BLOCK=BLOCK)
    return out


@triton.jit
def _act_and_mul_kernel(x_ptr, out_ptr, size, row_stride, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row, part)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < size
    gate = tl.load(x_ptr + row * row_stride + columns, mask=is_column, other=0.0).to(tl.float32)  # [BLOCK]
    up = tl.load(x_ptr + row * row_stride + size + columns, mask=is_column, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        active = gate / (1.0 + tl.exp(-gate))
    elif ACTIVATION == "gelu":
        active = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(y)) / 2 is 1 / (1 + exp(-2 y)).
        active = gate / (1.0 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))
    elif ACTIVATION == "quick_gelu":
        active = gate / (1.0 + tl.exp(-1.702 * gate))
    else:
        tl.static_assert(ACTIVATION == "relu" or ACTIVATION == "relu2")
        active = tl.maximum(gate, 0.0)
        if ACTIVATION == "relu2":
            active = active * active
    tl.store(out_ptr + row * size + columns, (active * up).to(out_ptr.dtype.element_ty), mask=is_column)
