"""Limits on a body's arrival: time, and bytes of framing. Knows no connection."""

GRACE_S = 5.0
"""Also the time in which some more must come (MIN_BYTES_PER_S bytes), or the end."""
MIN_BYTES_PER_S = 50_000
"""A body must come so fast on the whole, once the grace is over: 16 MiB within six minutes."""
FRAMING_BYTES = 64 * 1024
"""Size of a chunked body beyond its content: trailers, and CHUNK_BYTES more for each chunk."""
CHUNK_BYTES = 32
MAX_TINY_CHUNKS = 16 * 1024
"""Chunks of one body that may have fewer than CHUNK_CONTENT_BYTES bytes; each is a call of Python."""
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
        """So much more of the content is there."""
        self._num_content += num_bytes

    def pause(self, now_s: float) -> None:
        """Until now it was the server that did not read: the time begins again."""
        self._start_s = now_s
        self._num_counted = self._num_content

    def look(self, now_s: float) -> float:
        """Seconds until the next look; 0 or less: the body is too slow.

        The first look is due after GRACE_S, each other one when the one before said.
        """
        num_new, self._num_looked_at = self._num_content - self._num_looked_at, self._num_content
        if num_new < MIN_BYTES_PER_S:
            return 0.0
        allowed_s = GRACE_S + (self._num_content - self._num_counted) / MIN_BYTES_PER_S
        return min(GRACE_S, allowed_s - (now_s - self._start_s))

    @property
    def fault(self) -> str:
        """The exceeded limit; "" if there is none."""
        framing = self.num_received - self._num_content
        if framing > FRAMING_BYTES + CHUNK_BYTES * self.num_chunks:
            return f"the body has more than {FRAMING_BYTES} bytes of trailers and framing"
        if self.num_chunks > MAX_TINY_CHUNKS + self._num_content // CHUNK_CONTENT_BYTES:
            return f"the body has more than {MAX_TINY_CHUNKS} chunks below {CHUNK_CONTENT_BYTES} bytes"
        return ""
