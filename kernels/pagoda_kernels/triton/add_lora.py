"""Low-rank products of grouped rows in Triton: a x of all rows first, then b of that, added where the result lies.

Matrices lie where their adapters keep them; a table has their addresses. A program has some rows of one adapter, so
ranks may differ from one to the next. Source: Chen et al. 2023 (Punica, arXiv 2310.18547).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagoda_kernels.lora.add_lora import BLOCK_ROWS, NUM_FIELDS, PANEL, GroupedRows, LoraTable
from pagoda_kernels.triton.launch import is_interpreted

RANKS, INPUTS = 32, 128
"""Sizes of a tile; chosen by shared memory, not measured."""
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def add_lora(x: Tensor, out: Tensor, rows: GroupedRows, table: LoraTable) -> None:
    """`pagoda_kernels.lora.add_lora.add_lora`, whose arguments these are."""
    num_parts, num_blocks = table.fields.shape[1], rows.blocks.shape[0]
    shrunk = torch.empty(rows.rows.shape[0], num_parts, table.max_rank, dtype=x.dtype, device=x.device)
    shared = {
        "NUM_PARTS": num_parts,
        "NUM_FIELDS": NUM_FIELDS,
        "ROWS": BLOCK_ROWS,
        "RANKS": RANKS,
        "TYPE": _TYPES[x.dtype],
        "IS_WIDE": x.dtype == torch.float32 or is_interpreted(_shrink_kernel),
        "num_warps": 4,
    }
    where = (rows.rows, rows.blocks, table.fields, table.fields.stride(0))
    _shrink_kernel[(triton.cdiv(table.max_rank, RANKS), num_blocks, num_parts)](
        x, shrunk, *where, x.shape[1], x.stride(0), table.max_rank, INPUTS=INPUTS, num_stages=3, **shared
    )
    _expand_kernel[(triton.cdiv(table.max_rows, PANEL), num_blocks)](
        shrunk, out, *where, out.stride(0), table.max_rank, PANEL=PANEL, num_stages=2, **shared
    )


@triton.jit
def _shrink_kernel(
    x_ptr,
    shrunk_ptr,  # [n, NUM_PARTS, max_rank]
    rows_ptr,
    blocks_ptr,
    fields_ptr,
    group_stride,
    num_inputs,
    x_stride,
    max_rank,
    NUM_PARTS: tl.constexpr,
    NUM_FIELDS: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    INPUTS: tl.constexpr,
    TYPE: tl.constexpr,
    IS_WIDE: tl.constexpr,
):
    block, part = tl.program_id(1).to(tl.int64), tl.program_id(2)
    group = tl.load(blocks_ptr + block * 3)
    fields = fields_ptr + group * group_stride + part * NUM_FIELDS
    rank = tl.load(fields + 2)
    first = tl.program_id(0) * RANKS
    if first >= rank:
        return
    a_ptr = tl.load(fields).to(tl.pointer_type(TYPE))
    places = tl.load(blocks_ptr + block * 3 + 1) + tl.arange(0, ROWS)  # [ROWS]
    is_there = places < tl.load(blocks_ptr + block * 3 + 2)
    rows = tl.load(rows_ptr + places, mask=is_there, other=0)
    ranks = first + tl.arange(0, RANKS)  # [RANKS]
    inputs = tl.arange(0, INPUTS)
    x_rows = x_ptr + rows[:, None] * x_stride
    a_rows = a_ptr + ranks[None, :].to(tl.int64) * num_inputs
    total = tl.zeros((ROWS, RANKS), dtype=tl.float32)
    for start in range(0, num_inputs, INPUTS):
        k = start + inputs
        x = tl.load(x_rows + k[None, :], mask=is_there[:, None] & (k < num_inputs)[None, :], other=0.0)
        a = tl.load(a_rows + k[:, None], mask=(k < num_inputs)[:, None] & (ranks < rank)[None, :], other=0.0)
        if IS_WIDE:
            total += tl.dot(x.to(tl.float32), a.to(tl.float32), input_precision="ieee")
        else:
            total += tl.dot(x, a)
    to = shrunk_ptr + (places[:, None] * NUM_PARTS + part) * max_rank + ranks[None, :]
    tl.store(to, total.to(TYPE), mask=is_there[:, None] & (ranks < rank)[None, :])


@triton.jit
def _expand_kernel(
    shrunk_ptr,  # [n, NUM_PARTS, max_rank]
    out_ptr,
    rows_ptr,
    blocks_ptr,
    fields_ptr,
    group_stride,
    out_stride,
    max_rank,
    NUM_PARTS: tl.constexpr,
    NUM_FIELDS: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    PANEL: tl.constexpr,
    TYPE: tl.constexpr,
    IS_WIDE: tl.constexpr,
):
    panel, block = tl.program_id(0), tl.program_id(1).to(tl.int64)
    group = tl.load(blocks_ptr + block * 3)
    places = tl.load(blocks_ptr + block * 3 + 1) + tl.arange(0, ROWS)  # [ROWS]
    is_there = places < tl.load(blocks_ptr + block * 3 + 2)
    rows = tl.load(rows_ptr + places, mask=is_there, other=0)
    columns = tl.arange(0, PANEL)
    for part in range(NUM_PARTS):
        fields = fields_ptr + group * group_stride + part * NUM_FIELDS
        rank, num_rows = tl.load(fields + 2), tl.load(fields + 4)
        if (rank > 0) & (panel * PANEL < num_rows):
            b_ptr = tl.load(fields + 1).to(tl.pointer_type(TYPE)) + panel.to(tl.int64) * rank * PANEL
            total = tl.zeros((ROWS, PANEL), dtype=tl.float32)
            for start in range(0, rank, RANKS):
                k = start + tl.arange(0, RANKS)
                from_ptr = shrunk_ptr + (places[:, None] * NUM_PARTS + part) * max_rank + k[None, :]
                shrunk = tl.load(from_ptr, mask=is_there[:, None] & (k < rank)[None, :], other=0.0)
                b = tl.load(b_ptr + k[:, None] * PANEL + columns[None, :], mask=(k < rank)[:, None], other=0.0)
                if IS_WIDE:
                    total += tl.dot(shrunk.to(tl.float32), b.to(tl.float32), input_precision="ieee")
                else:
                    total += tl.dot(shrunk, b)
            outputs = panel * PANEL + columns
            to = out_ptr + rows[:, None] * out_stride + tl.load(fields + 3) + outputs[None, :]
            mask = is_there[:, None] & (outputs < num_rows)[None, :]
            before = tl.load(to, mask=mask, other=0.0)
            tl.store(to, (before.to(tl.float32) + total).to(before.dtype), mask=mask)
