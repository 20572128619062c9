"""Streams that go on at another frontend: an address in every event, and a note for whoever adopts the stream.

A client that has lost its connection asks the same path again, at any frontend of the same scheduler, with the header
`Last-Event-ID` set to the last id that it has seen; the body does not matter. It gets the events behind that one. Over
gRPC the field `resume_from` says the same.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel

from pagoda_common.engine.stream import AdoptedRequest, Known
from pagoda_common.errors import InvalidRequest, NotFound
from pagoda_common.params.outputs import SequenceDelta
from pagoda_frontend.requests.serving import Serving
from pagoda_frontend.requests.terms import tenant_of

HEADER = "Last-Event-ID"
MAX_LENGTH = 16 * 1024
MAX_SEQUENCES = 64
"""Of a stream that can be resumed: every event carries the place in each of them."""
_ID = re.compile(r"(?P<key>[\x21-\x7e]{1,512}):(?P<places>\d{1,10}f?(,\d{1,10}f?)*)(@(?P<num_events>\d{1,10}))?")

Body = TypeVar("Body", bound=BaseModel)


class EventIds:
    """The ids of one stream's events: the response's id, and for each sequence how many tokens the client has.

    An `f` behind the number says that it has the sequence's end as well; `@7` at the end, that it has 7 events, where
    events are numbered.
    """

    def __init__(self, *, response_id: str, n: int) -> None:
        self._prefix = f"id: {response_id}:"
        self._places = ["0"] * n

    def advance(self, delta: SequenceDelta) -> bytes:
        """The line that goes with the event behind which the client has `delta`."""
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
    """What it has of each sequence."""
    num_events: int = 0
    """Events that it has, where they are numbered."""
    field: str = HEADER
    """Where the client says so, for errors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumption:
    """A stream to go on with."""

    place: Place
    adopted: tuple[AdoptedRequest, ...]
    """One a prompt, in their order."""
    note: Mapping[str, Any]
    """What `note_of` was given."""

    @property
    def response_id(self) -> str:
        """As of the first attempt."""
        return self.place.key

    @property
    def created(self) -> int:
        """Unix time in seconds of the first attempt."""
        return int(self.note["created"])

    def body_as(self, body_type: type[Body]) -> Body:
        """The request's body again."""
        return body_type.model_validate_json(self.note["body"])


def note_of(body: BaseModel | str, *, path: str, created: int, **more: Any) -> bytes:
    """What an adopter has to know besides tokens; `more` can be written as JSON."""
    text = body if isinstance(body, str) else body.model_dump_json(exclude_unset=True)
    return orjson.dumps({"path": path, "created": created, "body": text, **more})


def with_id(body: bytes, event_id: bytes) -> bytes:
    """`body`, one or several events, with an id for the last one: whoever has not seen that gets all of them again."""
    start = body.rfind(b"\n\n", 0, -2) + 2 if body.count(b"\n\n") > 1 else 0
    return body[:start] + event_id + body[start:]


def place_of(headers: Mapping[str, str]) -> Place | None:
    """What the call's Last-Event-ID says; None without one.

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


async def resumption_at(place: Place, *, serving: Serving, path: str, tenant: str) -> Resumption:
    """The stream to go on with at `place`.

    Args:
        path: of the call, which must be that of the stream.
        tenant: on whose behalf the call comes, which must be the stream's.

    Raises:
        InvalidRequest: it belongs to another path.
        NotFound: the stream is unknown or another tenant's, or its lease is over.
        NotReady: the scheduler does not answer.
    """
    field, shown = place.field, place.key[:100]
    try:
        requests = await serving.engine.adopt(place.key)
    except NotFound as error:
        raise NotFound(f"{field}: the stream {shown!r} is unknown, or its lease is over", field=field) from error
    requests = [request for request in requests if request.tenant == tenant]
    if not requests:
        raise NotFound(f"{field}: the stream {shown!r} is unknown, or its lease is over", field=field)
    if sum(len(request.sequences) for request in requests) != len(place.known):
        raise NotFound(f"{field} does not fit the stream {shown!r}", field=field)
    requests.sort(key=lambda request: (len(request.request_id), request.request_id))  # numbered, where several
    note = orjson.loads(requests[0].note)
    if note["path"] != path:
        raise InvalidRequest(f"{field} belongs to {note['path']}, this is {path}", field=field)
    return Resumption(place=place, adopted=tuple(requests), note=note)


async def resumption_of(headers: Mapping[str, str], *, serving: Serving, path: str) -> Resumption | None:
    """What the call's Last-Event-ID asks for; None without one. Raises as `place_of` and `resumption_at`."""
    place = place_of(headers)
    if place is None:
        return None
    tenant = tenant_of(headers, has_api_keys=bool(serving.config.api_key))
    return await resumption_at(place, serving=serving, path=path, tenant=tenant)
