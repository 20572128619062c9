"""WorkerSlots: tracks which slots are free, and which freed slots the worker does not know of yet."""


class WorkerSlots:
    """Slots 0 … size - 1, the lowest free one first at the start."""

    def __init__(self, *, size: int) -> None:
        self._free = list(range(size - 1, -1, -1))
        self._freed: list[int] = []
        self.is_telling = False
        """Whether an empty step must report freed slots to the worker if there is no other step."""

    @property
    def has_free(self) -> bool:
        """Whether a slot is free."""
        return bool(self._free)

    def take(self) -> int:
        """Take a free slot."""
        return self._free.pop()

    def release(self, slot: int, *, is_known: bool) -> None:
        """Free a slot; `is_known`: the worker has been sent a sequence for it."""
        self._free.append(slot)
        if is_known:
            self._freed.append(slot)

    def renew(self, slot: int) -> None:
        """Make the worker drop the slot's content; the slot stays in use."""
        self._freed.append(slot)

    def take_freed(self) -> list[int]:
        """Take the freed slots to report with the step that is being sent."""
        freed, self._freed, self.is_telling = self._freed, [], False
        return freed

    def tell(self) -> None:
        """Report freed slots soon by an empty step, because no other step will."""
        self.is_telling = bool(self._freed)
