"""Work waits for a place in turns of its callers, however many pieces one of them brings."""

import asyncio
import contextvars
import queue
import threading
from collections.abc import Awaitable, Callable

import pytest

from pagoda_common.errors import QueueFull
from pagoda_frontend.budget.caller import caller, current_hold, held_bytes
from pagoda_frontend.budget.held_memory import HeldMemory
from pagoda_frontend.budget.work_pool import LIGHT_BYTES, SMALL_BYTES, FairQueue, WorkPool


class Work:
    """Pieces of work that the test ends, and the order in which they began."""

    def __init__(self, queue: FairQueue[str]) -> None:
        self._queue = queue
        self.begun: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}

    def start(self, name: str, *, who: str, size: int = 0) -> "asyncio.Task[str]":
        self._ends[name] = asyncio.Event()
        context = contextvars.copy_context()
        context.run(caller.set, who)
        return asyncio.create_task(self._queue.run(self._piece(name), size=size), context=context)

    def _piece(self, name: str) -> Callable[[], Awaitable[str]]:
        async def piece() -> str:
            self.begun.append(name)
            await self._ends[name].wait()
            return name

        return piece

    async def end(self, name: str) -> None:
        self._ends[name].set()
        for _ in range(10):
            await asyncio.sleep(0)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_caller_with_much_work_lets_others_go_between() -> None:
    work = Work(FairQueue(num_places=1))
    tasks = [work.start(f"a{number}", who="a") for number in range(12)]
    await settle()
    tasks += [work.start("b0", who="b"), work.start("b1", who="b")]
    await settle()
    for _ in range(14):
        await work.end(work.begun[-1])
    assert work.begun[:6] == ["a0", "a1", "b0", "a2", "b1", "a3"]
    assert len(work.begun) == 14
    assert {await task for task in tasks} == set(work.begun)


async def test_heavy_pieces_of_a_caller_leave_places_to_others_and_to_its_small_ones() -> None:
    work = Work(FairQueue(num_places=2, light_bytes=10))
    tasks = [work.start(f"a{number}", who="a", size=100) for number in range(3)]
    await settle()
    assert work.begun == ["a0"]
    tasks += [work.start("b0", who="b", size=100), work.start("small", who="a", size=5)]
    await settle()
    assert work.begun == ["a0", "b0"]
    await work.end("b0")
    assert work.begun == ["a0", "b0", "small"]
    await work.end("small")
    assert work.begun == ["a0", "b0", "small"]
    for name in ("a0", "a1", "a2"):
        await work.end(name)
    assert work.begun == ["a0", "b0", "small", "a1", "a2"]
    await asyncio.gather(*tasks)


async def test_as_many_run_as_there_are_places() -> None:
    work = Work(FairQueue(num_places=2))
    tasks = [work.start(str(number), who="") for number in range(4)]
    await settle()
    assert work.begun == ["0", "1"]
    await work.end("1")
    assert work.begun == ["0", "1", "2"]
    for name in ("0", "2", "3"):
        await work.end(name)
    assert [await task for task in tasks] == ["0", "1", "2", "3"]


async def test_more_than_the_bound_are_refused_and_one_caller_has_half() -> None:
    work = Work(FairQueue(num_places=1, max_waiting=4))
    tasks = [work.start(f"a{number}", who="a") for number in range(4)]
    await settle()
    with pytest.raises(QueueFull):
        await tasks[3]
    tasks += [work.start(f"b{number}", who="b") for number in range(2)]
    await settle()
    with pytest.raises(QueueFull, match="4 pieces of work are waiting"):
        await work.start("c0", who="c")
    for task in tasks:
        task.cancel()


async def test_who_gives_up_while_waiting_leaves_the_queue() -> None:
    work = Work(FairQueue(num_places=1))
    first, second, third = (work.start(name, who="a") for name in ("1", "2", "3"))
    await settle()
    second.cancel()
    await work.end("1")
    assert work.begun == ["1", "3"]
    await work.end("3")
    assert [await first, await third] == ["1", "3"]


async def test_who_gives_up_after_others_makes_room_at_once() -> None:
    """While nothing ends: for one more of all, and for one more of the caller."""
    work = Work(FairQueue(num_places=1, max_waiting=4))
    tasks = {name: work.start(name, who=name[0]) for name in ("a0", "a1", "a2", "b0", "b1")}
    await settle()

    async def refused(name: str, num_waiting: int) -> None:
        with pytest.raises(QueueFull, match=f"^{num_waiting} pieces of work are waiting already"):
            await work.start(name, who=name[0])

    await refused("c0", 4)
    tasks.pop("b1").cancel()
    tasks["c0"] = work.start("c0", who="c")
    await settle()
    await refused("d0", 4)
    tasks.pop("b0").cancel()
    await settle()
    await refused("a3", 3)  # of this caller
    tasks.pop("a2").cancel()
    tasks["a3"] = work.start("a3", who="a")
    await settle()
    assert work.begun == ["a0"]
    for name in ("a0", "a1", "c0", "a3"):
        await work.end(name)
    assert work.begun == ["a0", "a1", "c0", "a3"]
    assert await asyncio.gather(*tasks.values()) == ["a0", "a1", "c0", "a3"]


