"""Mapped: a list for answers whose items are made when they are written, so that they never all exist at once."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

from pagoda_common.text import exact_json

PIECE_ITEMS = 1024
"""Number of items of a list that are written at once."""
PIECE_MADE_ITEMS = 64
"""The same for `Mapped`, where each item is a position with up to some hundred log probabilities."""


class Mapped(Sequence[Any]):
    """A list of `make(item)` for each of `items`, made at every read. Equal to a list with the same content."""

    __hash__ = None  # type: ignore[assignment]  # equal by content, so no hash, as lists have none

    def __init__(self, make: Callable[[Any], Any], items: Sequence[Any]) -> None:
        self._make = make
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, place: int) -> Any: ...
    @overload
    def __getitem__(self, place: slice) -> "Mapped": ...
    def __getitem__(self, place: int | slice) -> Any:
        if isinstance(place, slice):
            return Mapped(self._make, self._items[place])
        return self._make(self._items[place])

    def __add__(self, other: Sequence[Any]) -> "Mapped":
        num_own = len(self)
        places = range(num_own + len(other))
        return Mapped(lambda place: self[place] if place < num_own else other[place - num_own], places)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, list | Mapped) and list(self) == list(other)

    def __repr__(self) -> str:
        return repr(list(self))


def json_pieces(value: Any) -> Iterator[bytes]:
    """`value` as JSON in pieces, cut within long lists, because writing a piece holds the interpreter."""
    if isinstance(value, dict) and any(isinstance(item, list | dict | Mapped) for item in value.values()):
        mark = b"{"
        for name, item in value.items():
            yield mark + exact_json.dumps(name) + b":"
            yield from json_pieces(item)
            mark = b","
        yield b"}"
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        mark = b"["
        for item in value:
            yield mark
            yield from json_pieces(item)
            mark = b","
        yield b"]"
    elif isinstance(value, Mapped) or (isinstance(value, list) and len(value) > PIECE_ITEMS):
        num_items = PIECE_ITEMS if isinstance(value, list) else PIECE_MADE_ITEMS
        mark = b"["
        for start in range(0, len(value), num_items):
            yield mark + exact_json.dumps(list(value[start : start + num_items]))[1:-1]
            mark = b","
        yield b"]" if value else b"[]"
    else:
        yield exact_json.dumps(value)
