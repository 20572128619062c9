"""Takes memory for a CPU's KV cache before a step needs it: at rest, some way ahead of the blocks in use.

Knows where the blocks lie; nothing of what they hold.
"""

import asyncio
import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from torch import Tensor

MAX_SHARE_AHEAD = 1 / 16
"""Of the cache: most that is there behind the last block used."""
PERIOD_S = 0.25
"""Between two looks, and how long no step must have run."""
PIECE_BYTES = 2 << 20
_POPULATE_WRITE = 23
"""Of madvise, since Linux 5.14."""


class MemoryAhead:
    """Memory of one cache. It comes from the kernel when it is first written, and on a virtual machine perhaps from the
    host before that. There, 2 ms a MiB were measured: 0.2 s of the 1.4 s of processor time of a prompt of 2,048 tokens
    (Llama of 125 million parameters), and 0.02 s with this."""

    def __init__(self, caches: Sequence[Tensor]) -> None:
        """
        Args:
            caches: [num_blocks, ...] each, contiguous; nothing is done for those of an accelerator.
        """
        self._caches = [cache for cache in caches if cache.is_cpu]
        self._num_touched = 0

    def touch(self, num_used: int, may_go_on: Callable[[], bool]) -> None:
        """Have the memory of blocks from `num_used` on: of as many as were used so far, up to MAX_SHARE_AHEAD of all.

        So a worker that has only warmed up takes next to nothing. What the blocks hold stays.
        Ends early, to be called again, when it may not go on. Does nothing where the kernel cannot do it.
        """
        if not self._caches:
            return
        num_blocks = self._caches[0].shape[0]
        begin = max(num_used, self._num_touched)
        end = min(num_blocks, num_used + min(num_used, int(num_blocks * MAX_SHARE_AHEAD)))
        if begin >= end:
            return
        for cache in self._caches:
            block = cache.numel() * cache.element_size() // num_blocks
            for offset in range(begin * block, end * block, PIECE_BYTES):
                if not may_go_on():
                    return
                if not _populate(cache.data_ptr() + offset, min(PIECE_BYTES, end * block - offset)):
                    self._caches = []
                    return
        self._num_touched = end


class Resting(Protocol):
    """What a worker shows of itself."""

    def has_rested(self, seconds: float) -> bool:
        """Whether there was a step, and none ran for so long."""

    def touch_ahead(self, may_go_on: Callable[[], bool]) -> None:
        """`MemoryAhead.touch` behind the blocks that steps have used."""


async def touch_memory_at_rest(worker: Resting) -> None:
    """For ever: stay ahead of the steps. A worker that never had one takes nothing."""

    is_over = threading.Event()

    def rests() -> bool:
        return worker.has_rested(PERIOD_S) and not is_over.is_set()

    with ThreadPoolExecutor(max_workers=1, initializer=_give_way, thread_name_prefix="memory-ahead") as thread:
        try:
            while True:
                await asyncio.sleep(PERIOD_S)
                if rests():
                    await asyncio.get_running_loop().run_in_executor(thread, worker.touch_ahead, rests)
        finally:
            is_over.set()


def _give_way() -> None:
    """Let every other thread of the machine run before this one."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def _populate(address: int, num_bytes: int) -> bool:
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    size = ctypes.c_size_t(address + num_bytes - start)
    return bool(ctypes.CDLL(None).madvise(ctypes.c_void_p(start), size, _POPULATE_WRITE) == 0)
