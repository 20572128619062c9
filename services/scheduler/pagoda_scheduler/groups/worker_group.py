"""WorkerGroup: the registered ranks that hold one copy of the model, and their state. Knows no gRPC calls."""

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Self

from pagoda.v1 import scheduler_pb2
from pagoda_common.errors import PagodaError
from pagoda_common.rpc.local_socket import has_listener
from pagoda_scheduler.engine.engine_core import EngineCore
from pagoda_scheduler.groups.hold import Hold

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Rank:
    """One registered worker of a group."""

    identity: scheduler_pb2.WorkerIdentity
    address: str
    """Address at which the scheduler reaches the worker."""
    stream: object = None
    """Its current registration."""
    grace: asyncio.TimerHandle | None = None
    """Deadline for a registration that was cut off to come back."""
    is_leaving: bool = False

    @classmethod
    def of(cls, identity: scheduler_pb2.WorkerIdentity) -> Self:
        """A rank that has just registered. It is reached at its abstract socket where possible, which it is not over a
        tunnel to another machine's loopback, nor from another container."""
        is_near = has_listener(identity.local_address)
        return cls(identity, address=identity.local_address if is_near else identity.address)

    @property
    def number(self) -> int:
        """0 samples for all."""
        return self.identity.rank

    def come_back(self) -> None:
        """The registration is back."""
        if self.grace is not None:
            self.grace.cancel()
            self.grace = None


@dataclass(slots=True, eq=False)
class WorkerGroup:
    """A worker group. It can serve while all its ranks are registered, and is lost with the last of them."""

    number: int
    world_size: int
    """Ranks of a whole group."""
    ranks: dict[int, Rank] = field(default_factory=dict)
    """The registered ranks, by number."""
    state: str = "registered"
    """registered, waiting (for its other ranks), loading, standby, serving, sleeping, waking, reloading, leaving or
    lost."""
    sleep_level: int = 0
    """Sleep level; 0: awake."""
    core: EngineCore | None = None
    """Its step loop; None while it does not serve."""
    task: asyncio.Task[None] | None = None
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a rank is added or lost."""
    hold: Hold = field(default_factory=Hold)
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the group serves, stands by, or has failed to."""
    error: PagodaError | None = None
    """The reason for the failure."""

    @property
    def is_idle(self) -> bool:
        """Whether the group serves and is idle."""
        return self.core is not None and not self.core.scheduler.has_unfinished_requests

    @property
    def missing(self) -> list[int]:
        """Numbers of ranks that have not registered."""
        return [rank for rank in range(self.world_size) if rank not in self.ranks]

    @property
    def members(self) -> list[Rank]:
        """The registered ranks, in order."""
        return [self.ranks[number] for number in sorted(self.ranks)]

    def put(self, rank: Rank) -> None:
        """Add a rank, which replaces an older one of its number."""
        if rank.number in self.ranks:
            logger.warning("%s: worker %s replaces an older one", self.name_of(rank), rank.identity.address)
        self.ranks[rank.number] = rank
        self.changed.set()

    def drop(self, rank: Rank) -> None:
        """Remove a lost rank, without which the group cannot continue. No-op if another one has replaced it."""
        rank.come_back()
        if self.ranks.get(rank.number) is rank:
            del self.ranks[rank.number]
            level = logging.DEBUG if self.lost.is_set() else logging.WARNING  # its loss is already known
            logger.log(level, "%s: worker at %s is gone", self.name_of(rank), rank.identity.address)
            self.changed.set()
            if not self.ranks:
                self.lost.set()

    def name_of(self, rank: Rank) -> str:
        """Name of the rank in logs."""
        if self.world_size == 1:
            return f"group {self.number}"
        return f"group {self.number}, rank {rank.number} of {self.world_size}"

    def settle(self, state: str, error: PagodaError | None = None) -> None:
        """Record the result of a bring-up."""
        self.state, self.error = state, error
        self.settled.set()
