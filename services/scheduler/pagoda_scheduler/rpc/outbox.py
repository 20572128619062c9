"""Messages on their way to one reader, and how many it has not taken yet. Knows no request."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from google.protobuf.message import Message as ProtoMessage

from pagoda_common.errors import PagodaError, QueueFull

MAX_UNTAKEN = 1024
"""Messages that a reader may have before it, not taken yet; then what it waits for is parked. Some seconds of steps."""
MAX_UNTAKEN_BYTES = 32 * 1024 * 1024
"""The same in bytes: log probabilities of a whole vocabulary are large."""
DEFAULT_ACKNOWLEDGES_EVERY = 64
"""Of readers that acknowledge and do not say how often."""
MAX_BACKLOG = 20_000
"""A reader that makes answers and does not take them is cut off: what it asks for itself cannot be parked."""

Message = TypeVar("Message", bound=ProtoMessage)


@dataclass(slots=True)
class _Untaken:
    """A message that was not taken."""

    num_bytes: int
    """About, where others were joined to it."""
    num_messages: int = 1
    """That were put."""


class Outbox(Generic[Message]):
    """Messages to one reader, in order, with a credit window.

    At most twice as many messages as a reader acknowledges at a time are on their way to it. Later ones are joined
    while they wait: a reader that is short of processor time takes many steps at the cost of one, and what is new waits
    for few messages, not for all.

    A message counts until the reader has acknowledged it. For a reader that never does, it counts until the connection
    has taken it: what lies in the connection's own buffers (some hundred KB) is not seen then.
    """

    def __init__(
        self,
        *,
        on_room: Callable[[], None] | None = None,
        join: Callable[[Message, Message], bool] = lambda first, second: False,
    ) -> None:
        """
        Args:
            on_room: called when the window was full, and half of it is free again.
            join: adds the second message to the first, which is not on its way yet; whether it has.
        """
        self._messages: deque[Message] = deque()
        """Those that are not on their way."""
        self._join = join
        self._wake = asyncio.Event()
        self._error: PagodaError | None = None
        self._is_closed = False
        self._on_room = on_room
        self._untaken: deque[_Untaken] = deque()
        self._num_untaken = 0
        """Messages that were put, joined ones included."""
        self._num_untaken_bytes = 0
        self._num_sent = 0
        self._num_taken = 0
        self._was_full = False
        self.is_acknowledged = False
        """The reader acknowledges."""
        self.acknowledges_every = DEFAULT_ACKNOWLEDGES_EVERY
        """Messages."""

    @property
    def is_full(self) -> bool:
        """The reader does not keep up. Messages are still taken in, but there should be no more."""
        return self._num_untaken > MAX_UNTAKEN or self._num_untaken_bytes > MAX_UNTAKEN_BYTES

    @property
    def _may_send(self) -> bool:
        num_in_flight = self._num_sent - self._num_taken
        return not self.is_acknowledged or num_in_flight < 2 * self.acknowledges_every or self._is_closed

    @property
    def _may_join(self) -> bool:
        """Whether the last message takes one more. What a reader acknowledges at a time is a quarter of the window."""
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
        """The reader has taken so many since the beginning."""
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
        """End the stream after what waits, with `error` if given."""
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
