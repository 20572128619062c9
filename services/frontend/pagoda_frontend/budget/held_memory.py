"""Memory of requests that were not admitted yet: one bound for the process, shared out between callers. No asyncio."""

from pagoda_common.errors import QueueFull

MAX_SHARE = 0.5
"""Of the bound for one caller: others always find room."""
VALUE_BYTES = 40
"""What a value of JSON takes when it is parsed."""


class Hold:
    """What one request holds."""

    __slots__ = ("_memory", "num_bytes", "num_bytes_seen", "owner")

    def __init__(self, memory: "HeldMemory") -> None:
        self._memory = memory
        self.owner = ""
        """Whose request it is; set before `add`."""
        self.num_bytes = 0
        """Held now."""
        self.num_bytes_seen = 0
        """Held so far."""

    def add(self, num_bytes: int) -> None:
        """Hold so much more.

        Raises:
            QueueFull: all hold too much, or this one's owner does.
        """
        self._memory.take(self.owner, num_bytes)
        self.num_bytes += num_bytes
        self.num_bytes_seen += num_bytes

    def release(self) -> None:
        """Hold nothing any more."""
        if self.num_bytes:
            self._memory.give(self.owner, self.num_bytes)
            self.num_bytes = 0


class HeldMemory:
    """What all of them hold."""

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._by_owner: dict[str, int] = {}
        self.num_bytes = 0
        """Held now."""
        self.num_bytes_taken = 0
        """Counter: held so far."""

    def begin(self) -> Hold:
        """Of a new request, which holds nothing yet."""
        return Hold(self)

    def take(self, owner: str, num_bytes: int) -> None:
        """Count more for `owner`; raises QueueFull."""
        own = self._by_owner.get(owner, 0) + num_bytes
        if self.num_bytes + num_bytes > self._max_bytes or own > self._max_bytes * MAX_SHARE:
            message = (
                f"requests that wait to be admitted hold {self.num_bytes} bytes, at most {self._max_bytes} are held"
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
