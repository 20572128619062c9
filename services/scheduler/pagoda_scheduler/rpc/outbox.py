"""Outbox: queues messages for one reader and counts those that it has not read yet. Knows no request."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from google.protobuf.message import Message as ProtoMessage

from pagoda_common.errors import PagodaError, QueueFull

MAX_UNTAKEN = 1024
"""Maximum number of unread messages of a reader, some seconds of steps; then its requests are parked."""
MAX_UNTAKEN_BYTES = 32 * 1024 * 1024
"""The same bound in bytes, because log probabilities of a whole vocabulary are large."""
DEFAULT_ACKNOWLEDGES_EVERY = 64
"""Acknowledgement interval, in messages, of readers that do not say theirs."""
MAX_BACKLOG = 20_000
"""Maximum backlog before a reader is disconnected: answers to its own calls cannot be parked."""

Message = TypeVar("Message", bound=ProtoMessage)


@dataclass(slots=True)
class _Untaken:
    """A message that was not read yet."""

    num_bytes: int
    """Approximate bytes, if others were joined to it."""
    num_messages: int = 1
    """Number of messages that it combines."""


class Outbox(Generic[Message]):
    """Messages to one reader, in order, with a credit window.

    At most twice as many messages as a reader acknowledges at a time are in flight. Later ones are joined while they
    wait: a reader that is short of processor time reads many steps at the cost of one, and a new message waits for few
    others.

    A message counts until the reader has acknowledged it. For a reader that never does, it counts until the connection
    has taken it; the connection's own buffers (some hundred KB) are then not counted.
    """

    def __init__(
        self,
        *,
        on_room: Callable[[], None] | None = None,
        join: Callable[[Message, Message], bool] = lambda first, second: False,
    ) -> None:
        """
        Args:
            on_room: called when the window was full and half of it is free again.
            join: adds the second message to the first, which is not sent yet; returns whether it did.
        """
        self._messages: deque[Message] = deque()
        """Messages that are not sent yet."""
        self._join = join
        self._wake = asyncio.Event()
        self._error: PagodaError | None = None
        self._is_closed = False
        self._on_room = on_room
        self._untaken: deque[_Untaken] = deque()
        self._num_untaken = 0
        """Number of messages that were put, joined ones included."""
        self._num_untaken_bytes = 0
        self._num_sent = 0
        self._num_taken = 0
        self._was_full = False
        self.is_acknowledged = False
        """Whether the reader acknowledges messages."""
        self.acknowledges_every = DEFAULT_ACKNOWLEDGES_EVERY
        """Messages."""

    @property
    def is_full(self) -> bool:
        """Whether the reader is too slow. Messages are still accepted, but callers should send no more."""
        return self._num_untaken > MAX_UNTAKEN or self._num_untaken_bytes > MAX_UNTAKEN_BYTES

    @property
    def _may_send(self) -> bool:
        num_in_flight = self._num_sent - self._num_taken
        return not self.is_acknowledged or num_in_flight < 2 * self.acknowledges_every or self._is_closed

    @property
    def _may_join(self) -> bool:
        """Whether one more message may be joined to the last one. A reader acknowledges a quarter of the window at a
        time."""
        most = MAX_UNTAKEN // (4 * self.acknowledges_every)
        return self.is_acknowledged and bool(self._untaken) and self._untaken[-1].num_messages < most

    def put(self, message: Message) -> None:
        """Queue a message; returns at once."""
        if self._is_closed:
            return
        if len(self._messages) >= MAX_BACKLOG:
            self.close(QueueFull(f"the reader is {MAX_BACKLOG} messages behind"))
            return
        num_bytes = message.ByteSize()
        if self._messages and self._may_join and self._join(self._messages[-1], message):
            self._untaken[-1].num_messages += 1
            self._untaken[-1].num_bytes += num_bytes
        else:
            self._messages.append(message)
            self._untaken.append(_Untaken(num_bytes))
        self._num_untaken += 1
        self._num_untaken_bytes += num_bytes
        self._was_full = self._was_full or self.is_full
        self._wake.set()

    def acknowledge(self, num_messages: int) -> None:
        """The reader has read `num_messages` messages since the beginning."""
        while self._num_taken < num_messages and self._untaken:
            self._num_taken += 1
            taken = self._untaken.popleft()
            self._num_untaken -= taken.num_messages
            self._num_untaken_bytes -= taken.num_bytes
        if self._messages:
            self._wake.set()
        has_room = self._num_untaken <= MAX_UNTAKEN // 2 and self._num_untaken_bytes <= MAX_UNTAKEN_BYTES // 2
        if self._was_full and has_room:
            self._was_full = False
            if self._on_room is not None:
                self._on_room()

    def close(self, error: PagodaError | None = None) -> None:
        """End the stream after the queued messages, with `error` if given."""
        self._is_closed = True
        self._error = self._error or error
        self._wake.set()

    async def __aiter__(self) -> AsyncIterator[Message]:
        """Messages as they come, until the outbox is closed."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._messages and self._may_send:
                self._num_sent += 1
                yield self._messages.popleft()
                if not self.is_acknowledged:
                    self.acknowledge(self._num_taken + 1)
            if self._error is not None:
                raise self._error
            if self._is_closed:
                return
