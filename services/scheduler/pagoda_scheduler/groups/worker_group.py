"""WorkerGroup: the registered ranks that hold one copy of the model, and how they are. Knows no gRPC calls."""

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
    """Where it is called."""
    stream: object = None
    """The registration that it has now."""
    grace: asyncio.TimerHandle | None = None
    """Until its registration, which was cut off, must be back."""
    is_leaving: bool = False

    @classmethod
    def of(cls, identity: scheduler_pb2.WorkerIdentity) -> Self:
        """One that has just registered. It is called at its abstract socket where that is within reach: not over a
        tunnel to another machine's loopback, and not from another container."""
        is_near = has_listener(identity.local_address)
        return cls(identity, address=identity.local_address if is_near else identity.address)

    @property
    def number(self) -> int:
        """0 samples for all."""
        return self.identity.rank

    def come_back(self) -> None:
        """The registration is there again."""
        if self.grace is not None:
            self.grace.cancel()
            self.grace = None


@dataclass(slots=True, eq=False)
class WorkerGroup:
    """A worker group. It may serve while all its ranks are there, and is lost with the last of them."""

    number: int
    world_size: int
    """Ranks of a whole group."""
    ranks: dict[int, Rank] = field(default_factory=dict)
    """Those that are there."""
    state: str = "registered"
    """registered, waiting (for its other ranks), loading, standby, serving, sleeping, waking, reloading, leaving or
    lost."""
    sleep_level: int = 0
    """0 awake; 1 or 2."""
    core: EngineCore | None = None
    """Its step loop; None if it does not serve."""
    task: asyncio.Task[None] | None = None
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """A rank has come or gone."""
    hold: Hold = field(default_factory=Hold)
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """It serves, stands by, or has failed to."""
    error: PagodaError | None = None
    """Why it has failed."""

    @property
    def is_idle(self) -> bool:
        """Whether it serves and has nothing to do."""
        return self.core is not None and not self.core.scheduler.has_unfinished_requests

    @property
    def missing(self) -> list[int]:
        """Ranks that have not registered."""
        return [rank for rank in range(self.world_size) if rank not in self.ranks]

    @property
    def members(self) -> list[Rank]:
        """Ranks that are there, in order."""
        return [self.ranks[number] for number in sorted(self.ranks)]

    def put(self, rank: Rank) -> None:
        """A rank has come; it replaces an older one."""
        if rank.number in self.ranks:
            logger.warning("%s: worker %s replaces an older one", self.name_of(rank), rank.identity.address)
        self.ranks[rank.number] = rank
        self.changed.set()

    def drop(self, rank: Rank) -> None:
        """A rank has gone, and the group cannot continue without it. Nothing if another one has its place."""
        rank.come_back()
        if self.ranks.get(rank.number) is rank:
            del self.ranks[rank.number]
            level = logging.DEBUG if self.lost.is_set() else logging.WARNING  # that it goes is known already
            logger.log(level, "%s: worker at %s is gone", self.name_of(rank), rank.identity.address)
            self.changed.set()
            if not self.ranks:
                self.lost.set()

    def name_of(self, rank: Rank) -> str:
        """For logs."""
        if self.world_size == 1:
            return f"group {self.number}"
        return f"group {self.number}, rank {rank.number} of {self.world_size}"

    def settle(self, state: str, error: PagodaError | None = None) -> None:
        """End of a bring-up."""
        self.state, self.error = state, error
        self.settled.set()
