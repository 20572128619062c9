"""ReadBuffers: memory for what is read, used again for what is read later. Knows bytes; no files."""

import threading

import torch
from torch import Tensor

MAX_KEPT_BYTES = 64 << 20
"""Maximum size of buffers that wait to be reused."""
GRAIN = 1 << 16
"""Sizes of buffers are multiples of it, so that tensors of nearly the same size share one."""
MOST_TIMES_TOO_LARGE = 4


class ReadBuffers:
    """Any thread may take and give back.

    New memory comes from the kernel page by page, which takes as long as reading does, and what the allocator keeps of
    memory that one thread takes and another frees would count for the peak.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[Tensor] = []
        self._taken: dict[int, Tensor] = {}
        """By address."""

    def take(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8, of any content."""
        with self._lock:
            fitting = [
                one for one in self._free if num_bytes <= one.numel() <= MOST_TIMES_TOO_LARGE * num_bytes + GRAIN
            ]
            buffer = min(fitting, key=lambda one: one.numel(), default=None)
            if buffer is not None:
                self._free = [one for one in self._free if one is not buffer]
        if buffer is None:
            buffer = torch.empty(-(-max(num_bytes, 1) // GRAIN) * GRAIN, dtype=torch.uint8)
        with self._lock:
            self._taken[buffer.data_ptr()] = buffer
        return buffer[:num_bytes]

    def give_back(self, tensor: object) -> None:
        """A tensor in memory that was taken, which no one reads any more; of anything else nothing is done."""
        if not isinstance(tensor, Tensor) or not tensor.is_cpu:
            return
        with self._lock:
            buffer = self._taken.pop(tensor.untyped_storage().data_ptr(), None)
            if buffer is not None and buffer.numel() + sum(one.numel() for one in self._free) <= MAX_KEPT_BYTES:
                self._free.append(buffer)
