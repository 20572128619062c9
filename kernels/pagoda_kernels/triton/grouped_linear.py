"""Products of sorted rows with the matrices of experts in Triton: a program has some rows of one expert, some outputs.

Matrices lie where their layers keep them; a table has their addresses. FP8 and FP4 become numbers of the activations'
type in registers, which holds each of them exactly. A scale of FP8 is on the sum of its group, in float32. A scale of
FP4, a power of two, is on the numbers: groups of 32 are too small for sums of their own. The matrix of small floats is
the first operand of the product, which may come from registers.

Sources: grouped products over sorted tokens, Gale et al. 2022 (MegaBlocks, arXiv 2211.15841); MXFP4, OCP Microscaling
Formats 1.0.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagoda_kernels.linear.scaled_matrix import FP4_GROUP, ScaledMatrix
from pagoda_kernels.moe.grouped_linear import ExpertMatrices, SortedRows
from pagoda_kernels.triton.launch import is_interpreted, max_shared_bytes


class Tile(NamedTuple):
    """The tile of one program, and its launch options."""

    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


TILES = {16: Tile(64, 128, 4, 3), 32: Tile(128, 128, 4, 3), 64: Tile(128, 64, 8, 3), 128: Tile(256, 64, 8, 3)}
"""By rows of a block: the fastest of those that were measured on an H200 at Qwen3-30B-A3B's shape."""
SCALED_TILES = {16: Tile(64, 128, 4, 4), 32: Tile(64, 128, 4, 4), 64: Tile(128, 128, 8, 3), 128: Tile(128, 128, 8, 3)}
"""The same of FP8 and FP4. Chosen by shared memory and registers; not measured."""
MIN_INPUTS = 32
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def grouped_linear(
    x: Tensor, matrices: ExpertMatrices, rows: SortedRows, *, top_k: int, tile: Tile | None = None
) -> Tensor:
    """`pagoda_kernels.moe.grouped_linear.grouped_linear`, whose arguments these are.

    Args:
        tile: None chooses.
    """
    out = torch.empty(rows.choices.shape[0], matrices.num_outputs, dtype=x.dtype, device=x.device)
    if not rows.experts.shape[0]:
        return out
    first = matrices.weights[0]
    if isinstance(first, ScaledMatrix):
        _launch_scaled(x, matrices, first, rows, out, top_k=top_k, tile=tile)
        return out
    num_outputs, num_inputs = first.shape
    is_wide = x.dtype == torch.float32 or is_interpreted(_grouped_linear_kernel)
    tile = tile or _fitting_tile(
        TILES[rows.block_rows], rows.block_rows, x.dtype.itemsize, x.dtype.itemsize, max_shared_bytes(x.device)
    )
    grid = (triton.cdiv(num_outputs, tile.outputs), rows.experts.shape[0])
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
        OUTPUTS=tile.outputs,
        INPUTS=tile.inputs,
        TYPE=_TYPES[x.dtype],
        IS_WIDE=is_wide,
        IS_ALIGNED=matrices.is_aligned,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


