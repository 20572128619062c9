"""The order in which waiting sequences are admitted: one class per policy."""

import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

from pagoda_common.config.engine_config import SchedulingPolicy
from pagoda_scheduler.core.request import Request
from pagoda_scheduler.core.turns import Turns

MAX_TENANTS = 4096
"""Maximum number of tenants without waiting sequences whose service is remembered; without keys, names are free to
invent."""

Key = tuple[float, int]
"""Sort key of a sequence; the smallest is next."""


class Share(NamedTuple):
    """The waiting sequences of one client."""

    num_sequences: int
    num_prompt_tokens: int


NO_SHARE = Share(0, 0)


class WaitingQueue(ABC):
    """Waiting sequences. Adding, taking and removing are cheap, however many wait."""

    def __init__(self) -> None:
        self.num_prompt_tokens = 0
        """Prompt tokens of all waiting sequences."""
        self.num_late = 0
        """Number of sequences of large calls that have arrived since the queue was last idle."""
        self._shares: dict[str, Share] = {}

    def share_of(self, client: str) -> "Share":
        """The waiting sequences of a client."""
        return self._shares.get(client, NO_SHARE)

    def _count(self, request: Request) -> None:
        self.num_prompt_tokens += request.num_prompt_tokens
        if request.client:
            num_sequences, num_tokens = self.share_of(request.client)
            self._shares[request.client] = Share(num_sequences + 1, num_tokens + request.num_prompt_tokens)

    def _uncount(self, request: Request) -> None:
        self.num_prompt_tokens -= request.num_prompt_tokens
        if request.client:
            num_sequences, num_tokens = self._shares.pop(request.client)
            if num_sequences > 1:
                self._shares[request.client] = Share(num_sequences - 1, num_tokens - request.num_prompt_tokens)

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __contains__(self, request: Request) -> bool: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Request]: ...

    @property
    @abstractmethod
    def has_next(self) -> bool:
        """Whether `peek` can return a sequence."""

    @abstractmethod
    def append(self, request: Request) -> None:
        """Add a sequence that has not run yet."""

    @abstractmethod
    def append_front(self, request: Request) -> None:
        """Put back a sequence that had been admitted."""

    def append_late(self, request: Request) -> None:
        """Put a sequence back that had been admitted ahead of its turn."""
        self.append_front(request)

    def pass_turn(self, request: Request) -> bool:
        """A waiting sequence lets those of other calls pass for one turn; False if none of these waits."""
        return False

    @abstractmethod
    def set_aside(self, request: Request) -> None:
        """Set a sequence aside until `put_back`: it still counts, but is never the next."""

    @abstractmethod
    def put_back(self, request: Request) -> None:
        """Give a sequence that was set aside its place back; no-op for others."""

    @abstractmethod
    def peek(self) -> Request:
        """The next sequence; there must be one (`has_next`)."""

    @abstractmethod
    def pop(self) -> Request:
        """Take the next sequence: it is admitted."""

    @abstractmethod
    def remove(self, request: Request) -> None:
        """Remove a sequence at any position."""

    @abstractmethod
    def compact(self) -> None:
        """Free empty tables after a burst; only while nothing waits."""

    def charge(self, request: Request, num_tokens: int) -> None:  # noqa: B027 (most policies do not count)
        """`request` was served `num_tokens` tokens; only the fair policy uses this."""


class OrderedQueue(WaitingQueue):
    """A queue ordered by keys that sequences get on arrival."""

    def __init__(self) -> None:
        super().__init__()
        self._serials = count()
        # Entries are (key, serial, request); one is dead when its serial is not the request's own.
        self._heap: list[tuple[Key, int, Request]] = []
        self._waiting: dict[Request, tuple[Key, int]] = {}
        self._aside: dict[Request, Key] = {}

    def __len__(self) -> int:
        return len(self._waiting) + len(self._aside)

    def __contains__(self, request: Request) -> bool:
        return request in self._waiting or request in self._aside

    def __iter__(self) -> Iterator[Request]:
        keys = self._aside | {request: key for request, (key, _) in self._waiting.items()}
        return iter(sorted(keys, key=keys.__getitem__))

    @property
    def has_next(self) -> bool:
        """Whether `peek` can return a sequence."""
        return bool(self._waiting)

    @abstractmethod
    def _last(self, request: Request) -> Key:
        """Key of a sequence that has just arrived."""

    @abstractmethod
    def _first(self, request: Request) -> Key:
        """Key of a sequence that had been admitted."""

    def _leave(self, request: Request) -> None:
        """A sequence no longer waits."""

    def append(self, request: Request) -> None:
        """Add a sequence that has not run yet."""
        self._count(request)
        self._put(request, self._last(request))

    def append_front(self, request: Request) -> None:
        """Put back a sequence that had been admitted."""
        self._count(request)
        self._put(request, self._first(request))

    def set_aside(self, request: Request) -> None:
        """A sequence lets others pass until `put_back`."""
        self._aside[request] = self._waiting.pop(request)[0]

    def put_back(self, request: Request) -> None:
        """A sequence that was set aside has its place again."""
        if (key := self._aside.pop(request, None)) is not None:
            self._put(request, key)

    def peek(self) -> Request:
        """The next sequence; there must be one."""
        heap, waiting = self._heap, self._waiting
        while waiting.get(heap[0][2], (None, -1))[1] != heap[0][1]:
            heapq.heappop(heap)
        return heap[0][2]

    def pop(self) -> Request:
        """Take the next sequence."""
        request = self.peek()
        self.remove(request)
        return request

    def remove(self, request: Request) -> None:
        """Remove a sequence at any position."""
        if self._aside.pop(request, None) is None:
            del self._waiting[request]
        self._uncount(request)
        self._leave(request)

    def compact(self) -> None:
        """Free empty tables, and removed sequences that are still in the heap."""
        self._heap, self._waiting, self._aside, self.num_late = [], {}, {}, 0
        self._shares = {}

    def _put(self, request: Request, key: Key) -> None:
        serial = next(self._serials)
        self._waiting[request] = (key, serial)
        heapq.heappush(self._heap, (key, serial, request))


