"""Chooses the worker group of a request: one class per policy."""

from collections import OrderedDict
from itertools import count
from typing import Protocol

from pagoda_common.config.engine_config import RoutingPolicy
from pagoda_scheduler.core.request import Request
from pagoda_scheduler.engine.engine_core import EngineCore

MAX_MEMORY = 200_000
"""Number of block hashes remembered: several working sets of a million tokens at 16 tokens per block."""
DECODE_COST_TOKENS = 16
"""Prompt tokens that slow a step down as much as one running sequence."""


class Router(Protocol):
    """Chooses a group for each request."""

    def choose(self, request: Request, cores: list[EngineCore]) -> EngineCore:
        """The best of `cores` (at least one) for `request`."""

    def forget(self, core: EngineCore) -> None:
        """A group and its cache are gone."""


class RoundRobinRouter:
    """Each group in turn, like a load balancer that does not know the engine."""

    def __init__(self) -> None:
        self._turns = count()

    def choose(self, request: Request, cores: list[EngineCore]) -> EngineCore:
        """The next of `cores`."""
        return cores[next(self._turns) % len(cores)]

    def forget(self, core: EngineCore) -> None:
        """Keeps no state of groups."""


class PrefixRouter:
    """Chooses the group where a request costs least.

    Cost in tokens: prompt tokens that the group must still compute (the request's, less its cached prefix, and those
    waiting there), plus a share per running sequence. A prefix counts as cached in a group that has it or was recently
    sent it, so that a burst of requests with one prefix goes to one group before its first step is done. Source:
    KV-aware routing as in Dynamo and smg, on exact block hashes.
    """

    def __init__(self) -> None:
        self._sent: OrderedDict[bytes, EngineCore] = OrderedDict()

    def choose(self, request: Request, cores: list[EngineCore]) -> EngineCore:
        """The best of `cores` (at least one) for `request`."""
        if len(cores) == 1:
            return cores[0]
        hashes = cores[0].scheduler.kv.prefix_hashes(request)
        block_size = cores[0].scheduler.kv.block_size
        best = min(cores, key=lambda core: _load(core) - block_size * self._num_cached(core, hashes))
        for block_hash in hashes:
            self._sent[block_hash] = best
            self._sent.move_to_end(block_hash)
        while len(self._sent) > MAX_MEMORY:
            self._sent.popitem(last=False)
        return best

    def forget(self, core: EngineCore) -> None:
        """A group and its cache are gone."""
        self._sent = OrderedDict((known, at) for known, at in self._sent.items() if at is not core)

    def _num_cached(self, core: EngineCore, hashes: list[bytes]) -> int:
        """Blocks of the longest prefix that `core` has, or will have."""
        kv, sent = core.scheduler.kv, self._sent
        if not kv.tables.count:  # a model with only recurrent layers has states, far apart
            ends = range(len(hashes), 0, -1)
            return next((end for end in ends if kv.has_state(hashes[end - 1]) or sent.get(hashes[end - 1]) is core), 0)
        count = 0
        for block_hash in hashes:
            if not (kv.pool.has(block_hash) or sent.get(block_hash) is core):
                break
            count += 1
        return count


ROUTERS: dict[RoutingPolicy, type[PrefixRouter] | type[RoundRobinRouter]] = {
    "prefix": PrefixRouter,
    "round_robin": RoundRobinRouter,
}


def _load(core: EngineCore) -> int:
    scheduler = core.scheduler
    prefilling = sum(max(0, request.num_tokens - request.num_computed_tokens - 1) for request in scheduler.running)
    return scheduler.waiting.num_prompt_tokens + prefilling + DECODE_COST_TOKENS * len(scheduler.running)
