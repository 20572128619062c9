"""Touches memory of a CPU's KV cache before a step needs it, some way ahead of the blocks in use.

Knows the blocks' addresses, not their content.
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
"""Share of the cache that may be touched beyond the last used block."""
EARLY_SHARE_AHEAD = 1 / 2
"""The same for an early cache, which has this share from the start."""
PERIOD_S = 0.25
"""Seconds between two checks, and of idle time before memory is touched."""
PIECE_BYTES = 256 << 10
"""Bytes touched at once, while the process's memory map is locked."""
_POPULATE_WRITE = 23
"""madvise advice since Linux 5.14."""


class MemoryAhead:
    """Memory of one cache. The kernel provides it at the first write, and on a virtual machine the host may have to
    provide it first: there it costs 0.4 to 2 ms per MiB, a tenth to a seventh of the processor time of a Llama with 125
    M parameters."""

    def __init__(self, caches: Sequence[Tensor], *, is_early: bool = False) -> None:
        """
        Args:
            caches: [num_blocks, ...] each, contiguous; those of an accelerator are ignored.
            is_early: touch a larger share, regardless of use. Otherwise at most as much as was used so far, so that a
            worker that has only warmed up takes very little.
        """
        self._caches = [cache for cache in caches if cache.is_cpu]
        self._is_early = is_early
        self._num_touched = 0

    def take_early(self) -> None:
        """Touch the first blocks, EARLY_SHARE_AHEAD of all, of an early cache."""
        if self._is_early and self._caches:
            end = int(self._caches[0].shape[0] * EARLY_SHARE_AHEAD)
            with ThreadPoolExecutor(num_usable_cores()) as threads:
                is_there = list(
                    threads.map(lambda cache: self._populate_blocks([cache], 0, end, lambda: True), self._caches)
                )
            self._num_touched = end if all(is_there) else 0

    def touch(self, num_used: int, may_continue: Callable[[], bool]) -> None:
        """Touch blocks from `num_used`, a share of all, keeping their content.

        Returns early, to be called again, when a step needs the machine. No-op without kernel support.
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
        """Touch a range; whether that succeeded."""
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
    """Interface of a worker for its idle times."""

    def has_rested(self, seconds: float) -> bool:
        """Whether no step ran for `seconds`."""

    def touch_ahead(self, may_continue: Callable[[], bool]) -> None:
        """`MemoryAhead.touch` after the blocks that steps have used."""


async def touch_memory_at_rest(worker: Resting) -> None:
    """Stay ahead of steps, working only while none runs, until cancelled.

    A virtual machine may halt all processors while one touches new memory.
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
    """Give this thread the lowest scheduling priority."""
    with suppress(OSError):  # forbidden here
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # 0: this thread


def _populate(address: int, num_bytes: int) -> bool:
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    size = ctypes.c_size_t(address + num_bytes - start)
    return bool(ctypes.CDLL(None).madvise(ctypes.c_void_p(start), size, _POPULATE_WRITE) == 0)
