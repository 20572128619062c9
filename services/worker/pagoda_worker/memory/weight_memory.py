"""WeightMemory: memory for the weights of one model, in huge pages where Linux has them. Knows sizes; no models."""

import math
import threading

import torch
from torch import Tensor

from pagoda_worker.memory.huge_pages import PAGE_BYTES, ask_for_huge_pages

SLAB_BYTES = 64 << 20
"""Memory is asked of the allocator in pieces of this size; a tensor of more than half of it has a piece of its own."""
ALIGNMENT = 64
"""Of each tensor: a line of the caches."""


class WeightMemory:
    """Gives tensors that live as long as the model. Any thread may take some.

    The kernel clears memory at its first touch, a page at a time, and each page costs more than its clearing: half of
    the time in which a model is loaded. A huge page is 512 of them. A matrix of some MiB has no huge page of its own,
    since it neither begins nor ends with one; matrices that lie side by side share them. A slab goes back to the
    machine with the last tensor in it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._num_used = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor in host memory, of any content.

        Raises:
            RuntimeError: there is no memory.
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
    """Whole huge pages of memory that nothing has touched yet, as uint8."""
    size = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
    memory = torch.empty(size + PAGE_BYTES, dtype=torch.uint8)
    begin = -memory.data_ptr() % PAGE_BYTES
    slab = memory[begin : begin + size]
    ask_for_huge_pages(slab)
    return slab
