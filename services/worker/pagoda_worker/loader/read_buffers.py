"""ReadBuffers: reusable memory for reading. Knows bytes; no files."""

import threading

import torch
from torch import Tensor

MAX_KEPT_BYTES = 64 << 20
"""Maximum total bytes of buffers kept for reuse."""
GRAIN = 1 << 16
"""Sizes of buffers are multiples of this, so that tensors of nearly the same size can share one."""
MOST_TIMES_TOO_LARGE = 4


class ReadBuffers:
    """Buffers that any thread may take and return.

    New memory comes from the kernel page by page, which takes as long as reading, and memory that one thread allocates
    and another frees would stay in the allocator and raise the peak.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[Tensor] = []
        self._taken: dict[int, Tensor] = {}
        """By address."""

    def take(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8, uninitialized."""
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
        """Return a tensor's buffer, which is no longer read; no-op for tensors in other memory."""
        if not isinstance(tensor, Tensor) or not tensor.is_cpu:
            return
        with self._lock:
            buffer = self._taken.pop(tensor.untyped_storage().data_ptr(), None)
            if buffer is not None and buffer.numel() + sum(one.numel() for one in self._free) <= MAX_KEPT_BYTES:
                self._free.append(buffer)
