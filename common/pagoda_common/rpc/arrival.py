"""Arrivals: ends calls whose request message does not arrive completely in time. Knows calls and their time; no
messages.

gRPC's library hands a call over when its one message is complete, and holds what has come of it until then, for as long
as the connection lives. So such a call is served as one with a stream of requests, which is handed over with its
metadata: on the wire they are the same.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

from pagoda_common.errors import Code, InvalidRequest, PagodaError, QueueFull

LATE_S = 0.25
"""Time within which messages are complete that are sent in one go; counted twice, so that a pause of this process's own
makes none late."""
LIMIT_S = 30.0
"""Longest time for a message."""
MAX_LATE = 64
"""Late messages at a time; what comes beyond them is refused once it is late."""
MAX_LATE_EACH = 32
"""Maximum for one peer host."""


class Arrivals:
    """The messages of one server that are on their way."""

    def __init__(self) -> None:
        self._late: Counter[str] = Counter()
        self._awaiting: dict[object, Any] = {}
        self.num_late_seen = 0
        """Counter: messages that have been late."""

    @property
    def num_late(self) -> int:
        """Messages that are late now."""
        return self._late.total()

    def peers(self) -> set[str]:
        """Peers with calls that have a message to come, as gRPC's library calls them."""
        return {str(context.peer()) for context in self._awaiting.values()}

    def stream_begins(self, context: Any) -> None:
        """A call with a stream of messages has begun."""
        key = object()
        self._awaiting[key] = context
        context.add_done_callback(lambda _: self._awaiting.pop(key, None))

    async def message(self, requests: AsyncIterator[Any], context: Any, *, can_be_late: bool = True) -> Any:
        """The one message of a call.

        Args:
            can_be_late: it is awaited for a while; else it comes in one go or is refused.

        Raises:
            InvalidRequest: there is none.
            QueueFull: too many others are late.
            PagodaError: it has taken too long.
        """
        arrival = _Arrival(self._late, context, can_be_late=can_be_late)
        self._awaiting[arrival] = context
        try:
            return await anext(requests)
        except StopAsyncIteration:
            raise InvalidRequest("the call has no message") from None
        except asyncio.CancelledError:
            if arrival.error is None:
                raise
            arrival.task.uncancel()
            raise arrival.error from None
        finally:
            del self._awaiting[arrival]
            self.num_late_seen += arrival.was_late
            arrival.end()


class _Arrival:
    """One message: its timer, which ends the wait for it."""

    __slots__ = ("_can_be_late", "_context", "_host", "_late", "_loop", "_timer", "error", "task", "was_late")

    def __init__(self, late: Counter[str], context: Any, *, can_be_late: bool) -> None:
        task = asyncio.current_task()
        assert task is not None, "a handler runs in a task"
        self.task = task
        self.error: PagodaError | None = None
        self.was_late = False
        self._can_be_late = can_be_late
        self._late = late
        self._context = context
        self._host: str | None = None
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(LATE_S, self._may_be_late)

    def end(self) -> None:
        """The message is there, or not waited for any more."""
        self._timer.cancel()
        if self._host is not None:
            self._late[self._host] -= 1
            if not self._late[self._host]:
                del self._late[self._host]

    def _may_be_late(self) -> None:
        self._timer = self._loop.call_later(LATE_S, self._is_late)

    def _is_late(self) -> None:
        self.was_late = True
        host = str(self._context.peer() or "").rpartition(":")[0]
        if not self._can_be_late:
            text = f"the message was not complete within {2 * LATE_S:g} s"
            self._give_up(PagodaError(text, code=Code.DEADLINE_EXCEEDED))
            return
        if self._late.total() >= MAX_LATE or self._late[host] >= MAX_LATE_EACH:
            text = f"{self._late.total()} messages have begun and not ended, at most {MAX_LATE} may"
            self._give_up(QueueFull(f"{text} ({MAX_LATE_EACH} of one host)", retry_after_s=1))
            return
        self._host = host
        self._late[host] += 1
        self._timer = self._loop.call_later(LIMIT_S - 2 * LATE_S, self._is_over)

    def _is_over(self) -> None:
        text = f"the message was not complete within {LIMIT_S:g} s"
        self._give_up(PagodaError(text, code=Code.DEADLINE_EXCEEDED))

    def _give_up(self, error: PagodaError) -> None:
        self.error = error
        self.task.cancel()
