"""Products of sorted rows with the matrices of experts in Triton: a program has some rows of one expert, some outputs.

Matrices lie where their layers keep them; a table has their addresses. Source: grouped products over sorted tokens,
Gale et al. 2022 (MegaBlocks, arXiv 2211.15841).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagoda_kernels.moe.grouped_linear import ExpertMatrices, SortedRows
from pagoda_kernels.triton.launch import is_interpreted

OUTPUTS, INPUTS = 64, 64
"""Of a tile; chosen by shared memory, not measured."""
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def grouped_linear(x: Tensor, matrices: ExpertMatrices, rows: SortedRows, *, top_k: int) -> Tensor:
    """`pagoda_kernels.moe.grouped_linear.grouped_linear`, whose arguments these are."""
    num_outputs, num_inputs = matrices.weights[0].shape
    out = torch.empty(rows.choices.shape[0], num_outputs, dtype=x.dtype, device=x.device)
    if not rows.experts.shape[0]:
        return out
    grid = (triton.cdiv(num_outputs, OUTPUTS), rows.experts.shape[0])
    biases = matrices.bias_addresses
    _grouped_linear_kernel[grid](
        x,
        matrices.weight_addresses,
        matrices.weight_addresses if biases is None else biases,
        rows.choices,
        rows.experts,
        out,
        len(matrices.weights),
        num_outputs,
        num_inputs,
        x.stride(0),
        TOP_K=top_k,
        HAS_BIAS=biases is not None,
        ROWS=rows.block_rows,
        OUTPUTS=OUTPUTS,
        INPUTS=INPUTS,
        TYPE=_TYPES[x.dtype],
        IS_WIDE=x.dtype == torch.float32 or is_interpreted(_grouped_linear_kernel),
        num_warps=4,
        num_stages=3,
    )
    return out


@triton.jit
def _grouped_linear_kernel(
    x_ptr,
    weights_ptr,  # [num_experts] addresses
    biases_ptr,
    choices_ptr,
    experts_ptr,
    out_ptr,
    num_experts,
    num_outputs,
    num_inputs,
    x_stride,
    TOP_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    TYPE: tl.constexpr,
    IS_WIDE: tl.constexpr,
):
    block = tl.program_id(1).to(tl.int64)
    expert = tl.load(experts_ptr + block)
    if expert >= num_experts:
        return
    weight_ptr = tl.load(weights_ptr + expert).to(tl.pointer_type(TYPE))
    slots = block * ROWS + tl.arange(0, ROWS)  # [ROWS]
    choices = tl.load(choices_ptr + slots)
    is_there = choices >= 0
    sources = choices // TOP_K if TOP_K else slots
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)  # [OUTPUTS]
    inputs = tl.arange(0, INPUTS)
    x_rows = x_ptr + sources[:, None] * x_stride  # [ROWS, 1]
    w_rows = weight_ptr + outputs[None, :].to(tl.int64) * num_inputs  # [1, OUTPUTS]
    total = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    for start in range(0, num_inputs, INPUTS):
        k = start + inputs
        x = tl.load(x_rows + k[None, :], mask=is_there[:, None] & (k < num_inputs)[None, :], other=0.0)
        w = tl.load(w_rows + k[:, None], mask=(k < num_inputs)[:, None] & (outputs < num_outputs)[None, :], other=0.0)
        if IS_WIDE:
            total += tl.dot(x.to(tl.float32), w.to(tl.float32), input_precision="ieee")
        else:
            total += tl.dot(x, w)
    if HAS_BIAS:
        bias_ptr = tl.load(biases_ptr + expert).to(tl.pointer_type(TYPE))
        bias = tl.load(bias_ptr + outputs, mask=outputs < num_outputs, other=0.0)
        total += bias.to(tl.float32)[None, :]
    places = out_ptr + slots[:, None] * num_outputs + outputs[None, :]
    tl.store(places, total.to(TYPE), mask=is_there[:, None] & (outputs < num_outputs)[None, :])
