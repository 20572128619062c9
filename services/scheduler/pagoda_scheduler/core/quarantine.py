"""Quarantine: sequences that may crash the worker run alone until they have produced a token."""

from collections import OrderedDict
from collections.abc import Iterator

from pagoda_scheduler.core.request import Request

MAX_CRASHES = 2
"""Number of worker losses without a token in between after which a sequence in flight is a suspect."""


class Quarantine:
    """Suspects in order of arrival; only the first may run, and nothing else with it.

    Running alone costs little and is conclusive; a crash costs a restart. So after two crashes every sequence that was
    in flight in both runs alone: innocent ones continue after one token each, and the poisonous one crashes the worker
    once more, alone, which proves it.
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
        """The suspect that may run; there must be one."""
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
