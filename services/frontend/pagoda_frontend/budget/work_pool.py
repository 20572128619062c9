"""WorkPool: work that would hold the event loop, on a few threads, fairly between callers. Knows no work.

Python code on a thread lets the loop run every 5 ms, and so does what releases the interpreter, such as the tokenizer.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from pagoda_common.errors import QueueFull
from pagoda_frontend.budget.caller import caller, held_bytes

Result = TypeVar("Result")

NUM_THREADS = 2
MAX_WAITING = 1024
"""Pieces of work that wait, over all callers."""
MAX_SHARE = 0.5
"""Of these for one caller."""


class FairQueue(Generic[Result]):
    """Pieces of work that wait for one of a few places. Callers take turns: one of them with many waits for itself."""

    def __init__(self, *, num_places: int, max_waiting: int = MAX_WAITING, what: str = "pieces of work") -> None:
        """`what`: of those that wait, for errors."""
        self._num_free = num_places
        self._max_waiting = max_waiting
        self._what = what
        self._num_waiting = 0
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """By caller, whose turn is next first."""

    async def run(self, work: Callable[[], Awaitable[Result]]) -> Result:
        """The result of `work`, which is begun when there is a place for it. Cancelled, it still has its place until it
        ends by itself.

        Raises:
            QueueFull: too much waits, of all or of this caller.
        """
        await self._enter()
        task = asyncio.ensure_future(work())
        task.add_done_callback(self._leave)
        return await asyncio.shield(task)

    async def _enter(self) -> None:
        if self._num_free and not self._num_waiting:
            self._num_free -= 1
            return
        name = caller.get()
        queue = self._waiting.setdefault(name, deque())
        if self._num_waiting >= self._max_waiting or len(queue) >= self._max_waiting * MAX_SHARE:
            if not queue:
                del self._waiting[name]
            raise QueueFull(f"{self._num_waiting} {self._what} wait already", retry_after_s=1)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append(turn)
        self._num_waiting += 1
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # its turn had come
                self._free()
            raise

    def _leave(self, task: "asyncio.Future[Any]") -> None:
        if not task.cancelled():
            task.exception()  # looked at, also where its caller is gone
        self._free()

    def _free(self) -> None:
        """Give a place to who is next; those that have given up are met here."""
        while self._waiting:
            name, queue = next(iter(self._waiting.items()))
            turn = queue.popleft()
            if queue:
                self._waiting.move_to_end(name)
            else:
                del self._waiting[name]
            self._num_waiting -= 1
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1


class WorkPool:
    """A few threads."""

    def __init__(self, *, num_threads: int = NUM_THREADS) -> None:
        self._queue: FairQueue[Any] = FairQueue(num_places=num_threads)
        self._executor = ThreadPoolExecutor(max_workers=num_threads, thread_name_prefix="work")

    async def run(self, work: Callable[[], Result]) -> Result:
        """The result of `work` on a thread; raises what it raises, and QueueFull."""
        loop = asyncio.get_running_loop()
        result: Result = await self._queue.run(lambda: loop.run_in_executor(self._executor, work))
        return result

    async def run_sized(self, work: Callable[[], Result], *, num_bytes: int) -> Result:
        """As `run`; at once where the input, of `num_bytes`, is so small that a thread costs more."""
        return work() if num_bytes <= SMALL_BYTES else await self.run(work)

    async def prepare(self, work: Callable[[], Result]) -> Result:
        """As `run_sized`, of work on the request that is being answered."""
        return await self.run_sized(work, num_bytes=held_bytes())

    def close(self) -> None:
        """Take no more work."""
        self._executor.shutdown(wait=False, cancel_futures=True)


SMALL_BYTES = 16 * 1024
"""Of an input: conversions of it take below 5 ms."""
