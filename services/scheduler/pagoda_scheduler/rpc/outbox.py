"""Messages on their way to one reader, and how many it has not taken yet. Knows no request."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Generic, TypeVar

from google.protobuf.message import Message as ProtoMessage

from pagoda_common.errors import PagodaError, QueueFull

MAX_UNTAKEN = 1024
"""Messages that a reader may have before it, not taken yet; then what it waits for is parked. Some seconds of steps."""
MAX_UNTAKEN_BYTES = 32 * 1024 * 1024
"""The same in bytes: log probabilities of a whole vocabulary are large."""
MAX_BACKLOG = 20_000
"""A reader that makes answers and does not take them is cut off: what it asks for itself cannot be parked."""

Message = TypeVar("Message", bound=ProtoMessage)


class Outbox(Generic[Message]):
    """Messages to one reader, in order, with a credit window.

    A message counts until the reader has acknowledged it. For a reader that never does, it counts until the connection
    has taken it: what lies in the connection's own buffers (some hundred KB) is not seen then.
    """

    def __init__(self, *, on_room: Callable[[], None] | None = None) -> None:
        """`on_room`: called when the window was full, and half of it is free again."""
        self._messages: deque[Message] = deque()
        self._wake = asyncio.Event()
        self._error: PagodaError | None = None
        self._is_closed = False
        self._on_room = on_room
        self._untaken: deque[int] = deque()
        """Bytes of each message that was not taken."""
        self._num_untaken_bytes = 0
        self._num_taken = 0
        self._was_full = False
        self.is_acknowledged = False
        """The reader acknowledges."""

    @property
    def is_full(self) -> bool:
        """The reader does not keep up. Messages are still taken in, but there should be no more."""
        return len(self._untaken) > MAX_UNTAKEN or self._num_untaken_bytes > MAX_UNTAKEN_BYTES

    def put(self, message: Message) -> None:
        """Queue a message; returns at once."""
        if self._is_closed:
            return
        if len(self._messages) >= MAX_BACKLOG:
            self.close(QueueFull(f"the reader is {MAX_BACKLOG} messages behind"))
            return
        self._messages.append(message)
        num_bytes = message.ByteSize()
        self._untaken.append(num_bytes)
        self._num_untaken_bytes += num_bytes
        self._was_full = self._was_full or self.is_full
        self._wake.set()

    def acknowledge(self, num_messages: int) -> None:
        """The reader has taken so many since the beginning."""
        while self._num_taken < num_messages and self._untaken:
            self._num_taken += 1
            self._num_untaken_bytes -= self._untaken.popleft()
        has_room = len(self._untaken) <= MAX_UNTAKEN // 2 and self._num_untaken_bytes <= MAX_UNTAKEN_BYTES // 2
        if self._was_full and has_room:
            self._was_full = False
            if self._on_room is not None:
                self._on_room()

    def close(self, error: PagodaError | None = None) -> None:
        """End the stream after what waits, with `error` if given."""
        self._is_closed = True
        self._error = self._error or error
        self._wake.set()

    async def __aiter__(self) -> AsyncIterator[Message]:
        """Messages as they come, until the outbox is closed."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._messages:
                yield self._messages.popleft()
                if not self.is_acknowledged:
                    self.acknowledge(self._num_taken + 1)
            if self._error is not None:
                raise self._error
            if self._is_closed:
                return
