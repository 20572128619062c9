"""Products with weights of small integers in Triton: codes become numbers in registers, next to the matrix product.

Every number of a weight (code less zero point) is exact in bfloat16 and float16, so tiles of integers are multiplied,
and the sums of a group are scaled in float32: the only rounding is the last. The weight is the first operand of the
product, which may come from registers; the second must come from shared memory, where the activations are anyway.

Few rows wait for the weight: each byte of it is read once, and its inputs are divided among programs (split-K) until
they are enough to keep the memory busy. A second kernel adds up the parts in a fixed order. Many rows are tiles; those
of one tile of the weight run one after the other, so it stays in the cache.

Sources: products of 16-bit activations with integers, Frantar et al. 2022 (arXiv 2210.17323) and 2024 (Marlin, arXiv
2408.11743); weights as the first operand, NVIDIA CUTLASS's mixed-input GEMM.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagoda_kernels.linear.quantized_rows import UNIT, RowMatrix
from pagoda_kernels.triton.launch import is_interpreted, num_multiprocessors

MAX_SPLIT_ROWS = 64
"""Rows up to which the inputs may be divided: what the parts write is small beside the weight."""
MAX_SPLITS = 16
MIN_BLOCKS_A_SPLIT = 4
"""Tiles of inputs: fewer do not hide the time until the first one is there."""
JOIN_BLOCK = 1024


class _Tile(NamedTuple):
    """The tile of one program, and its launch options."""

    rows: int
    outputs: int
    inputs: int
    """In one turn of the loop; at most a group."""
    num_warps: int
    num_stages: int


_TILES = (
    _Tile(16, 64, 128, 4, 5),
    _Tile(32, 64, 128, 4, 4),
    _Tile(64, 128, 128, 4, 3),
    _Tile(128, 128, 64, 8, 4),
)
"""The first whose rows are as many as there are, or the last. Chosen by shared memory and registers; not measured."""
_WIDE_TILES = (_Tile(16, 64, 64, 4, 3), _Tile(32, 64, 32, 4, 3), _Tile(64, 64, 32, 4, 2))
"""For float32, which is not multiplied by tensor cores."""


def quantized_linear(
    x: Tensor,
    weight: RowMatrix,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """`pagoda_kernels.linear.quantized_linear.quantized_linear`, whose arguments these are.

    Args:
        x: [num_tokens, num_inputs] bfloat16, float16 or float32, contiguous in the last dimension.
        weight: [num_outputs, num_inputs] of 4 or 8 bits; groups are multiples of 32 inputs, or one.
        bias: [num_outputs], contiguous.
        residual: [num_tokens, num_outputs], contiguous in the last dimension.
        num_splits: parts that the inputs are divided into; None chooses.

    Returns:
        [num_tokens, num_outputs] of out_dtype.
    """
    num_rows, num_outputs = x.shape[0], weight.num_outputs
    out = torch.empty(num_rows, num_outputs, dtype=out_dtype or x.dtype, device=x.device)
    if not num_rows:
        return out
    tile = _tile(num_rows, weight, x.dtype)
    if num_splits is None:
        num_splits = _num_splits(num_rows, weight, tile, x.device)
    target, added = out, (bias, residual)
    if num_splits > 1:
        target = torch.empty(num_splits, num_rows, num_outputs, dtype=torch.float32, device=x.device)
        added = (None, None)
    _launch(x, weight, added, target, tile, num_splits)
    if num_splits > 1:
        _join_parts_kernel[(num_rows, triton.cdiv(num_outputs, JOIN_BLOCK))](
            target,
            bias,
            residual,
            out,
            num_rows,
            num_outputs,
            0 if residual is None else residual.stride(0),
            NUM_SPLITS=num_splits,
            HAS_BIAS=bias is not None,
            HAS_RESIDUAL=residual is not None,
            BLOCK=JOIN_BLOCK,
        )
    return out


def _tile(num_rows: int, weight: RowMatrix, dtype: torch.dtype) -> _Tile:
    tiles = _WIDE_TILES if dtype == torch.float32 else _TILES
    tile = next((tile for tile in tiles if tile.rows >= num_rows), tiles[-1])
    if weight.group_size >= weight.num_inputs:
        return tile
    # The largest power of two that divides the group; smaller tiles are fetched further ahead.
    inputs = min(tile.inputs, weight.group_size & -weight.group_size)
    return tile._replace(inputs=inputs, num_stages=tile.num_stages + (inputs < tile.inputs))


def _num_splits(num_rows: int, weight: RowMatrix, tile: _Tile, device: torch.device) -> int:
    """Enough to give every multiprocessor two programs, as a power of two: each is a kernel of its own."""
    if num_rows > MAX_SPLIT_ROWS:
        return 1
    num_programs = triton.cdiv(num_rows, tile.rows) * triton.cdiv(weight.num_outputs, tile.outputs)
    wanted = triton.cdiv(2 * num_multiprocessors(device), num_programs)
    num_blocks = triton.cdiv(weight.num_inputs, tile.inputs)
    splits = max(1, min(wanted, num_blocks // MIN_BLOCKS_A_SPLIT, MAX_SPLITS))
    return 1 << (splits.bit_length() - 1)


def _launch(
    x: Tensor,
    weight: RowMatrix,
    added: tuple[Tensor | None, Tensor | None],
    target: Tensor,
    tile: _Tile,
    num_splits: int,
) -> None:
    """`target`: [num_rows, num_outputs], or float32 [num_splits, num_rows, num_outputs]."""
    bias, residual = added
    num_rows = x.shape[0]
    grid = (triton.cdiv(num_rows, tile.rows), triton.cdiv(weight.num_outputs, tile.outputs), num_splits)
    _quantized_linear_kernel[grid](
        x,
        weight.codes,
        weight.scales,
        weight.zeros,
        bias,
        residual,
        target,
        num_rows,
        weight.num_outputs,
        weight.num_inputs,
        weight.group_size,
        x.stride(0),
        weight.codes.stride(0),
        0 if residual is None else residual.stride(0),
        BITS=weight.bits,
        UNIT=UNIT,
        IS_WHOLE=weight.group_size >= weight.num_inputs,
        IS_EVEN=weight.num_inputs % tile.inputs == 0,
        HAS_ZEROS=weight.zeros is not None,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        NUM_SPLITS=num_splits,
        BLOCK_ROWS=tile.rows,
        BLOCK_OUTPUTS=tile.outputs,
        BLOCK_INPUTS=tile.inputs,
        IS_WIDENED=is_interpreted(_quantized_linear_kernel),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


@triton.jit
def _quantized_linear_kernel(
    x_ptr, codes_ptr, scales_ptr, zeros_ptr, bias_ptr, residual_ptr, out_ptr,
    num_rows, num_outputs, num_inputs, group_size, x_stride, codes_stride, residual_stride,
    BITS: tl.constexpr, UNIT: tl.constexpr, IS_WHOLE: tl.constexpr, IS_EVEN: tl.constexpr, HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, NUM_SPLITS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_INPUTS: tl.constexpr, IS_WIDENED: tl.constexpr,
):  # fmt: skip
    """Program (tile of rows, tile of outputs, split): one tile over the split's share of the inputs."""
    PER_BYTE: tl.constexpr = 8 // BITS
    NUM_BYTES: tl.constexpr = BLOCK_INPUTS // PER_BYTE
    OFFSET: tl.constexpr = 8 if BITS == 4 else 0
    split = tl.program_id(2)
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    outputs = tl.program_id(1) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    # After the last row and output the last one is read again: so nothing is masked, and nothing of it is stored.
    read_rows = tl.minimum(rows, num_rows - 1).to(tl.int64)
    read_outputs = tl.minimum(outputs, num_outputs - 1).to(tl.int64)
    places = tl.arange(0, NUM_BYTES)
    inputs = places  # of each byte, its low half in 4 bits
    if BITS == 4:
        inputs = places // (UNIT // 2) * UNIT + places % (UNIT // 2)
    codes_ptr += read_outputs[:, None] * codes_stride + places[None, :]  # [N, K bytes]
    x_ptr += read_rows[None, :] * x_stride + inputs[:, None]  # [K bytes, M]
    zeros = tl.full([BLOCK_OUTPUTS], OFFSET, dtype=tl.float32)
    if IS_WHOLE and HAS_ZEROS:
        zeros += tl.load(zeros_ptr + read_outputs)
    acc = tl.zeros([BLOCK_OUTPUTS, BLOCK_ROWS], dtype=tl.float32)
    num_blocks = tl.cdiv(num_inputs, BLOCK_INPUTS)
    share = tl.cdiv(num_blocks, NUM_SPLITS)
    first = split * share
    for block in range(first, tl.minimum(first + share, num_blocks)):
        start = block * BLOCK_INPUTS
        codes = tl.load(codes_ptr + block * NUM_BYTES)
        x = _load_x(x_ptr + start, inputs + start, num_inputs, IS_EVEN, IS_WIDENED)
        if not IS_WHOLE:
            group = (start // group_size).to(tl.int64) * num_outputs
            if HAS_ZEROS:
                zeros = tl.load(zeros_ptr + group + read_outputs) + OFFSET
        part = acc
        if not IS_WHOLE:
            part = tl.zeros([BLOCK_OUTPUTS, BLOCK_ROWS], dtype=tl.float32)
        if BITS == 4:
            numbers = ((codes & 15).to(tl.float32) - zeros[:, None]).to(x.dtype)
            part = tl.dot(numbers, x, part, input_precision="ieee")
            x = _load_x(x_ptr + start + UNIT // 2, inputs + start + UNIT // 2, num_inputs, IS_EVEN, IS_WIDENED)
            numbers = ((codes >> 4).to(tl.float32) - zeros[:, None]).to(x.dtype)
            part = tl.dot(numbers, x, part, input_precision="ieee")
        else:
            numbers = codes.to(tl.float32)
            if HAS_ZEROS:
                numbers -= zeros[:, None]
            part = tl.dot(numbers.to(x.dtype), x, part, input_precision="ieee")
        if IS_WHOLE:
            acc = part
        else:
            acc += part * tl.load(scales_ptr + group + read_outputs)[:, None]
    if IS_WHOLE:
        acc *= tl.load(scales_ptr + read_outputs)[:, None]
    is_stored = (outputs < num_outputs)[:, None] & (rows < num_rows)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + read_outputs).to(tl.float32)[:, None]
    if HAS_RESIDUAL:
        residual = residual_ptr + read_rows[None, :] * residual_stride + outputs[:, None]
        acc += tl.load(residual, mask=is_stored, other=0.0).to(tl.float32)
    out_rows = (split.to(tl.int64) * num_rows + rows) * num_outputs
    out = out_ptr + out_rows[None, :] + outputs[:, None]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=is_stored)


@triton.jit
def _load_x(x_ptr, inputs, num_inputs, IS_EVEN: tl.constexpr, IS_WIDENED: tl.constexpr):
    """[K bytes, M]; 0 after the last input, where the codes are padding."""
    x = tl.load(x_ptr) if IS_EVEN else tl.load(x_ptr, mask=(inputs < num_inputs)[:, None], other=0.0)
    if IS_WIDENED:
        x = x.to(tl.float32)
    return x


@triton.jit
def _join_parts_kernel(
    parts_ptr, bias_ptr, residual_ptr, out_ptr, num_rows, num_outputs, residual_stride,
    NUM_SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, part of the outputs): the splits' sums, bias and residual, rounded once."""
    row = tl.program_id(0).to(tl.int64)
    outputs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_output = outputs < num_outputs
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for split in tl.static_range(NUM_SPLITS):
        total += tl.load(parts_ptr + (split * num_rows + row) * num_outputs + outputs, mask=is_output, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + outputs, mask=is_output, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual = residual_ptr + row * residual_stride + outputs
        total += tl.load(residual, mask=is_output, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * num_outputs + outputs, total.to(out_ptr.dtype.element_ty), mask=is_output)
