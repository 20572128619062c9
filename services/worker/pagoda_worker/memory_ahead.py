"""Takes memory for a CPU's KV cache before a step needs it, some way ahead of the blocks in use.

Knows where the blocks lie; nothing of what they hold.
"""

import asyncio
import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Protocol

from torch import Tensor

MAX_SHARE_AHEAD = 1 / 4
"""Of the cache: most that is there behind the last block used."""
PERIOD_S = 0.25
"""Between two looks."""
PIECE_BYTES = 256 << 10
"""Taken at once: for so long the process's memory map cannot change."""
_POPULATE_WRITE = 23
"""Of madvise, since Linux 5.14."""


class MemoryAhead:
    """Memory of one cache. It comes from the kernel when it is first written, and on a virtual machine perhaps from the
    host before that: there it costs 0.4 to 2 ms a MiB, a tenth to a seventh of the processor time of a Llama of 125 million
    parameters."""

    def __init__(self, caches: Sequence[Tensor], *, is_early: bool = False) -> None:
        """
        Args:
            caches: [num_blocks, ...] each, contiguous; nothing is done for those of an accelerator.
            is_early: also ahead of the first blocks that are used. Otherwise no more than was used so far, so that a
                worker that has only warmed up takes next to nothing.
        """
        self._caches = [cache for cache in caches if cache.is_cpu]
        self._is_early = is_early
        self._num_touched = 0

    def touch(self, num_used: int, may_go_on: Callable[[], bool]) -> None:
        """Have the memory of blocks from `num_used` on, up to MAX_SHARE_AHEAD of all. What the blocks hold stays.

        Ends early, to be called again, when it may not go on. Does nothing where the kernel cannot do it.
        """
        if not self._caches:
            return
        num_blocks = self._caches[0].shape[0]
        begin = max(num_used, self._num_touched)
        ahead = int(num_blocks * MAX_SHARE_AHEAD)
        end = min(num_blocks, num_used + (ahead if self._is_early else min(num_used, ahead)))
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


class Touching(Protocol):
    """What a worker shows of itself."""

    def touch_ahead(self, may_go_on: Callable[[], bool]) -> None:
        """`MemoryAhead.touch` behind the blocks that steps have used."""


async def stay_ahead(worker: Touching) -> None:
    """For ever: have memory ahead of the steps, on processor time that nobody else wants."""
    is_over, loop = threading.Event(), asyncio.get_running_loop()
    with ThreadPoolExecutor(max_workers=1, initializer=_give_way, thread_name_prefix="memory-ahead") as thread:
        try:
            while True:
                await asyncio.sleep(PERIOD_S)
                await loop.run_in_executor(thread, worker.touch_ahead, lambda: not is_over.is_set())
        finally:
            is_over.set()


def _give_way() -> None:
    """Let every other thread of the machine run before this one."""
    with suppress(OSError):  # forbidden here
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # 0: this thread


def _populate(address: int, num_bytes: int) -> bool:
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    size = ctypes.c_size_t(address + num_bytes - start)
    return bool(ctypes.CDLL(None).madvise(ctypes.c_void_p(start), size, _POPULATE_WRITE) == 0)
