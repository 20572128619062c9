"""WeightMemory: memory for the weights of one model, in huge pages if Linux supports them. Knows sizes; no models."""

import math
import threading

import torch
from torch import Tensor

from pagoda_worker.memory.huge_pages import PAGE_BYTES, ask_for_huge_pages

SLAB_BYTES = 64 << 20
"""Bytes of a slab; a tensor of more than half of it gets its own."""
ALIGNMENT = 64
"""Alignment of tensors: a cache line."""


class WeightMemory:
    """Allocates tensors that live as long as the model, for any thread.

    The kernel clears memory page by page at the first touch, and each page fault costs more than the clearing: half of
    the time of loading a model. A huge page replaces 512 pages. A matrix of some MiB alone cannot use huge pages fully,
    since it does not begin or end at one; adjacent matrices in a slab share them. A slab is freed with its last tensor.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._num_used = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialized tensor in host memory.

        Raises:
            RuntimeError: out of memory.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes > SLAB_BYTES // 2:
            memory = _slab(num_bytes)
        else:
            with self._lock:
                if self._num_used + num_bytes > self._slab.numel():
                    self._slab, self._num_used = _slab(SLAB_BYTES), 0
                memory = self._slab[self._num_used :]
                self._num_used += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return memory[:num_bytes].view(dtype).view(shape)


def _slab(num_bytes: int) -> Tensor:
    """Whole huge pages of untouched memory, as uint8."""
    size = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
    memory = torch.empty(size + PAGE_BYTES, dtype=torch.uint8)
    begin = -memory.data_ptr() % PAGE_BYTES
    slab = memory[begin : begin + size]
    ask_for_huge_pages(slab)
    return slab
