"""ConstraintHolds: tracks constraints that the worker has compiled, so that no step waits for compilation. No gRPC, no
grammar.

A sequence enters a slot once its constraint is held: compiled by the worker, and kept there until it is released. Two
constraints are compiled at a time, at most one of them large, and tenants take turns.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from pagoda_common.params.structured_outputs import StructuredOutputsParams
from pagoda_scheduler.core.request import Request

MAX_COMPILING = 2
MAX_AHEAD = 64
"""Maximum number of constraints held for sequences that are not admitted yet."""
MAX_IDLE = 32
"""Maximum number of constraints kept for later requests while the engine is busy."""
MAX_IDLE_BYTES = 128 * 1024
"""Maximum total size of these (StructuredOutputsParams.num_bytes); compiled ones may be a hundred times as large.
"""
LARGE = 1024
"""Size (StructuredOutputsParams.num_bytes) from which a constraint counts as large: only one of these is compiled at a
time."""

Key = tuple[object, ...]


class HoldStatus(Enum):
    """State of a constraint."""

    WAITING = "waiting"
    COMPILING = "compiling"
    READY = "ready"


@dataclass(slots=True, eq=False)
class Hold:
    """One constraint, and the waiting sequences that need it."""

    params: StructuredOutputsParams
    tenant: str
    """Tenant of the first of its sequences."""
    users: dict[Request, None] = field(default_factory=dict)
    status: HoldStatus = HoldStatus.WAITING

    @property
    def is_large(self) -> bool:
        """Whether compilation may take long."""
        return self.params.num_bytes >= LARGE


class ConstraintHolds:
    """The constraints of one worker group."""

    def __init__(
        self, *, start: Callable[[StructuredOutputsParams], None], release: Callable[[StructuredOutputsParams], None]
    ) -> None:
        """`start` makes the worker compile and keep a constraint, and `compiled` or `failed` reports the result; after
        `release` the worker may drop it. Neither calls back at once."""
        self._start = start
        self._release = release
        self._holds: dict[Key, Hold] = {}
        self._of: dict[Request, Hold] = {}
        self._lanes: dict[bool, OrderedDict[str, deque[Hold]]] = {True: OrderedDict(), False: OrderedDict()}
        """Constraints to compile, large ones and others, by tenant in turn. Some are no longer needed."""
        self._compiling: dict[Hold, None] = {}
        self._num_ahead = 0
        """Number of ready constraints with waiting sequences."""
        self._idle: OrderedDict[Key, Hold] = OrderedDict()
        """Ready constraints without waiting sequences, the least recently used first."""
        self._leaving: OrderedDict[Key, tuple[Hold, int]] = OrderedDict()
        """Constraints to release after the next answer: until then a step in flight may bring a sequence that uses
        them."""
        self._last_sent = 0
        self._is_suspended = False

    def announce(self, request: Request) -> None:
        """A sequence starts waiting: queue its constraint for compilation."""
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
        """Whether a step may admit a sequence; announces it if that has not been done."""
        if request.sampling_params.structured_outputs is None:
            return True
        self.announce(request)
        return self._of[request].status is HoldStatus.READY

    def is_ready_alone(self, suspect: Request) -> bool:
        """The same for a suspect: compile no other constraint meanwhile, because that could crash the worker too."""
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
        """The suspect is cleared or gone."""
        if self._is_suspended:
            self._is_suspended = False
            self._start_next()

    def leave(self, request: Request) -> None:
        """A sequence was admitted, or no longer waits."""
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
            del self._holds[hold.params.grammar_key]  # its entry in the lane is skipped later

    def compiled(self, params: StructuredOutputsParams) -> list[Request]:
        """The worker holds a constraint; returns the sequences that waited for it."""
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
        """The worker cannot compile a constraint; returns the sequences that need it."""
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
        """A step was sent."""
        self._last_sent = step

    def answered(self, step: int) -> None:
        """A step was answered; no earlier step is in flight."""
        while self._leaving:
            key, (hold, last_step) = next(iter(self._leaving.items()))
            if last_step > step:
                return
            del self._leaving[key], self._holds[key]
            self._release(hold.params)

    def forget_idle(self) -> bool:
        """Release constraints kept only for later requests; whether there were any. No step may be in flight."""
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
            self._leaving[key] = (oldest, self._last_sent + 1)  # the step being decided may have its last sequence

    @property
    def _num_idle_bytes(self) -> int:
        return sum(hold.params.num_bytes for hold in self._idle.values())

    def _start_next(self) -> None:
        while not self._is_suspended and len(self._compiling) < MAX_COMPILING:
            if self._num_ahead + len(self._compiling) >= MAX_AHEAD or (hold := self._take_next()) is None:
                return
            self._compile(hold)

    def _take_next(self) -> Hold | None:
        """The next constraint to compile: a large one, unless one is being compiled."""
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
