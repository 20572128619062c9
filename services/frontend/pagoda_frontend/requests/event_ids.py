"""Event ids of streams that can be resumed: written with each event, read from Last-Event-ID."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from pagoda_common.engine.stream import Known
from pagoda_common.errors import InvalidRequest

HEADER = "Last-Event-ID"
MAX_LENGTH = 16 * 1024
MAX_SEQUENCES = 64
"""Maximum number of sequences of a stream that can be resumed, because every event carries the place of each."""
_ID = re.compile(r"(?P<key>[\x21-\x7e]{1,512}):(?P<places>\d{1,10}f?(,\d{1,10}f?)*)(@(?P<num_events>\d{1,10}))?")


class Delivered(Protocol):
    """A new part of a sequence, as text or as a message."""

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
        """Set in the last part."""
        ...


class EventIds:
    """Writes the ids of one stream's events: the response's id, then for each sequence the number of tokens that the
    client has.

    An `f` after the number says that it has the sequence's end as well; `@7` at the end says that it has 7 events,
    where events are numbered.
    """

    def __init__(self, *, response_id: str, n: int) -> None:
        self._prefix = f"id: {response_id}:"
        self._places = ["0"] * n

    def advance(self, delta: Delivered) -> bytes:
        """The id line of the event that carries `delta`."""
        num_tokens = delta.num_output_tokens
        self._places[delta.index] = str(num_tokens) if delta.finish_reason is None else f"{num_tokens}f"
        return self.line()

    def line(self, num_events: int | None = None) -> bytes:
        """The id line of an event that is sent now."""
        number = "" if num_events is None else f"@{num_events}"
        return f"{self._prefix}{','.join(self._places)}{number}\n".encode()


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A client's place in a stream."""

    key: str
    """The response's id."""
    known: tuple[Known, ...]
    """The client's place in each sequence."""
    num_events: int = 0
    """Number of events that the client has, where they are numbered."""
    field: str = HEADER
    """The header or field that gives the place, for errors."""


def with_id(body: bytes, event_id: bytes) -> bytes:
    """`body`, one or several events, with an id on the last one: a client without that event gets all of them again."""
    start = body.rfind(b"\n\n", 0, -2) + 2 if body.count(b"\n\n") > 1 else 0
    return body[:start] + event_id + body[start:]


def place_of(headers: Mapping[str, str]) -> Place | None:
    """The place in the call's Last-Event-ID; None without one.

    Raises:
        InvalidRequest: it is not an id of this server.
    """
    given = headers.get(HEADER.lower())
    if given is None:
        return None
    match = _ID.fullmatch(given) if len(given) <= MAX_LENGTH else None
    if match is None:
        raise InvalidRequest(f"{HEADER} is not an event id of this server: {given[:100]!r}", field=HEADER)
    places = tuple(Known(int(place.rstrip("f")), place.endswith("f")) for place in match["places"].split(","))
    return Place(key=match["key"], known=places, num_events=int(match["num_events"] or 0))
