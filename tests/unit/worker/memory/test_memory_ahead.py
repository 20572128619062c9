"""Memory of the cache is there before it is written, a part of the cache ahead of what is in use."""

import asyncio
import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest
import torch
from torch import Tensor

from pagoda_worker.memory import memory_ahead
from pagoda_worker.memory.memory_ahead import MemoryAhead, touch_memory_at_rest

NUM_BLOCKS, BLOCK_BYTES = 64, 1 << 20
AHEAD = int(NUM_BLOCKS * memory_ahead.MAX_SHARE_AHEAD)
EARLY = int(NUM_BLOCKS * memory_ahead.EARLY_SHARE_AHEAD)


def yes() -> bool:
    return True


@pytest.fixture
def cache() -> Tensor:
    """[64 blocks, 1 MiB], of which no page is there, and none comes with its neighbours."""
    region = mmap.mmap(-1, NUM_BLOCKS * BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        region.madvise(mmap.MADV_NOHUGEPAGE)
    cache = torch.frombuffer(region, dtype=torch.uint8).view(NUM_BLOCKS, BLOCK_BYTES)
    if not memory_ahead._populate(cache.data_ptr(), 1):
        pytest.skip("madvise has no MADV_POPULATE_WRITE here: Linux before 5.14, or another system")
    region.madvise(mmap.MADV_DONTNEED)
    return cache


def blocks_there(cache: Tensor) -> list[int]:
    """Blocks all of whose pages are in memory; there is none with some of them only."""
    resident = np.zeros(cache.numel() // mmap.PAGESIZE, dtype=np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    size, there = ctypes.c_size_t(cache.numel()), ctypes.c_void_p(resident.ctypes.data)
    assert libc.mincore(ctypes.c_void_p(cache.data_ptr()), size, there) == 0
    by_block = (resident & 1).reshape(NUM_BLOCKS, -1)
    assert set(by_block.mean(axis=1)) <= {0.0, 1.0}
    return [int(block) for block in np.flatnonzero(by_block.all(axis=1))]


def test_a_part_of_the_cache_after_what_is_used(cache: Tensor) -> None:
    ahead = MemoryAhead([cache])
    assert blocks_there(cache) == []
    ahead.touch(20, yes)
    assert blocks_there(cache) == list(range(20, 20 + AHEAD))
    ahead.touch(22, yes)
    assert blocks_there(cache) == list(range(20, 22 + AHEAD))
    ahead.touch(NUM_BLOCKS - 1, yes)
    assert blocks_there(cache)[-1] == NUM_BLOCKS - 1


def test_what_is_there_is_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, asked = torch.zeros(NUM_BLOCKS, 10), []

    def populate(address: int, num_bytes: int) -> bool:
        begin = (address - cache.data_ptr()) // 40
        asked.append((begin, begin + num_bytes // 40))
        return True

    monkeypatch.setattr(memory_ahead, "_populate", populate)
    ahead = MemoryAhead([cache])
    for num_used in (20, 20, 22, 40):
        ahead.touch(num_used, yes)
    assert asked == [(20, 20 + AHEAD), (20 + AHEAD, 22 + AHEAD), (40, 40 + AHEAD)]


def test_no_more_than_was_used(cache: Tensor) -> None:
    ahead = MemoryAhead([cache])
    ahead.touch(0, yes)
    assert blocks_there(cache) == []
    ahead.touch(1, yes)
    assert blocks_there(cache) == [1]
    ahead.touch(3, yes)
    assert blocks_there(cache) == [1, 3, 4, 5]


def test_early_it_is_there_before_the_first_block_is_used(cache: Tensor) -> None:
    ahead = MemoryAhead([cache[: NUM_BLOCKS // 2], cache[NUM_BLOCKS // 2 :]], is_early=True)
    ahead.take_early()
    half = [*range(EARLY // 2), *range(NUM_BLOCKS // 2, NUM_BLOCKS // 2 + EARLY // 2)]
    assert blocks_there(cache) == half
    ahead.touch(1, yes)
    assert blocks_there(cache) == sorted([*half, EARLY // 2, NUM_BLOCKS // 2 + EARLY // 2])


def test_others_take_nothing_early(cache: Tensor) -> None:
    MemoryAhead([cache]).take_early()
    assert blocks_there(cache) == []


def test_what_blocks_hold_stays(cache: Tensor) -> None:
    cache[AHEAD + 2] = 7
    MemoryAhead([cache]).touch(AHEAD, yes)
    assert bool((cache[AHEAD + 2] == 7).all())
    assert int(cache[AHEAD : 2 * AHEAD].count_nonzero()) == BLOCK_BYTES


def test_a_step_interrupts_it(cache: Tensor) -> None:
    pieces = BLOCK_BYTES // memory_ahead.PIECE_BYTES
    ahead, answers = MemoryAhead([cache]), iter([True] * 2 * pieces + [False])
    ahead.touch(AHEAD, lambda: next(answers))
    assert blocks_there(cache) == [AHEAD, AHEAD + 1]
    ahead.touch(AHEAD, yes)
    assert blocks_there(cache) == list(range(AHEAD, 2 * AHEAD))


def test_a_kernel_that_cannot_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def populate(address: int, num_bytes: int) -> bool:
        asked.append(num_bytes)
        return False

    monkeypatch.setattr(memory_ahead, "_populate", populate)
    ahead = MemoryAhead([torch.zeros(NUM_BLOCKS, 10)])
    ahead.touch(AHEAD, yes)
    ahead.touch(20, yes)
    assert asked == [AHEAD * 40]


def test_a_cache_of_an_accelerator_is_left_alone() -> None:
    MemoryAhead([torch.zeros(NUM_BLOCKS, 10, device="meta")]).touch(AHEAD, yes)


class FakeWorker:
    """Rests from its third look on."""

    def __init__(self) -> None:
        self.num_looks = 0
        self.policy = -1
        self.touched = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def has_rested(self, seconds: float) -> bool:
        self.num_looks += 1
        return self.num_looks >= 3

    def touch_ahead(self, may_continue: Callable[[], bool]) -> None:
        assert self.num_looks >= 3
        assert may_continue()
        self.policy = os.sched_getscheduler(0)
        self._loop.call_soon_threadsafe(self.touched.set)


async def test_only_at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_ahead, "PERIOD_S", 0)
    worker = FakeWorker()
    task = asyncio.create_task(touch_memory_at_rest(worker))
    async with asyncio.timeout(240):
        await worker.touched.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert worker.policy == os.SCHED_IDLE


class BusyWorker:
    """Rests always; takes memory for as long as it may."""

    def __init__(self) -> None:
        self.begun, self.ended = asyncio.Event(), threading.Event()
        self._loop = asyncio.get_running_loop()

    def has_rested(self, seconds: float) -> bool:
        return True

    def touch_ahead(self, may_continue: Callable[[], bool]) -> None:
        self._loop.call_soon_threadsafe(self.begun.set)
        end_s = time.monotonic() + 240
        while may_continue():
            assert time.monotonic() < end_s
        self.ended.set()


async def test_it_ends_in_the_middle_when_the_worker_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_ahead, "PERIOD_S", 0)
    worker = BusyWorker()
    task = asyncio.create_task(touch_memory_at_rest(worker))
    async with asyncio.timeout(240):
        await worker.begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert worker.ended.is_set()
