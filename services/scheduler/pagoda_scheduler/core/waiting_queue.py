"""The order in which waiting sequences are admitted: one class a policy."""

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator
from itertools import count

from pagoda_common.config.engine_config import SchedulingPolicy
from pagoda_scheduler.core.request import Request

MAX_TENANTS = 4096
"""That wait for nothing and of which is remembered what they were served: a name costs its sender nothing where there
are no keys."""


class WaitingQueue(ABC):
    """Waiting sequences. Adding, taking and removing are cheap, however many wait."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[Request, int] = OrderedDict()
        self._aside: dict[Request, None] = {}
        """They count, and are nobody's next: something has to be there first."""
        self._tickets = count()
        self.num_prompt_tokens = 0
        """Prompt tokens of everything that waits."""

    def __len__(self) -> int:
        return len(self._waiting) + len(self._aside)

    def __contains__(self, request: Request) -> bool:
        return request in self._waiting or request in self._aside

    def __iter__(self) -> Iterator[Request]:
        return iter([*self._aside, *self._waiting])

    @property
    def has_next(self) -> bool:
        """Whether `peek` has something to give."""
        return bool(self._waiting)

    def append(self, request: Request) -> None:
        """Add a sequence that has not run yet."""
        self._waiting[request] = next(self._tickets)
        self.num_prompt_tokens += request.num_prompt_tokens

    def append_front(self, request: Request) -> None:
        """Put a sequence back that had been admitted."""
        self.append(request)
        self._waiting.move_to_end(request, last=False)

    def set_aside(self, request: Request) -> None:
        """A sequence lets others pass until `put_back`; it waits on."""
        self._take(request)
        self._aside[request] = None

    def put_back(self, request: Request) -> None:
        """A sequence that was set aside is the next; no-op for one that was not."""
        if request in self._aside:
            self.remove(request)
            self.append_front(request)

    @abstractmethod
    def peek(self) -> Request:
        """The next sequence; there must be one (`has_next`)."""

    def pop(self) -> Request:
        """Take the next sequence."""
        request = self.peek()
        self.remove(request)
        return request

    def remove(self, request: Request) -> None:
        """Take out a sequence wherever it stands."""
        if request in self._aside:
            del self._aside[request]
        else:
            self._take(request)
        self.num_prompt_tokens -= request.num_prompt_tokens

    def _take(self, request: Request) -> None:
        """Take out a sequence that was not set aside."""
        del self._waiting[request]

    def compact(self) -> None:
        """Give back what a burst has left in empty tables; while nothing waits."""
        self._waiting.clear()

    def charge(self, request: Request, num_tokens: int) -> None:  # noqa: B027 (most policies do not count)
        """`request` was served `num_tokens` tokens; matters to the fair policy alone."""


class FcfsQueue(WaitingQueue):
    """First come first served; preempted sequences come first of all."""

    def peek(self) -> Request:
        """The next sequence; there must be one."""
        return next(iter(self._waiting))


class PriorityQueue(WaitingQueue):
    """Lower `priority` first, then arrival time."""

    def __init__(self) -> None:
        super().__init__()
        # Entries are (priority, arrival, ticket, request); one is dead when its ticket is not the request's own.
        self._heap: list[tuple[int, int, int, Request]] = []

    def append(self, request: Request) -> None:
        """Add a sequence."""
        super().append(request)
        heapq.heappush(self._heap, (request.priority, request.arrival_ns, self._waiting[request], request))

    def peek(self) -> Request:
        """The next sequence; there must be one."""
        while self._waiting.get(self._heap[0][-1]) != self._heap[0][2]:
            heapq.heappop(self._heap)
        return self._heap[0][-1]

    def compact(self) -> None:
        """Give back empty tables, and sequences that were removed and still stand in the heap."""
        super().compact()
        self._heap.clear()


class FairQueue(WaitingQueue):
    """The tenant that was served least goes first; first come first served within a tenant.

    A tenant that comes back from a pause starts level with the least served of those that wait, so that nobody saves
    up. Source: virtual token counters, Sheng et al. 2024 (arXiv 2401.00588).
    """

    def __init__(self) -> None:
        super().__init__()
        self._tenants: dict[str, OrderedDict[Request, None]] = {}
        self._served: dict[str, int] = {}

    def append(self, request: Request) -> None:
        """Add a sequence."""
        super().append(request)
        tenant = request.tenant
        if tenant not in self._tenants:
            floor = min((self._served[other] for other in self._tenants), default=0)
            self._served[tenant] = max(self._served.get(tenant, 0), floor)
            self._tenants[tenant] = OrderedDict()
        self._tenants[tenant][request] = None

    def append_front(self, request: Request) -> None:
        """Put a sequence back in front of its tenant's others."""
        super().append_front(request)
        self._tenants[request.tenant].move_to_end(request, last=False)

    def peek(self) -> Request:
        """The next sequence; there must be one."""
        tenant = min(self._tenants, key=lambda name: self._served[name])
        return next(iter(self._tenants[tenant]))

    def _take(self, request: Request) -> None:
        super()._take(request)
        waiting = self._tenants[request.tenant]
        del waiting[request]
        if not waiting:
            del self._tenants[request.tenant]

    def charge(self, request: Request, num_tokens: int) -> None:
        """Count what a tenant was served."""
        self._served[request.tenant] = self._served.get(request.tenant, 0) + num_tokens
        if len(self._served) > 2 * MAX_TENANTS:
            self._forget()

    def compact(self) -> None:
        """Give back empty tables, and what tenants were served that all start level again."""
        super().compact()
        self._served.clear()

    def _forget(self) -> None:
        """Keep what those were served that wait, and of the others those that were served most."""
        idle = sorted(self._served.keys() - self._tenants.keys(), key=lambda name: self._served[name])
        for tenant in idle[: max(0, len(self._served) - MAX_TENANTS)]:
            del self._served[tenant]


QUEUES: dict[SchedulingPolicy, type[WaitingQueue]] = {"fcfs": FcfsQueue, "priority": PriorityQueue, "fair": FairQueue}
