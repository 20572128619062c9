"""Choices sorted by expert in Triton: a program an expert counts its choices, then another one places them in order."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagoda_kernels.moe.grouped_linear import SortedRows

BLOCK = 1024
"""Choices that a program reads at a time."""


def sort_by_expert(chosen: Tensor, num_experts: int, *, block_rows: int) -> SortedRows:
    """`pagoda_kernels.moe.grouped_linear.sort_by_expert`, whose arguments these are."""
    flat, device = chosen.flatten(), chosen.device
    count = flat.shape[0]
    most = count // block_rows + min(num_experts, count)
    choices = torch.empty(most * block_rows, dtype=torch.int64, device=device)
    experts = torch.empty(most, dtype=torch.int64, device=device)
    slots = torch.empty(count, dtype=torch.int64, device=device)
    if count:
        sizes = torch.empty(num_experts, dtype=torch.int32, device=device)
        block = min(BLOCK, triton.next_power_of_2(count))
        _sizes_kernel[(num_experts,)](flat, sizes, count, BLOCK=block)
        _places_kernel[(num_experts + 1,)](
            flat,
            sizes,
            choices,
            experts,
            slots,
            count,
            most,
            num_experts,
            EXPERTS=triton.next_power_of_2(num_experts),
            ROWS=block_rows,
            BLOCK=block,
        )
    return SortedRows(choices, experts, slots, block_rows)


@triton.jit
def _sizes_kernel(chosen_ptr, sizes_ptr, count, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    places = tl.arange(0, BLOCK)
    found = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, count, BLOCK):
        chosen = tl.load(chosen_ptr + start + places, mask=start + places < count, other=-1)
        found += (chosen == expert).to(tl.int32)
    tl.store(sizes_ptr + expert, tl.sum(found, axis=0))


@triton.jit
def _places_kernel(
    chosen_ptr,
    sizes_ptr,
    choices_ptr,
    experts_ptr,
    slots_ptr,
    count,
    most,
    num_experts,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (expert): its blocks, which begin after those of the experts before it. The last one: empty blocks."""
    expert = tl.program_id(0)
    others = tl.arange(0, EXPERTS)
    sizes = tl.load(sizes_ptr + others, mask=others < num_experts, other=0)
    num_blocks = (sizes + ROWS - 1) // ROWS
    first = tl.sum(tl.where(others < expert, num_blocks, 0), axis=0)
    last = tl.sum(tl.where(others <= expert, num_blocks, 0), axis=0)
    if expert == num_experts:
        last = most
    rows = tl.arange(0, ROWS)
    for block in range(first, last):  # nothing yet
        tl.store(experts_ptr + block, expert.to(tl.int64))
        tl.store(choices_ptr + block * ROWS + rows, tl.full([ROWS], -1, dtype=tl.int64))
    tl.debug_barrier()  # what follows goes to the same places
    place = first * ROWS
    if first < last:
        lanes = tl.arange(0, BLOCK)
        for start in range(0, count, BLOCK):
            chosen = tl.load(chosen_ptr + start + lanes, mask=start + lanes < count, other=-1)
            is_mine = (chosen == expert).to(tl.int32)
            slots = place + tl.cumsum(is_mine, axis=0) - 1
            choices = (start + lanes).to(tl.int64)
            tl.store(choices_ptr + slots, choices, mask=is_mine > 0)
            tl.store(slots_ptr + choices, slots.to(tl.int64), mask=is_mine > 0)
            place += tl.sum(is_mine, axis=0)
