"""The address in every event of a stream that can be resumed: written beside the event, read from Last-Event-ID."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from pagoda_common.engine.stream import Known
from pagoda_common.errors import InvalidRequest

HEADER = "Last-Event-ID"
MAX_LENGTH = 16 * 1024
MAX_SEQUENCES = 64
"""Maximum for a stream that can be resumed: every event carries the place of each sequence."""
_ID = re.compile(r"(?P<key>[\x21-\x7e]{1,512}):(?P<places>\d{1,10}f?(,\d{1,10}f?)*)(@(?P<num_events>\d{1,10}))?")


class Delivered(Protocol):
    """News of a sequence, as text or as a message."""

    @property
    def index(self) -> int:
        """Index of the sequence."""
        ...

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the sequence so far."""
        ...

    @property
    def finish_reason(self) -> str | None:
        """Set with its end."""
        ...


class EventIds:
    """The ids of one stream's events: the response's id, and for each sequence how many tokens the client has.

    An `f` after the number says that it has the sequence's end as well; `@7` at the end, that it has 7 events, where
    events are numbered.
    """

    def __init__(self, *, response_id: str, n: int) -> None:
        self._prefix = f"id: {response_id}:"
        self._places = ["0"] * n

    def advance(self, delta: Delivered) -> bytes:
        """The line that goes with the event after which the client has `delta`."""
        num_tokens = delta.num_output_tokens
        self._places[delta.index] = str(num_tokens) if delta.finish_reason is None else f"{num_tokens}f"
        return self.line()

    def line(self, num_events: int | None = None) -> bytes:
        """The line that goes with an event of now."""
        number = "" if num_events is None else f"@{num_events}"
        return f"{self._prefix}{','.join(self._places)}{number}\n".encode()


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a client is in a stream."""

    key: str
    """The response's id."""
    known: tuple[Known, ...]
    """The client's place in each sequence."""
    num_events: int = 0
    """Events that it has, where they are numbered."""
    field: str = HEADER
    """Where the client says so, for errors."""


def with_id(body: bytes, event_id: bytes) -> bytes:
    """`body`, one or several events, with an id for the last one: a client that has not seen it gets all again."""
    start = body.rfind(b"\n\n", 0, -2) + 2 if body.count(b"\n\n") > 1 else 0
    return body[:start] + event_id + body[start:]


def place_of(headers: Mapping[str, str]) -> Place | None:
    """The place in the call's Last-Event-ID; None without one.

    Raises:
        InvalidRequest: it is no id of ours.
    """
    given = headers.get(HEADER.lower())
    if given is None:
        return None
    match = _ID.fullmatch(given) if len(given) <= MAX_LENGTH else None
    if match is None:
        raise InvalidRequest(f"{HEADER} is not an id of an event of ours: {given[:100]!r}", field=HEADER)
    places = tuple(Known(int(place.rstrip("f")), place.endswith("f")) for place in match["places"].split(","))
    return Place(key=match["key"], known=places, num_events=int(match["num_events"] or 0))