def _launch_scaled(
    x: Tensor,
    matrices: ExpertMatrices,
    first: ScaledMatrix,
    rows: SortedRows,
    out: Tensor,
    *,
    top_k: int,
    tile: Tile | None,
) -> None:
    """`first`: any of the matrices."""
    is_whole = first.bits == 8 and first.group_size >= first.num_inputs
    if tile is None:
        tile = _fitting_tile(
            SCALED_TILES[rows.block_rows], rows.block_rows, x.dtype.itemsize, 1, max_shared_bytes(x.device)
        )
    if first.bits == 8 and not is_whole:  # a tile is in one group
        tile = tile._replace(inputs=min(tile.inputs, first.group_size & -first.group_size))
    biases, scales = matrices.bias_addresses, matrices.scale_addresses
    grid = (triton.cdiv(first.num_outputs, tile.outputs), rows.experts.shape[0])
    _grouped_scaled_linear_kernel[grid](
        x,
        matrices.weight_addresses,
        scales,
        matrices.weight_addresses if biases is None else biases,
        rows.choices,
        rows.experts,
        out,
        len(matrices.weights),
        first.num_outputs,
        first.num_inputs,
        first.codes.shape[1],
        first.scales.shape[1],
        first.group_size,
        x.stride(0),
        TOP_K=top_k,
        HAS_BIAS=biases is not None,
        BITS=first.bits,
        UNIT=FP4_GROUP,
        IS_WHOLE=is_whole,
        ROWS=rows.block_rows,
        OUTPUTS=tile.outputs,
        INPUTS=tile.inputs,
        TYPE=_TYPES[x.dtype],
        IS_WIDE=x.dtype == torch.float32 or is_interpreted(_grouped_scaled_linear_kernel),
        IS_ALIGNED=matrices.is_aligned,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _fitting_tile(tile: Tile, block_rows: int, x_bytes: int, weight_bytes: int, max_bytes: int) -> Tile:
    """A tile, or as much of it as shared memory holds. Bytes are those of a number."""
    while (block_rows * x_bytes + tile.outputs * weight_bytes) * tile.inputs * tile.num_stages > max_bytes:
        if tile.inputs > MIN_INPUTS:
            tile = tile._replace(inputs=tile.inputs // 2)
        elif tile.num_stages > 2:
            tile = tile._replace(num_stages=2)
        else:
            tile = tile._replace(outputs=tile.outputs // 2)
    return tile


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
    IS_ALIGNED: tl.constexpr,
):
    block = tl.program_id(1).to(tl.int64)
    expert = tl.load(experts_ptr + block)
    if expert >= num_experts:
        return
    weight_ptr = tl.load(weights_ptr + expert).to(tl.pointer_type(TYPE))
    if IS_ALIGNED:  # an address that was read says nothing of it: loads would be of single numbers
        weight_ptr = tl.multiple_of(weight_ptr, 16)
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


@triton.jit
def _grouped_scaled_linear_kernel(
    x_ptr, codes_ptr, scales_ptr, biases_ptr, choices_ptr, experts_ptr, out_ptr,
    num_experts, num_outputs, num_inputs, row_bytes, num_groups, group_size, x_stride,
    TOP_K: tl.constexpr, HAS_BIAS: tl.constexpr, BITS: tl.constexpr, UNIT: tl.constexpr, IS_WHOLE: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    TYPE: tl.constexpr, IS_WIDE: tl.constexpr, IS_ALIGNED: tl.constexpr,
):  # fmt: skip
    """Program (tile of outputs, block of rows). Tables of [num_experts] addresses: codes, scales, biases."""
    HALF: tl.constexpr = UNIT // 2
    NUM_BYTES: tl.constexpr = INPUTS * BITS // 8
    block = tl.program_id(1).to(tl.int64)
    expert = tl.load(experts_ptr + block)
    if expert >= num_experts:
        return
    code_ptr = tl.load(codes_ptr + expert).to(tl.pointer_type(tl.uint8))
    if IS_ALIGNED:
        code_ptr = tl.multiple_of(code_ptr, 16)
    slots = block * ROWS + tl.arange(0, ROWS)  # [ROWS]
    choices = tl.load(choices_ptr + slots)
    is_there = choices >= 0
    sources = choices // TOP_K if TOP_K else slots
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)  # [OUTPUTS]
    read_outputs = tl.minimum(outputs, num_outputs - 1).to(tl.int64)  # after the last one, it is read again
    places = tl.arange(0, NUM_BYTES)
    x_rows = x_ptr + sources[None, :] * x_stride  # [1, ROWS]
    code_rows = code_ptr + read_outputs[:, None] * row_bytes  # [OUTPUTS, 1]
    total = tl.zeros((OUTPUTS, ROWS), dtype=tl.float32)
    if BITS == 8:
        scale_rows = tl.load(scales_ptr + expert).to(tl.pointer_type(tl.float32)) + read_outputs * num_groups
        for start in range(0, num_inputs, INPUTS):
            k = start + places
            codes = tl.load(code_rows + k[None, :], mask=(k < num_inputs)[None, :], other=0)
            x = tl.load(x_rows + k[:, None], mask=is_there[None, :] & (k < num_inputs)[:, None], other=0.0)
            part = _dot(_e4m3_numbers(codes), x, TYPE, IS_WIDE)
            if IS_WHOLE:
                total += part
            else:
                total += part * tl.load(scale_rows + start // group_size)[:, None]
        if IS_WHOLE:
            total *= tl.load(scale_rows)[:, None]
        total *= 256.0
    else:
        scale_rows = tl.load(scales_ptr + expert).to(tl.pointer_type(tl.uint8)) + read_outputs[:, None] * num_groups
        low = places // HALF * UNIT + places % HALF
        for start in range(0, num_inputs, INPUTS):
            is_input = start + low < num_inputs
            at = start // 2 + places
            codes = tl.load(code_rows + at[None, :], mask=is_input[None, :], other=0)
            exponents = tl.load(scale_rows + at[None, :] // HALF, mask=is_input[None, :], other=0).to(tl.uint32)
            scales = tl.where(exponents == 0, 1 << 22, exponents << 23).to(tl.float32, bitcast=True)
            x_low = x_rows + (start + low)[:, None]
            is_read = is_there[None, :] & is_input[:, None]
            x = tl.load(x_low, mask=is_read, other=0.0)
            total += _dot(_e2m1_numbers(codes & 15) * scales, x, TYPE, IS_WIDE)
            x = tl.load(x_low + HALF, mask=is_read, other=0.0)
            total += _dot(_e2m1_numbers(codes >> 4) * scales, x, TYPE, IS_WIDE)
    if HAS_BIAS:
        bias_ptr = tl.load(biases_ptr + expert).to(tl.pointer_type(TYPE))
        total += tl.load(bias_ptr + read_outputs).to(tl.float32)[:, None]
    to = out_ptr + slots[None, :] * num_outputs + outputs[:, None]
    tl.store(to, total.to(TYPE), mask=is_there[None, :] & (outputs < num_outputs)[:, None])


@triton.jit
def _dot(w, x, TYPE: tl.constexpr, IS_WIDE: tl.constexpr):
    if IS_WIDE:
        return tl.dot(w.to(TYPE).to(tl.float32), x.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(w.to(TYPE), x)


@triton.jit
def _e4m3_numbers(codes):
    """float32: of FP8, divided by 256. As float16, whose exponent has one bit more and whose mantissa is longer."""
    wide = codes.to(tl.uint16)
    return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _e2m1_numbers(codes):
    """float32: of FP4, the low four bits of a byte."""
    wide = codes.to(tl.uint16)
    return (((wide & 8) << 12) | ((wide & 7) << 9)).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
