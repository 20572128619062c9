"""Deadlines of requests, with one timer for all of them."""

import asyncio
import heapq
from collections.abc import Callable
from itertools import count


class Deadlines:
    """Calls back for each name whose time is over. There is one pending timer for all names: one per request would cost
    an event-loop object, kept long after most requests have ended."""

    def __init__(self, *, expire: Callable[[str, float], None]) -> None:
        """`expire(name, timeout_s)` is called in the event loop, once per name."""
        self._expire = expire
        self._tickets = count()
        # Entries of the heap are (loop time, ticket, name, timeout_s), dead when the ticket is not the name's own.
        self._heap: list[tuple[float, int, str, float]] = []
        self._current: dict[str, int] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due_s: float | None = None

    def __len__(self) -> int:
        return len(self._current)

    def set(self, name: str, timeout_s: float) -> None:
        """Expire `name` in `timeout_s` seconds; replaces an earlier deadline."""
        self._current[name] = ticket = next(self._tickets)
        heapq.heappush(self._heap, (asyncio.get_running_loop().time() + timeout_s, ticket, name, timeout_s))
        self._arm()

    def cancel(self, name: str) -> None:
        """Forget `name`; unknown names are ignored."""
        if self._current.pop(name, None) is not None and len(self._heap) > 2 * len(self._current) + 64:
            self._heap = [entry for entry in self._heap if self._current.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)
            self._arm()

    def compact(self) -> None:
        """Free empty tables; only while no name is set."""
        if self._current:
            return
        self._current.clear()
        self._heap.clear()
        self._arm()

    def _arm(self) -> None:
        """Set the timer for the first entry."""
        due_s = self._heap[0][0] if self._heap else None
        if self._timer is not None and due_s == self._timer_due_s:
            return
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_at(due_s, self._fire) if due_s is not None else None
        self._timer_due_s = due_s

    def _fire(self) -> None:
        self._timer = None
        now_s = asyncio.get_running_loop().time()
        while self._heap and self._heap[0][0] <= now_s:
            _, ticket, name, timeout_s = heapq.heappop(self._heap)
            if self._current.get(name) == ticket:
                del self._current[name]
                self._expire(name, timeout_s)
        self._arm()
