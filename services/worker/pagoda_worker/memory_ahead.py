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
from functools import partial
from typing import Protocol

from torch import Tensor

MAX_SHARE_AHEAD = 1 / 4
"""Of the cache: most that is there behind the last block used."""
PERIOD_S = 0.25
"""Between two looks, and how long no step must have run."""
PIECE_BYTES = 256 << 10
"""Taken at once: for so long the process's memory map cannot change."""
_POPULATE_WRITE = 23
"""Of madvise, since Linux 5.14."""


class MemoryAhead:
    """Memory of one cache. It comes from the kernel when it is first written, and on a virtual machine perhaps from the
    host before that: there it costs 0.4 to 2 ms a MiB, a tenth to a seventh of the processor time of a Llama with 125 M
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

    def touch(self, num_used: int, *, rests: Callable[[], bool], is_over: Callable[[], bool]) -> None:
        """Have the memory of blocks from `num_used` on, up to MAX_SHARE_AHEAD of all. What the blocks hold stays.

        Does nothing where the kernel cannot do it.

        Args:
            rests: where no step runs: a virtual machine may halt all of its processors for the memory of one. When it
                does not, all but the first blocks of an early one waits for the next call.
            is_over: ends it.
        """
        if not self._caches:
            return
        num_blocks = self._caches[0].shape[0]
        ahead = int(num_blocks * MAX_SHARE_AHEAD)
        if self._is_early:
            self._touch_until(ahead, lambda: not is_over())
        begin = max(num_used, self._num_touched)
        end = min(num_blocks, num_used + (ahead if self._is_early else min(num_used, ahead)))
        self._touch_until(end, lambda: rests() and not is_over(), begin=begin)

    def _touch_until(self, end: int, may_go_on: Callable[[], bool], *, begin: int | None = None) -> None:
        """Blocks [begin, end), from the first one that was not touched unless `begin` says so."""
        begin = self._num_touched if begin is None else begin
        if begin >= end:
            return
        for cache in self._caches:
            block = cache.numel() * cache.element_size() // cache.shape[0]
            for offset in range(begin * block, end * block, PIECE_BYTES):
                if not may_go_on():
                    return
                if not _populate(cache.data_ptr() + offset, min(PIECE_BYTES, end * block - offset)):
                    self._caches = []
                    return
        self._num_touched = end


class Touching(Protocol):
    """What a worker shows of itself."""

    def has_rested(self, seconds: float) -> bool:
        """Whether no step ran for so long."""

    def touch_ahead(self, *, rests: Callable[[], bool], is_over: Callable[[], bool]) -> None:
        """`MemoryAhead.touch` behind the blocks that steps have used."""


async def stay_ahead(worker: Touching) -> None:
    """For ever: have memory ahead of the steps, on processor time that nobody else wants."""
    is_over, loop = threading.Event(), asyncio.get_running_loop()
    touch = partial(worker.touch_ahead, rests=lambda: worker.has_rested(PERIOD_S), is_over=is_over.is_set)
    with ThreadPoolExecutor(max_workers=1, initializer=_give_way, thread_name_prefix="memory-ahead") as thread:
        try:
            while True:
                await asyncio.sleep(PERIOD_S)
                await loop.run_in_executor(thread, touch)
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
