"""Streams that go on at another frontend: an address in every event, and a note for whoever adopts the stream.

A client that has lost its connection asks the same path again, at any frontend of the same scheduler, with the header
`Last-Event-ID` set to the last id that it has seen; the body does not matter. It gets the events behind that one.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import orjson
from pydantic import BaseModel

from pagoda_common.engine_stream import AdoptedRequest, Known
from pagoda_common.errors import InvalidRequest, NotFound
from pagoda_frontend.serving import Serving

HEADER = "Last-Event-ID"
MAX_LENGTH = 16 * 1024
_ID = re.compile(r"(?P<key>[\x21-\x7e]{1,512}):(?P<places>\d{1,10}f?(,\d{1,10}f?)*)")

Body = TypeVar("Body", bound=BaseModel)


class EventIds:
    """The ids of one stream's events: the response's id, and for each sequence how many tokens the client has.

    An `f` behind the number says that it has the sequence's end as well.
    """

    def __init__(self, *, response_id: str, n: int) -> None:
        self._prefix = f"id: {response_id}:"
        self._places = ["0"] * n

    def advance(self, index: int, num_tokens: int, *, is_finished: bool) -> bytes:
        """The line that goes with the event after which sequence `index` is at `num_tokens`."""
        self._places[index] = f"{num_tokens}f" if is_finished else str(num_tokens)
        return f"{self._prefix}{','.join(self._places)}\n".encode()


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumption:
    """A stream to go on with."""

    adopted: AdoptedRequest
    known: tuple[Known, ...]
    """What the client has of each sequence."""
    response_id: str
    created: int
    """Unix time in seconds of the first attempt."""
    body: bytes
    """JSON of the request."""

    def body_as(self, body_type: type[Body]) -> Body:
        """The request's body again."""
        return body_type.model_validate_json(self.body)


def note_of(body: BaseModel, *, path: str, created: int) -> bytes:
    """What an adopter has to know besides tokens."""
    return orjson.dumps({"path": path, "created": created, "body": body.model_dump_json(exclude_unset=True)})


async def resumption_of(headers: Mapping[str, str], *, serving: Serving, path: str) -> Resumption | None:
    """What the call's Last-Event-ID asks for; None without one.

    Raises:
        InvalidRequest: it is no id of ours, or belongs to another path.
        NotFound: the stream is unknown, or its lease is over.
        NotReady: the scheduler does not answer.
    """
    given = headers.get(HEADER.lower())
    if given is None:
        return None
    match = _ID.fullmatch(given) if len(given) <= MAX_LENGTH else None
    if match is None:
        raise InvalidRequest(f"{HEADER} is not an id of an event of ours: {given[:100]!r}", field=HEADER)
    places = [Known(int(place.rstrip("f")), place.endswith("f")) for place in match["places"].split(",")]
    requests = await serving.engine.adopt(match["key"])
    if len(requests) != 1 or len(requests[0].sequences) != len(places):
        raise NotFound(f"{HEADER} does not fit the stream {match['key'][:100]!r}", field=HEADER)
    note = orjson.loads(requests[0].note)
    if note["path"] != path:
        raise InvalidRequest(f"{HEADER} belongs to {note['path']}, this is {path}", field=HEADER)
    return Resumption(
        adopted=requests[0],
        known=tuple(places),
        response_id=match["key"],
        created=note["created"],
        body=note["body"].encode(),
    )
