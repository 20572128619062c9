"""Limits on a body's arrival: time, and bytes of framing. Knows no connection."""

GRACE_S = 5.0
"""Also the interval in which MIN_BYTES_PER_S more bytes must arrive, or the end of the body."""
MIN_BYTES_PER_S = 50_000
"""Minimum average rate of a body after the grace period: 16 MiB within six minutes."""
FRAMING_BYTES = 64 * 1024
"""Maximum bytes of a chunked body beyond its content: trailers, and CHUNK_BYTES more for each chunk."""
CHUNK_BYTES = 32
MAX_TINY_CHUNKS = 16 * 1024
"""Maximum number of chunks with fewer than CHUNK_CONTENT_BYTES bytes in one body; each costs a Python call."""
CHUNK_CONTENT_BYTES = 64


class BodyWatch:
    """Counts one body from the end of its head."""

    __slots__ = ("_num_content", "_num_counted", "_num_looked_at", "_start_s", "num_chunks", "num_received")

    def __init__(self, *, now_s: float) -> None:
        self._start_s = now_s
        self._num_content = 0
        self._num_counted = 0
        """Bytes of the content when `pause` was called last."""
        self._num_looked_at = 0
        """Bytes of the content when `look` was called last."""
        self.num_received = 0
        """Bytes of the connection since the head, framing included."""
        self.num_chunks = 0

    def add(self, num_bytes: int) -> None:
        """`num_bytes` more of the content have arrived."""
        self._num_content += num_bytes

    def pause(self, now_s: float) -> None:
        """The server did not read until now: restart the interval."""
        self._start_s = now_s
        self._num_counted = self._num_content

    def look(self, now_s: float) -> float:
        """Seconds until the next check; 0 or less: the body is too slow.

        The first check is due after GRACE_S, each later one when the check before says.
        """
        num_new, self._num_looked_at = self._num_content - self._num_looked_at, self._num_content
        if num_new < MIN_BYTES_PER_S:
            return 0.0
        allowed_s = GRACE_S + (self._num_content - self._num_counted) / MIN_BYTES_PER_S
        return min(GRACE_S, allowed_s - (now_s - self._start_s))

    @property
    def fault(self) -> str:
        """A message that names the exceeded limit; "" if there is none."""
        framing = self.num_received - self._num_content
        if framing > FRAMING_BYTES + CHUNK_BYTES * self.num_chunks:
            return f"the body has more than {FRAMING_BYTES} bytes of trailers and framing"
        if self.num_chunks > MAX_TINY_CHUNKS + self._num_content // CHUNK_CONTENT_BYTES:
            return f"the body has more than {MAX_TINY_CHUNKS} chunks below {CHUNK_CONTENT_BYTES} bytes"
        return ""
