"""FreeQueue: the order in which free KV-cache blocks are taken, a linked list over block ids. Knows only numbers."""

from array import array


class FreeQueue:
    """Numbers 0 … size - 1, each in the queue or not; taken from the front, returned at either end, removed anywhere.

    The links are two arrays of machine integers, so that the queue allocates nothing while it works: heap nodes that
    are made for every block would keep memory pages from being freed after a burst. Source: the free block queue
    of vLLM.
    """

    def __init__(self, *, size: int) -> None:
        """A queue of all numbers, in ascending order."""
        # Entry `size` is both ends of the queue; successor -1: not in the queue.
        self._next: array[int] = array("q", [*range(1, size + 1), 0])
        self._previous: array[int] = array("q", [size, *range(size)])
        self._end = size
        self._length = size

    def __len__(self) -> int:
        return self._length

    def __contains__(self, number: int) -> bool:
        return self._next[number] >= 0

    def pop_front(self) -> int:
        """Take the first one; the queue must not be empty."""
        first = self._next[self._end]
        assert first != self._end, "the queue is empty"
        self.remove(first)
        return first

    def remove(self, number: int) -> None:
        """Remove `number` at any position."""
        before, after = self._previous[number], self._next[number]
        self._next[before] = after
        self._previous[after] = before
        self._next[number] = -1
        self._length -= 1

    def append(self, number: int) -> None:
        """Put `number` last."""
        self._insert(number, before=self._previous[self._end], after=self._end)

    def append_front(self, number: int) -> None:
        """Put `number` first."""
        self._insert(number, before=self._end, after=self._next[self._end])

    def _insert(self, number: int, *, before: int, after: int) -> None:
        self._next[before] = self._previous[after] = number
        self._previous[number], self._next[number] = before, after
        self._length += 1
