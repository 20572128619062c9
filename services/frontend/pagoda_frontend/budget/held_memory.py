"""Memory of requests that were not admitted yet, and of what their answers take until they are sent: one bound for the
process, shared out between callers. No asyncio."""

from pagoda_common.errors import QueueFull

MAX_SHARE = 0.5
"""Share of the limit for one caller, so that others find room."""
VALUE_BYTES = 40
"""Memory of a parsed JSON value."""


class Hold:
    """Memory that one request holds."""

    __slots__ = ("_is_over", "_memory", "num_bytes", "num_bytes_seen", "owner")

    def __init__(self, memory: "HeldMemory") -> None:
        self._memory = memory
        self._is_over = False
        self.owner = ""
        """Caller of the request; set before `add`."""
        self.num_bytes = 0
        """Held now."""
        self.num_bytes_seen = 0
        """Held so far."""

    def add(self, num_bytes: int) -> None:
        """Hold so much more; nothing after the end of its call.

        Raises:
            QueueFull: all hold too much, or this one's owner does.
        """
        if self._is_over:
            return
        self._memory.take(self.owner, num_bytes)
        self.num_bytes += num_bytes
        self.num_bytes_seen += num_bytes

    def release(self, keeping: int = 0) -> None:
        """Hold at most `keeping` bytes any more."""
        freed = self.num_bytes - keeping
        if freed > 0:
            self._memory.give(self.owner, freed)
            self.num_bytes = keeping

    def hand_over(self) -> "Hold":
        """A hold of the same owner, for work that outlives the call: it takes all that this one holds."""
        heir = Hold(self._memory)
        heir.owner = self.owner
        heir.num_bytes, heir.num_bytes_seen, self.num_bytes = self.num_bytes, self.num_bytes_seen, 0
        return heir

    def end(self) -> None:
        """Its call is over: hold nothing, now and later."""
        self.release()
        self._is_over = True


class HeldMemory:
    """Memory that all requests hold."""

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._by_owner: dict[str, int] = {}
        self.num_bytes = 0
        """Held now."""
        self.num_bytes_taken = 0
        """Counter: held so far."""

    def begin(self) -> Hold:
        """Begin a request that holds nothing yet."""
        return Hold(self)

    def take(self, owner: str, num_bytes: int) -> None:
        """Count more for `owner`; raises QueueFull."""
        own = self._by_owner.get(owner, 0) + num_bytes
        if self.num_bytes + num_bytes > self._max_bytes or own > self._max_bytes * MAX_SHARE:
            message = (
                f"requests that wait to be admitted, and what answers keep, hold {self.num_bytes} bytes, at "
                f"most {self._max_bytes} are held"
            )
            raise QueueFull(f"{message} ({int(self._max_bytes * MAX_SHARE)} of one caller)", retry_after_s=1)
        self._by_owner[owner] = own
        self.num_bytes += num_bytes
        self.num_bytes_taken += num_bytes

    def give(self, owner: str, num_bytes: int) -> None:
        """Count less for `owner`."""
        self.num_bytes -= num_bytes
        left = self._by_owner[owner] - num_bytes
        if left:
            self._by_owner[owner] = left
        else:
            del self._by_owner[owner]
