"""One bound on the memory of requests before admission and of answers before they are sent, shared between callers. No
asyncio.
"""

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
        """Hold `num_bytes` more; does nothing after the end of the call.

        Raises:
            QueueFull: all calls together, or those of this owner, hold too much.
        """
        if self._is_over:
            return
        self._memory.take(self.owner, num_bytes)
        self.num_bytes += num_bytes
        self.num_bytes_seen += num_bytes

    def release(self, keeping: int = 0) -> None:
        """Reduce what is held to at most `keeping` bytes."""
        freed = self.num_bytes - keeping
        if freed > 0:
            self._memory.give(self.owner, freed)
            self.num_bytes = keeping

    def hand_over(self) -> "Hold":
        """A new hold of the same owner, for work that outlives the call; everything held here moves to it."""
        heir = Hold(self._memory)
        heir.owner = self.owner
        heir.num_bytes, heir.num_bytes_seen, self.num_bytes = self.num_bytes, self.num_bytes_seen, 0
        return heir

    def end(self) -> None:
        """The call is over: hold nothing, now and later."""
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
        """Count `num_bytes` more for `owner`; raises QueueFull."""
        own = self._by_owner.get(owner, 0) + num_bytes
        if self.num_bytes + num_bytes > self._max_bytes or own > self._max_bytes * MAX_SHARE:
            message = (
                f"requests before admission and answers hold {self.num_bytes} bytes of memory, "
                f"at most {self._max_bytes} are allowed"
            )
            raise QueueFull(f"{message} ({int(self._max_bytes * MAX_SHARE)} per caller)", retry_after_s=1)
        self._by_owner[owner] = own
        self.num_bytes += num_bytes
        self.num_bytes_taken += num_bytes

    def give(self, owner: str, num_bytes: int) -> None:
        """Count `num_bytes` less for `owner`."""
        self.num_bytes -= num_bytes
        left = self._by_owner[owner] - num_bytes
        if left:
            self._by_owner[owner] = left
        else:
            del self._by_owner[owner]
