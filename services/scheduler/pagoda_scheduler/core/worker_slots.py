"""The worker's slots: which are free, and which the worker must be told of as freed."""


class WorkerSlots:
    """Slots 0 … size - 1, the lowest free one first at the start."""

    def __init__(self, *, size: int) -> None:
        self._free = list(range(size - 1, -1, -1))
        self._freed: list[int] = []

    @property
    def has_free(self) -> bool:
        """Whether `take` would give one."""
        return bool(self._free)

    def take(self) -> int:
        """A free slot."""
        return self._free.pop()

    def release(self, slot: int, *, is_known: bool) -> None:
        """Give a slot back; `is_known`: the worker has been sent a sequence for it."""
        self._free.append(slot)
        if is_known:
            self._freed.append(slot)

    def renew(self, slot: int) -> None:
        """The worker shall forget what it has in the slot, which stays in use."""
        self._freed.append(slot)

    def take_freed(self) -> list[int]:
        """Slots to tell the worker of with the step that is being sent."""
        freed, self._freed = self._freed, []
        return freed
