"""Takes memory for a CPU's KV cache before a step needs it, some way ahead of the blocks in use.

Knows where the blocks are, and not what they hold.
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

from pagoda_worker.threads import num_usable_cores

MAX_SHARE_AHEAD = 1 / 16
"""Share of the cache that may be taken beyond the last used block."""
EARLY_SHARE_AHEAD = 1 / 2
"""The same of an early one, which has so much from the start on."""
PERIOD_S = 0.25
"""Between two looks, and how long no step must have run."""
PIECE_BYTES = 256 << 10
"""Taken at once: for so long the process's memory map cannot change."""
_POPULATE_WRITE = 23
"""Advice for madvise, since Linux 5.14."""


class MemoryAhead:
    """Memory of one cache. It comes from the kernel when it is first written, and on a virtual machine perhaps from the
    host before that: there it costs 0.4 to 2 ms a MiB, a tenth to a seventh of the processor time of a Llama with 125 M
    parameters."""

    def __init__(self, caches: Sequence[Tensor], *, is_early: bool = False) -> None:
        """
        Args:
            caches: [num_blocks, ...] each, contiguous; nothing is done for those of an accelerator.
            is_early: a larger share is ahead, whatever was used. Otherwise it is no more than was used so far, so that
                a worker that has only warmed up takes next to nothing.
        """
        self._caches = [cache for cache in caches if cache.is_cpu]
        self._is_early = is_early
        self._num_touched = 0

    def take_early(self) -> None:
        """Have the memory of the first blocks, EARLY_SHARE_AHEAD of all, if it is an early one."""
        if self._is_early and self._caches:
            end = int(self._caches[0].shape[0] * EARLY_SHARE_AHEAD)
            with ThreadPoolExecutor(num_usable_cores()) as threads:
                is_there = list(
                    threads.map(lambda cache: self._populate_blocks([cache], 0, end, lambda: True), self._caches)
                )
            self._num_touched = end if all(is_there) else 0

    def touch(self, num_used: int, may_continue: Callable[[], bool]) -> None:
        """Have the memory of blocks from `num_used` on, a share of all. What the blocks hold stays.

        Returns early, to be called again, when a step needs the machine. Does nothing without the kernel's support.
        """
        if not self._caches:
            return
        num_blocks = self._caches[0].shape[0]
        if self._is_early:
            ahead = int(num_blocks * EARLY_SHARE_AHEAD)
        else:
            ahead = min(num_used, int(num_blocks * MAX_SHARE_AHEAD))
        begin, end = max(num_used, self._num_touched), min(num_blocks, num_used + ahead)
        if begin < end and self._populate_blocks(self._caches, begin, end, may_continue):
            self._num_touched = end

    def _populate_blocks(
        self, caches: Sequence[Tensor], begin: int, end: int, may_continue: Callable[[], bool]
    ) -> bool:
        """Whether all of these are there now."""
        for cache in caches:
            block = cache.numel() * cache.element_size() // cache.shape[0]
            for offset in range(begin * block, end * block, PIECE_BYTES):
                if not may_continue():
                    return False
                if not _populate(cache.data_ptr() + offset, min(PIECE_BYTES, end * block - offset)):
                    self._caches = []
                    return False
        return True


class Resting(Protocol):
    """A worker, as far as its rest matters."""

    def has_rested(self, seconds: float) -> bool:
        """Whether no step ran for so long."""

    def touch_ahead(self, may_continue: Callable[[], bool]) -> None:
        """`MemoryAhead.touch` after the blocks that steps have used."""


async def touch_memory_at_rest(worker: Resting) -> None:
    """Forever: stay ahead of the steps, while none runs.

    A virtual machine may halt all of its processors for the memory that one takes.
    """
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
    with suppress(OSError):  # forbidden here
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # 0: this thread


def _populate(address: int, num_bytes: int) -> bool:
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    size = ctypes.c_size_t(address + num_bytes - start)
    return bool(ctypes.CDLL(None).madvise(ctypes.c_void_p(start), size, _POPULATE_WRITE) == 0)
