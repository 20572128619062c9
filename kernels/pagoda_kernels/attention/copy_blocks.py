"""Copy KV-cache blocks: within the device (copy on write) or between device and host (swapping)."""

import torch
from torch import Tensor

from pagoda_kernels.attention.quantized_cache import FP8
from pagoda_kernels.selection import triton_kernel


def copy_blocks(source: Tensor, destination: Tensor, source_ids: Tensor, destination_ids: Tensor) -> None:
    """destination[destination_ids] = source[source_ids], in place.

    All reads happen before the first write, so that source and destination may be one tensor.

    Args:
        source, destination: [num_blocks, ...], equal after the first dimension; devices may differ.
        source_ids, destination_ids: [n] int64 on the host, aligned.
    """
    if source.shape[1:] != destination.shape[1:]:
        raise ValueError(f"blocks of {tuple(source.shape)} do not fit {tuple(destination.shape)}")
    if source_ids.shape != destination_ids.shape:
        raise ValueError(f"{source_ids.shape[0]} source blocks for {destination_ids.shape[0]} destinations")
    if source.dtype == destination.dtype == FP8:
        source, destination = source.view(torch.uint8), destination.view(torch.uint8)  # torch copies these by index
    kernel = triton_kernel("copy_blocks", source)
    is_alike = source.device == destination.device and source.dtype == destination.dtype
    if kernel is not None and is_alike and source.is_contiguous() and destination.is_contiguous():
        # The kernel reads and writes in any order, so no block may be on both lists.
        is_apart = source.data_ptr() != destination.data_ptr()
        if is_apart or set(source_ids.tolist()).isdisjoint(destination_ids.tolist()):
            kernel(source, destination, source_ids, destination_ids)
            return
    copy_blocks_reference(source, destination, source_ids, destination_ids)


def copy_blocks_reference(source: Tensor, destination: Tensor, source_ids: Tensor, destination_ids: Tensor) -> None:
    """The specification of `copy_blocks`."""
    blocks = source.index_select(0, source_ids.to(source.device))
    destination.index_copy_(0, destination_ids.to(destination.device), blocks.to(destination.device))