class FcfsQueue(OrderedQueue):
    """First come, first served, except that large calls and clients with many waiting sequences take turns; preempted
    sequences come before all others."""

    def __init__(self) -> None:
        super().__init__()
        self._turns = Turns()

    def append_late(self, request: Request) -> None:
        """Put a sequence back that had been admitted ahead of its turn."""
        self._count(request)
        self._put(request, self._turns.late(request))

    def pass_turn(self, request: Request) -> bool:
        """A sequence that waits lets those of other calls pass, a turn long."""
        if self._turns.num_calls == 1:
            return False
        self.remove(request)
        self.append_late(request)
        return True

    def _last(self, request: Request) -> Key:
        key = self._turns.last(request)
        self.num_late += self._turns.is_large(request)
        return key

    def _first(self, request: Request) -> Key:
        return self._turns.first(request)

    def _leave(self, request: Request) -> None:
        self._turns.leave(request)

    def pop(self) -> Request:
        """Take the next sequence."""
        request = self.peek()
        self._turns.admit(self._waiting[request][0])
        self.remove(request)
        return request


class PriorityQueue(OrderedQueue):
    """Lower `priority` first, then arrival time."""

    def _last(self, request: Request) -> Key:
        return (request.priority, request.arrival_ns)

    _first = _last


class FairQueue(WaitingQueue):
    """The tenant that was served least goes first; first come, first served within a tenant.

    A tenant that returns after a pause starts level with the least served waiting tenant, so that no tenant can save up
    service. Source: virtual token counters, Sheng et al. 2024 (arXiv 2401.00588).
    """

    def __init__(self) -> None:
        super().__init__()
        self._num_waiting = 0
        self._tenants: dict[str, FcfsQueue] = {}
        self._served: dict[str, int] = {}

    def __len__(self) -> int:
        return self._num_waiting

    def __contains__(self, request: Request) -> bool:
        return request.tenant in self._tenants and request in self._tenants[request.tenant]

    def __iter__(self) -> Iterator[Request]:
        return iter([request for queue in self._tenants.values() for request in queue])

    @property
    def has_next(self) -> bool:
        """Whether `peek` can return a sequence."""
        return any(queue.has_next for queue in self._tenants.values())

    def append(self, request: Request) -> None:
        """Add a sequence."""
        queue = self._queue_for(request)
        num_late = queue.num_late
        queue.append(request)
        self.num_late += queue.num_late - num_late

    def append_late(self, request: Request) -> None:
        """Put a sequence back that had been admitted ahead of its turn."""
        self._queue_for(request).append_late(request)

    def pass_turn(self, request: Request) -> bool:
        """A waiting sequence lets those of other calls of its tenant pass."""
        return self._tenants[request.tenant].pass_turn(request)

    def append_front(self, request: Request) -> None:
        """Put a sequence back before its tenant's others."""
        self._queue_for(request).append_front(request)

    def set_aside(self, request: Request) -> None:
        """A sequence lets others pass until `put_back`."""
        self._tenants[request.tenant].set_aside(request)

    def put_back(self, request: Request) -> None:
        """A sequence that was set aside has its place again."""
        if (queue := self._tenants.get(request.tenant)) is not None:
            queue.put_back(request)

    def peek(self) -> Request:
        """The next sequence; there must be one."""
        return self._next_queue().peek()

    def pop(self) -> Request:
        """Take the next sequence."""
        request = self._next_queue().pop()
        self._forget_request(request)
        return request

    def remove(self, request: Request) -> None:
        """Remove a sequence at any position."""
        self._tenants[request.tenant].remove(request)
        self._forget_request(request)

    def charge(self, request: Request, num_tokens: int) -> None:
        """Count the tokens that a tenant was served."""
        self._served[request.tenant] = self._served.get(request.tenant, 0) + num_tokens
        if len(self._served) > 2 * MAX_TENANTS:
            self._forget()

    def compact(self) -> None:
        """Free empty tables, and the service counters of tenants, who all start level again."""
        self._tenants.clear()
        self._served.clear()
        self._shares.clear()
        self.num_late = 0

    def _next_queue(self) -> FcfsQueue:
        names = (name for name, queue in self._tenants.items() if queue.has_next)
        return self._tenants[min(names, key=lambda name: self._served[name])]

    def _queue_for(self, request: Request) -> FcfsQueue:
        """The queue of an arriving sequence's tenant."""
        tenant = request.tenant
        if tenant not in self._tenants:
            floor = min((self._served[other] for other in self._tenants), default=0)
            self._served[tenant] = max(self._served.get(tenant, 0), floor)
            self._tenants[tenant] = FcfsQueue()
        self._num_waiting += 1
        self._count(request)
        return self._tenants[tenant]

    def _forget_request(self, request: Request) -> None:
        self._num_waiting -= 1
        self._uncount(request)
        if not self._tenants[request.tenant]:
            del self._tenants[request.tenant]

    def _forget(self) -> None:
        """Keep the counters of waiting tenants, and of the others those served most."""
        idle = sorted(self._served.keys() - self._tenants.keys(), key=lambda name: self._served[name])
        for tenant in idle[: max(0, len(self._served) - MAX_TENANTS)]:
            del self._served[tenant]


QUEUES: dict[SchedulingPolicy, type[WaitingQueue]] = {"fcfs": FcfsQueue, "priority": PriorityQueue, "fair": FairQueue}
"""Queue class by policy."""
