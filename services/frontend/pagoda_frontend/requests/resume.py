"""Resumes streams at another frontend: writes the note for the frontend that adopts a stream, and adopts it.

A client that has lost its connection calls the same path again, at any frontend of the same scheduler, with the header
`Last-Event-ID` set to the last id that it has seen; the body does not matter. It gets the events after that one. Over
gRPC the field `resume_from` does the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel

from pagoda_common.engine.interface import Engine
from pagoda_common.engine.stream import AdoptedRequest
from pagoda_common.errors import InvalidRequest, NotFound
from pagoda_frontend.requests.event_ids import Place

Body = TypeVar("Body", bound=BaseModel)


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumption:
    """A stream to resume."""

    place: Place
    adopted: tuple[AdoptedRequest, ...]
    """One request per prompt, in order."""
    note: Mapping[str, Any]
    """The arguments of `note_of`."""

    @property
    def response_id(self) -> str:
        """The id of the first attempt."""
        return self.place.key

    @property
    def created(self) -> int:
        """Unix time in seconds of the first attempt."""
        return int(self.note["created"])

    def body_as(self, body_type: type[Body]) -> Body:
        """The body of the original request."""
        return body_type.model_validate_json(self.note["body"])


def note_of(body: BaseModel | str, *, path: str, created: int, **more: Any) -> bytes:
    """The state that an adopting frontend needs besides tokens; `more` must be JSON."""
    text = body if isinstance(body, str) else body.model_dump_json(exclude_unset=True)
    return orjson.dumps({"path": path, "created": created, "body": text, **more})


async def resumption_at(place: Place, *, engine: Engine, path: str, tenant: str) -> Resumption:
    """The stream to resume at `place`.

    Args:
        path: of the call, which must be that of the stream.
        tenant: the caller, which must own the stream.

    Raises:
        InvalidRequest: the stream belongs to another path.
        NotFound: the stream is unknown or another tenant's, or its lease is over.
        NotReady: the scheduler does not answer.
    """
    field, shown = place.field, place.key[:100]
    try:
        requests = await engine.adopt(place.key)
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
        raise InvalidRequest(f"{field} belongs to a stream of {note['path']}, this call is {path}", field=field)
    return Resumption(place=place, adopted=tuple(requests), note=note)
