"""ConstraintHolds: which constraints the worker has compiled, so that no step waits for one. No gRPC, no grammar.

A sequence enters a slot when its constraint is held: compiled by the worker, and kept there until it is released. Two
are compiled at a time, one of them at most a large one, and tenants take turns.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from pagoda_common.params.structured_outputs import StructuredOutputsParams
from pagoda_scheduler.core.request import Request

MAX_COMPILING = 2
MAX_AHEAD = 64
"""Constraints that are held for sequences which have not been admitted."""
MAX_IDLE = 32
"""Constraints that are held for the next request under them, until all rest."""
MAX_IDLE_BYTES = 128 * 1024
"""Their size (StructuredOutputsParams.num_bytes): what a worker keeps of one may be a hundred times as large."""
LARGE = 1024
"""Size (StructuredOutputsParams.num_bytes) from which on a constraint may take long: only one at a time does."""

Key = tuple[object, ...]


class HoldStatus(Enum):
    """How far a constraint is."""

    WAITING = "waiting"
    COMPILING = "compiling"
    READY = "ready"


@dataclass(slots=True, eq=False)
class Hold:
    """One constraint, and the sequences that wait to be admitted under it."""

    params: StructuredOutputsParams
    tenant: str
    """Tenant of the first of its sequences."""
    users: dict[Request, None] = field(default_factory=dict)
    status: HoldStatus = HoldStatus.WAITING

    @property
    def is_large(self) -> bool:
        """Whether it may take long to compile."""
        return self.params.num_bytes >= LARGE


class ConstraintHolds:
    """The constraints of one worker group."""

    def __init__(
        self, *, start: Callable[[StructuredOutputsParams], None], release: Callable[[StructuredOutputsParams], None]
    ) -> None:
        """`start` has the worker compile and keep a constraint, of which `compiled` or `failed` tells; after `release`
        it may forget it. Neither calls back at once."""
        self._start = start
        self._release = release
        self._holds: dict[Key, Hold] = {}
        self._of: dict[Request, Hold] = {}
        self._lanes: dict[bool, OrderedDict[str, deque[Hold]]] = {True: OrderedDict(), False: OrderedDict()}
        """Those to be compiled, large ones and others, by tenant, in turn. Some have lost their users."""
        self._compiling: dict[Hold, None] = {}
        self._num_ahead = 0
        """Constraints that are ready, and have sequences that were not admitted."""
        self._idle: OrderedDict[Key, Hold] = OrderedDict()
        """Ready ones without such sequences, the least recently used first."""
        self._leaving: OrderedDict[Key, tuple[Hold, int]] = OrderedDict()
        """To be released once a step is answered: until then a step in flight may bring a sequence under them."""
        self._last_sent = 0
        self._is_suspended = False

    def announce(self, request: Request) -> None:
        """A sequence waits: its constraint is compiled soon."""
        params = request.sampling_params.structured_outputs
        if params is None or request in self._of:
            return
        key = params.grammar_key
        hold = self._holds.get(key)
        if hold is None:
            hold = self._holds[key] = Hold(params, request.tenant)
            self._lanes[hold.is_large].setdefault(hold.tenant, deque()).append(hold)
        if hold.status is HoldStatus.READY and not hold.users:
            self._idle.pop(key, None)
            self._leaving.pop(key, None)
            self._num_ahead += 1
        hold.users[request] = None
        self._of[request] = hold
        self._start_next()

    def is_ready(self, request: Request) -> bool:
        """Whether a step may take a sequence on; one that has not been announced is."""
        if request.sampling_params.structured_outputs is None:
            return True
        self.announce(request)
        return self._of[request].status is HoldStatus.READY

    def is_ready_alone(self, suspect: Request) -> bool:
        """The same, and no constraint of others is compiled meanwhile: it may be what ends the worker."""
        self._is_suspended = True
        if suspect.sampling_params.structured_outputs is None:
            return not self._compiling
        self.announce(suspect)
        hold = self._of[suspect]
        if hold.status is HoldStatus.WAITING and not self._compiling:
            self._lanes[hold.is_large][hold.tenant].remove(hold)
            self._compile(hold)
        return hold.status is HoldStatus.READY and not self._compiling

    def resume(self) -> None:
        """There is no suspect any more."""
        if self._is_suspended:
            self._is_suspended = False
            self._start_next()

    def leave(self, request: Request) -> None:
        """A sequence was admitted, or does not wait here any more."""
        hold = self._of.pop(request, None)
        if hold is None:
            return
        del hold.users[request]
        if hold.users:
            return
        if hold.status is HoldStatus.READY:
            self._num_ahead -= 1
            self._keep_idle(hold)
            self._start_next()
        elif hold.status is HoldStatus.WAITING:
            del self._holds[hold.params.grammar_key]  # its place among those that wait is passed over

    def compiled(self, params: StructuredOutputsParams) -> list[Request]:
        """The worker holds a constraint; the sequences that waited for that."""
        hold = self._holds[params.grammar_key]
        del self._compiling[hold]
        hold.status = HoldStatus.READY
        if hold.users:
            self._num_ahead += 1
        else:
            self._keep_idle(hold)
        self._start_next()
        return list(hold.users)

    def failed(self, params: StructuredOutputsParams) -> list[Request]:
        """The worker cannot compile a constraint; the sequences that cannot run."""
        hold = self._holds.pop(params.grammar_key)
        del self._compiling[hold]
        for request in hold.users:
            del self._of[request]
        self._start_next()
        return list(hold.users)

    @property
    def being_compiled(self) -> Iterator[Request]:
        """The sequences whose constraints the worker is compiling."""
        return (request for hold in self._compiling for request in hold.users)

    def sent(self, step: int) -> None:
        """A step went out."""
        self._last_sent = step

    def answered(self, step: int) -> None:
        """A step was answered: no earlier one is in flight."""
        while self._leaving:
            key, (hold, last_step) = next(iter(self._leaving.items()))
            if last_step > step:
                return
            del self._leaving[key], self._holds[key]
            self._release(hold.params)

    def forget_idle(self) -> bool:
        """Release what is held for the next requests alone; whether there was anything. No step may be in flight."""
        for key, hold in (*self._idle.items(), *((key, hold) for key, (hold, _) in self._leaving.items())):
            del self._holds[key]
            self._release(hold.params)
        has_forgotten = bool(self._idle or self._leaving)
        self._idle.clear()
        self._leaving.clear()
        return has_forgotten

    def _keep_idle(self, hold: Hold) -> None:
        self._idle[hold.params.grammar_key] = hold
        while len(self._idle) > 1 and (len(self._idle) > MAX_IDLE or self._num_idle_bytes > MAX_IDLE_BYTES):
            key, oldest = self._idle.popitem(last=False)
            self._leaving[key] = (oldest, self._last_sent + 1)  # the step that is decided now may have its last one

    @property
    def _num_idle_bytes(self) -> int:
        return sum(hold.params.num_bytes for hold in self._idle.values())

    def _start_next(self) -> None:
        while not self._is_suspended and len(self._compiling) < MAX_COMPILING:
            if self._num_ahead + len(self._compiling) >= MAX_AHEAD or (hold := self._take_next()) is None:
                return
            self._compile(hold)

    def _take_next(self) -> Hold | None:
        """The next constraint that may be compiled now: a large one, unless there is one under way."""
        if not any(hold.is_large for hold in self._compiling) and (large := _take_turn(self._lanes[True])) is not None:
            return large
        return _take_turn(self._lanes[False])

    def _compile(self, hold: Hold) -> None:
        hold.status = HoldStatus.COMPILING
        self._compiling[hold] = None
        self._start(hold.params)


def _take_turn(lane: OrderedDict[str, deque[Hold]]) -> Hold | None:
    """The next constraint of the tenant whose turn it is."""
    while lane:
        tenant, holds = lane.popitem(last=False)
        while holds and not holds[0].users:
            holds.popleft()
        if holds:
            hold = holds.popleft()
            if holds:
                lane[tenant] = holds
            return hold
    return None
