"""Sequences that may be what crashes the worker: each runs alone until it has shown that it is not."""

from collections import OrderedDict
from collections.abc import Iterator

from pagoda_scheduler.core.request import Request

MAX_CRASHES = 2
"""A sequence that was in flight in this many losses of its worker, with no token between them, is a suspect."""


class Quarantine:
    """Suspects in the order of their arrival; only the first may run, and nothing beside it.

    A step alone costs little and tells for sure; a crash costs a restart. So after two crashes every sequence that was
    in flight in both runs alone: innocent ones continue after one token each, and the poisonous one crashes
    the worker once more, alone, which is proof.
    """

    def __init__(self) -> None:
        self._suspects: OrderedDict[Request, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._suspects)

    def __contains__(self, request: Request) -> bool:
        return request in self._suspects

    def __iter__(self) -> Iterator[Request]:
        return iter(self._suspects)

    @property
    def first(self) -> Request:
        """The one that may run; there must be one."""
        return next(iter(self._suspects))

    def add(self, request: Request) -> None:
        """Suspect `request`."""
        self._suspects[request] = None

    def discard(self, request: Request) -> None:
        """`request` is cleared, or has ended."""
        self._suspects.pop(request, None)

    def take_all(self) -> list[Request]:
        """Empty it."""
        suspects = list(self._suspects)
        self._suspects.clear()
        return suspects
