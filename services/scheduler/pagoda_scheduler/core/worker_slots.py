"""The worker's slots: which are free, and which the worker does not yet know as freed."""


class WorkerSlots:
    """Slots 0 … size - 1, the lowest free one first at the start."""

    def __init__(self, *, size: int) -> None:
        self._free = list(range(size - 1, -1, -1))
        self._freed: list[int] = []
        self.is_telling = False
        """Whether freed slots are reported to the worker by an empty step, if there is no other step."""

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
        """Let the worker forget the slot's content; the slot stays in use."""
        self._freed.append(slot)

    def take_freed(self) -> list[int]:
        """Slots to tell the worker of with the step that is being sent."""
        freed, self._freed, self.is_telling = self._freed, [], False
        return freed

    def tell(self) -> None:
        """Let the worker know of freed slots soon: at rest no step says it."""
        self.is_telling = bool(self._freed)
