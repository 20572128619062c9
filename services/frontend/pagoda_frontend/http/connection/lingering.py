"""Closes a connection whose client may still be sending, so that it can read its answer first. Knows no HTTP.

A socket that is closed with bytes unread makes the kernel send a reset, on which many clients drop what they have
received. nginx (`lingering_close`) and Go's net/http do the same as this.
"""

import asyncio
from collections.abc import Callable

LINGER_S = 10.0
"""Maximum seconds from the answer to the end of the connection."""
LINGER_BYTES = 32 * 1024**2
"""Maximum bytes that are read and dropped meanwhile: twice the largest body."""


class LingeringTransport:
    """A transport that closes in two halves while `is_sending` says so: ours at once, the other when the client closes,
    within LINGER_S and LINGER_BYTES. It has only those methods of asyncio.Transport that HTTP/1.1 uses."""

    def __init__(
        self, transport: asyncio.Transport, *, is_sending: Callable[[], bool], on_end: Callable[[], None]
    ) -> None:
        """
        Args:
            is_sending: whether the client may be in the middle of a request now.
            on_end: called once, before the client's half is read to its end.
        """
        self._transport = transport
        self._is_sending = is_sending
        self._on_end = on_end
        self._timer: asyncio.TimerHandle | None = None
        self._num_left = LINGER_BYTES
        # As they are: a stream writes with each token.
        self.write = transport.write
        self.abort = transport.abort
        self.pause_reading = transport.pause_reading
        self.resume_reading = transport.resume_reading
        self.get_extra_info = transport.get_extra_info

    @property
    def is_lingering(self) -> bool:
        """Whether arriving bytes are dropped."""
        return self._timer is not None

    def is_closing(self) -> bool:
        """Whether answers can no longer be written."""
        return self._timer is not None or self._transport.is_closing()

    def close(self) -> None:
        """Send what was written, and end."""
        if self.is_closing():
            return
        if not self._is_sending():
            self._transport.close()
            return
        self._timer = asyncio.get_running_loop().call_later(LINGER_S, self.end)
        if self._transport.can_write_eof():  # not under TLS
            self._transport.write_eof()
        self._transport.resume_reading()
        self._on_end()

    def drop(self, num_bytes: int) -> None:
        """`num_bytes` more bytes arrived while lingering."""
        self._num_left -= num_bytes
        if self._num_left < 0:
            self.end()

    def end(self) -> None:
        """Close both halves now."""
        self.stop()
        self._transport.close()

    def stop(self) -> None:
        """The connection is gone."""
        if self._timer is not None:
            self._timer.cancel()