async def test_who_gives_up_takes_no_turn_of_its_caller() -> None:
    work = Work(FairQueue(num_places=1))
    tasks = {name: work.start(name, who=name[0]) for name in ("x", "a0", "a1", "b0")}
    await settle()
    tasks.pop("a0").cancel()
    for name in ("x", "a1", "b0"):
        await work.end(name)
    assert work.begun == ["x", "a1", "b0"]
    assert await asyncio.gather(*tasks.values()) == ["x", "a1", "b0"]


async def test_a_place_is_taken_until_the_work_ends_by_itself() -> None:
    """A thread cannot be stopped: who asked for the work being gone frees nothing."""
    work = Work(FairQueue(num_places=1))
    first, second = work.start("1", who="a"), work.start("2", who="b")
    await settle()
    first.cancel()
    await settle()
    assert work.begun == ["1"]
    await work.end("1")
    assert work.begun == ["1", "2"]
    await work.end("2")
    assert await second == "2"


@pytest.mark.parametrize("num_passes", range(6))
async def test_one_that_gives_up_as_its_turn_comes_leaves_it_to_the_next(num_passes: int) -> None:
    work = Work(FairQueue(num_places=1))
    first, second, third = (work.start(name, who="a") for name in ("1", "2", "3"))
    await settle()
    work._ends["1"].set()
    for _ in range(num_passes):
        await asyncio.sleep(0)
    second.cancel()
    await settle()
    if "2" in work.begun:
        await work.end("2")
    await work.end("3")
    assert (await first, await third) == ("1", "3")


async def test_an_error_of_the_work_is_its_callers_and_frees_the_place() -> None:
    pool = WorkPool(num_threads=1)
    with pytest.raises(ZeroDivisionError):
        await pool.run(lambda: 1 // 0, num_bytes=0)
    assert await pool.run(lambda: 5, num_bytes=0) == 5
    assert await pool.run_sized(lambda: 6, num_bytes=SMALL_BYTES + 1) == 6
    assert await pool.run_sized(lambda: 7, num_bytes=0) == 7
    pool.close()


async def test_as_many_pieces_run_at_once_as_there_are_threads() -> None:
    pool, meet = WorkPool(num_threads=3), threading.Barrier(3, timeout=240)
    await asyncio.gather(*(pool.run(meet.wait, num_bytes=0) for _ in range(3)))
    pool.close()


async def test_what_is_light_has_any_thread_and_what_is_heavy_one_of_a_caller() -> None:
    pool, begun, end = WorkPool(num_threads=2), queue.SimpleQueue[str](), threading.Event()

    def piece(name: str) -> Callable[[], None]:
        def work() -> None:
            begun.put(name)
            end.wait(240)

        return work

    tasks = [asyncio.create_task(pool.run(piece(name), num_bytes=LIGHT_BYTES + 1)) for name in ("heavy", "second")]
    await settle()
    tasks.append(asyncio.create_task(pool.run(piece("light"), num_bytes=LIGHT_BYTES)))
    assert [await asyncio.to_thread(begun.get, timeout=240) for _ in range(2)] == ["heavy", "light"]
    assert begun.empty()
    end.set()
    await asyncio.gather(*tasks)
    assert begun.get() == "second"
    pool.close()


@pytest.mark.parametrize(("num_bytes", "is_here"), [(SMALL_BYTES, True), (SMALL_BYTES + 1, False)])
async def test_what_is_small_is_done_at_once(num_bytes: int, is_here: bool) -> None:
    pool, here = WorkPool(num_threads=1), threading.get_ident()
    assert (await pool.run_sized(threading.get_ident, num_bytes=num_bytes) == here) is is_here
    hold = HeldMemory(max_bytes=10 * SMALL_BYTES).begin()
    hold.add(num_bytes)
    token = current_hold.set(hold)
    assert (await pool.prepare(threading.get_ident) == here) is is_here
    hold.release()
    assert (hold.num_bytes, held_bytes()) == (0, num_bytes), "what was seen stays known"
    current_hold.reset(token)
    assert held_bytes() == 0
    pool.close()


async def test_one_caller_may_have_half_of_what_waits_exactly() -> None:
    work = Work(FairQueue(num_places=1, max_waiting=6))
    tasks = [work.start(f"a{number}", who="a") for number in range(5)]
    await settle()
    with pytest.raises(QueueFull, match="3 pieces of work are waiting already") as caught:
        await tasks[4]
    assert caught.value.retry_after_s == 1
    for task in tasks:
        task.cancel()


async def test_the_bound_is_the_same_after_work_that_waited_and_work_that_gave_up() -> None:
    work = Work(FairQueue(num_places=1, max_waiting=4))
    for turn in range(3):
        names = [f"{who}{turn}" for who in "abcde"]
        tasks = [work.start(name, who=name[0]) for name in names]
        await settle()
        with pytest.raises(QueueFull, match="4 pieces of work are waiting already"):
            await work.start("more", who="f")
        tasks.pop().cancel()
        for name in names[:4]:
            await work.end(name)
        assert await asyncio.gather(*tasks) == names[:4]
