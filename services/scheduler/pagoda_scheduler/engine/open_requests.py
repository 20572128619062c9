"""OpenRequests: requests that have not ended or are kept for their client, and their time limits. No groups."""

from collections.abc import Callable
from dataclasses import dataclass

from pagoda_common.errors import Superseded
from pagoda_scheduler.core.request import Request
from pagoda_scheduler.engine.deadlines import Deadlines
from pagoda_scheduler.engine.engine_core import EngineCore
from pagoda_scheduler.engine.sink import Sink


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a request that may outlive its frontend."""

    key: str
    """Key under which the request can be adopted."""
    message: object
    """The original frontend's message, for the frontend that adopts the request."""


@dataclass(slots=True)
class OpenRequest:
    """A request that has not ended, or that is kept for its client: its sequences, and the group that serves them."""

    attempt: int
    sequences: list[Request]
    core: EngineCore | None
    origin: Origin | None = None
    is_over: bool = False
    """Whether the end of the last sequence was noted."""
    _num_ended: int = 0
    """Number of ended sequences at the beginning of the list, so that each is checked only once."""

    @property
    def request_id(self) -> str:
        """Request id of all its sequences."""
        return self.sequences[0].request_id

    @property
    def sink(self) -> object | None:
        """Receives its tokens; None when its frontend is gone."""
        return self.sequences[0].sink

    @property
    def unfinished(self) -> list[Request]:
        """Sequences that are still open."""
        return [request for request in self.sequences if not request.is_finished]

    @property
    def has_ended(self) -> bool:
        """Whether no sequence is open."""
        sequences = self.sequences
        while self._num_ended < len(sequences) and sequences[self._num_ended].is_finished:
            self._num_ended += 1
        return self._num_ended == len(sequences)


class OpenRequests:
    """Open requests by id, their deadlines, and the leases of those whose frontend is gone."""

    def __init__(
        self, *, lease_s: float, expire: Callable[[str, float], None], end_lease: Callable[[str, float], None]
    ) -> None:
        """`lease_s`: seconds for which a request without a frontend can be adopted, 0: not at all. `expire` and
        `end_lease` are called with a request's id and its seconds."""
        self.by_id: dict[str, OpenRequest] = {}
        self._lease_s = lease_s
        self._deadlines = Deadlines(expire=expire)
        self._leases = Deadlines(expire=end_lease)

    @property
    def has_orphans(self) -> bool:
        """Whether the frontend of some request is gone."""
        return len(self._leases) > 0

    @property
    def is_busy(self) -> bool:
        """Whether some sequence has not ended."""
        return any(not open_request.has_ended for open_request in self.by_id.values())

    def is_known(self, request_id: str, attempt: int) -> bool:
        """Whether this attempt of a request is already open.

        Raises:
            Superseded: a newer attempt is open.
        """
        known = self.by_id.get(request_id)
        if known is not None and attempt < known.attempt:
            raise Superseded(f"request {request_id} is at attempt {known.attempt}, got {attempt}")
        return known is not None and attempt == known.attempt

    def add(self, open_request: OpenRequest, *, timeout_s: float = 0.0) -> None:
        """Keep a request; it has `timeout_s` seconds, 0: no limit."""
        self.by_id[open_request.request_id] = open_request
        if timeout_s > 0:
            self._deadlines.set(open_request.request_id, timeout_s)

    def forget(self, request_id: str) -> None:
        """Remove a request that is over."""
        self._deadlines.cancel(request_id)
        self._leases.cancel(request_id)
        del self.by_id[request_id]

    def note_end(self, request: Request) -> None:
        """A sequence has ended; after the last one its request is removed, unless it is kept for adoption."""
        open_request = self.by_id.get(request.request_id)
        if open_request is None or open_request.is_over or not open_request.has_ended:
            return
        if request in open_request.sequences:  # and of no older attempt
            open_request.is_over = True
            self._deadlines.cancel(request.request_id)
            if open_request.origin is None:
                self.forget(request.request_id)

    def orphan(self, sink: Sink) -> list[str]:
        """A frontend is gone: its requests that can be adopted get a lease; returns the ids of the others."""
        left = []
        for request_id, open_request in self.by_id.items():
            if open_request.sink is not sink:
                continue
            if open_request.origin is None or not self._lease_s:
                left.append(request_id)
                continue
            for sequence in open_request.sequences:
                sequence.sink = None
            self._leases.set(request_id, self._lease_s)
        return left

    def adopt(self, key: str) -> list[OpenRequest]:
        """The requests with this key; renews the lease of those without a frontend."""
        found = [each for each in self.by_id.values() if each.origin is not None and each.origin.key == key]
        for open_request in found:
            if open_request.sink is None:
                self._leases.set(open_request.request_id, self._lease_s)
        return found

    def compact(self) -> None:
        """Free empty tables; only while no request is open."""
        self.by_id.clear()
        self._deadlines.compact()
        self._leases.compact()
