"""WorkPool: runs work that would block the event loop on a few threads, fairly between callers. Knows no work.

Python code on a thread lets the loop run every 5 ms, and so does what releases the interpreter, such as the tokenizer.
"""

import asyncio
import bisect
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pagoda_common.errors import QueueFull
from pagoda_frontend.budget.caller import caller, held_bytes

Result = TypeVar("Result")

NUM_THREADS = 2
MAX_WAITING = 1024
"""Maximum number of waiting pieces of work, over all callers."""
MAX_SHARE = 0.5
"""One caller's share of `MAX_WAITING`."""
SMALL_BYTES = 16 * 1024
"""Bytes of an input whose conversions take less than 5 ms."""
LIGHT_BYTES = 64 * 1024
"""Bytes of an input that may use any thread: it takes some tens of milliseconds."""


class FairQueue(Generic[Result]):
    """Pieces of work that wait for one of a few places.

    Callers take turns, and the small pieces of each caller go first. A caller's large pieces take at most `max_each`
    places, so that the next caller usually finds a free place at once.
    """

    def __init__(
        self,
        *,
        num_places: int,
        max_each: int = 1,
        light_bytes: int = 1024,
        max_waiting: int = MAX_WAITING,
        what: str = "pieces of work",
    ) -> None:
        """
        Args:
            light_bytes: size up to which a piece counts as small.
            what: names the waiting pieces in errors.
        """
        self._num_free = num_places
        self._max_each = max_each
        self._light_bytes = light_bytes
        self._max_waiting = max_waiting
        self._what = what
        self._num_waiting = 0
        self._waiting: OrderedDict[str, list[_Waiting]] = OrderedDict()
        """By caller, the next one first; each list is sorted by size."""
        self._num_running: dict[str, int] = {}

    async def run(self, work: Callable[[], Awaitable[Result]], *, size: int = 0) -> Result:
        """The result of `work`, which starts when there is a free place. Work that is cancelled keeps its place until
        it ends by itself.

        Args:
            size: of its input, in bytes.

        Raises:
            QueueFull: too many pieces wait, of all callers or of this one.
        """
        name = caller.get()
        await self._enter(name, size)
        task = asyncio.ensure_future(work())
        task.add_done_callback(lambda task: self._leave(name, task))
        return await asyncio.shield(task)

    def _can_start(self, name: str, size: int) -> bool:
        has_share = size <= self._light_bytes or self._num_running.get(name, 0) < self._max_each
        return self._num_free > 0 and has_share

    def _start(self, name: str) -> None:
        self._num_free -= 1
        self._num_running[name] = self._num_running.get(name, 0) + 1

    async def _enter(self, name: str, size: int) -> None:
        if self._can_start(name, size):  # a waiting caller cannot
            self._start(name)
            return
        queue = self._waiting.get(name, [])
        if self._num_waiting >= self._max_waiting or len(queue) >= self._max_waiting * MAX_SHARE:
            raise QueueFull(f"{self._num_waiting} {self._what} are waiting already", retry_after_s=1)
        waiting = _Waiting(size, asyncio.get_running_loop().create_future())
        bisect.insort_right(self._waiting.setdefault(name, queue), waiting, key=_size_of)
        self._num_waiting += 1
        try:
            await waiting.turn
        except asyncio.CancelledError:
            if waiting.turn.cancelled():
                self._remove(name, waiting)
            else:  # its turn had come
                self._free(name)
            raise

    def _leave(self, name: str, task: "asyncio.Future[Any]") -> None:
        if not task.cancelled():
            task.exception()  # looked at, also where its caller is gone
        self._free(name)

    def _free(self, name: str) -> None:
        """Give up a place, and give it to the next caller."""
        self._num_free += 1
        self._num_running[name] -= 1
        if not self._num_running[name]:
            del self._num_running[name]
        for other, queue in self._waiting.items():
            # One that has just given up is still there, until its task runs.
            first = next((waiting for waiting in queue if not waiting.turn.done()), None)
            if first is not None and self._can_start(other, first.size):
                self._waiting.move_to_end(other)
                self._remove(other, first)
                self._start(other)
                first.turn.set_result(None)
                return

    def _remove(self, name: str, waiting: "_Waiting") -> None:
        """Done when its turn has come, or when its caller has given up."""
        queue = self._waiting[name]
        queue.remove(waiting)
        self._num_waiting -= 1
        if not queue:
            del self._waiting[name]


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """A piece of work that waits."""

    size: int
    turn: "asyncio.Future[None]"


def _size_of(waiting: _Waiting) -> int:
    return waiting.size


class WorkPool:
    """A few threads."""

    def __init__(self, *, num_threads: int = NUM_THREADS) -> None:
        self._queue: FairQueue[Any] = FairQueue(num_places=num_threads, light_bytes=LIGHT_BYTES)
        self._executor = ThreadPoolExecutor(max_workers=num_threads, thread_name_prefix="work")

    async def run(self, work: Callable[[], Result], *, num_bytes: int) -> Result:
        """The result of `work` on a thread; raises what it raises, and QueueFull.

        Args:
            num_bytes: of its input. A caller's large inputs use one thread at a time.
        """
        loop = asyncio.get_running_loop()
        result: Result = await self._queue.run(lambda: loop.run_in_executor(self._executor, work), size=num_bytes)
        return result

    async def run_sized(self, work: Callable[[], Result], *, num_bytes: int) -> Result:
        """As `run`, but on the event loop where the input, of `num_bytes`, is so small that a thread costs more."""
        return work() if num_bytes <= SMALL_BYTES else await self.run(work, num_bytes=num_bytes)

    async def prepare(self, work: Callable[[], Result]) -> Result:
        """As `run_sized`, for work on the request that is being answered."""
        return await self.run_sized(work, num_bytes=held_bytes())

    def close(self) -> None:
        """Take no more work."""
        self._executor.shutdown(wait=False, cancel_futures=True)
