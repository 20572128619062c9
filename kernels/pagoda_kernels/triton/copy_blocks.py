"""Block copies within a device in Triton: a program a part of a block."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


def copy_blocks(source: Tensor, destination: Tensor, source_ids: Tensor, destination_ids: Tensor) -> None:
    """`pagoda_kernels.attention.copy_blocks.copy_blocks`; contiguous tensors of one dtype on one device.

    No block may be read and written: programs run in any order.
    """
    num_bytes = source[0].numel() * source.element_size() if source.shape[0] else 0
    if not source_ids.numel() or not num_bytes:
        return
    unit = torch.int32 if num_bytes % 4 == 0 else torch.uint8
    size = num_bytes // unit.itemsize
    ids = torch.stack((source_ids, destination_ids))
    if source.is_cuda:
        ids = ids.pin_memory().to(source.device, non_blocking=True)
    grid = (source_ids.numel(), triton.cdiv(size, BLOCK))
    sources, destinations = (x.view(-1).view(unit) for x in (source, destination))
    _copy_kernel[grid](sources, destinations, ids, source_ids.numel(), size, BLOCK=BLOCK)


@triton.jit
def _copy_kernel(source_ptr, destination_ptr, ids_ptr, num_pairs, size, BLOCK: tl.constexpr):
    """Program (pair, part)."""
    pair = tl.program_id(0)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_place = places < size
    source = tl.load(ids_ptr + pair)
    destination = tl.load(ids_ptr + num_pairs + pair)
    values = tl.load(source_ptr + source * size + places, mask=is_place)
    tl.store(destination_ptr + destination * size + places, values, mask=is_place)
