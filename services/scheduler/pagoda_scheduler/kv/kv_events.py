"""KV cache events: reports the blocks in the prefix caches of all groups to external routers. No gRPC, no messages."""

import asyncio
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

from pagoda_scheduler.kv.block_pool import BlockHash

MAX_BATCHES = 10_000
"""Number of batches kept for subscribers that reconnect."""


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A block can be found in at least one group."""

    block_hash: BlockHash
    parent: BlockHash | None
    """Hash of the block before it; None for the first block."""
    token_ids: tuple[int, ...]
    cache_salt: str = ""
    """Only requests with the same salt can find the block."""


@dataclass(slots=True)
class _Live:
    event: BlockStored
    num_groups: int = 1


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """No group has the block any longer."""

    block_hash: BlockHash


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """No group has any block."""


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Events of one moment; `sequence` grows by one with each batch, from 1."""

    sequence: int
    timestamp: float
    """Unix time, seconds."""
    events: tuple[Event, ...]


def short_hash(block_hash: BlockHash) -> int:
    """The 64 bits of a block's hash that routers know it by, signed."""
    (number,) = struct.unpack_from("<q", block_hash)
    return int(number)


class KVEventLog:
    """Collects blocks that the groups' caches store and drop; a block counts once, however many groups have it.

    Events of one turn of the event loop (in practice: of one engine step) make one batch. Must be used on one loop.
    Source: the KV cache events of vLLM.
    """

    def __init__(self) -> None:
        self.on_batch: list[Callable[[EventBatch], None]] = []
        """Called with every batch when it is made."""
        self._live: dict[BlockHash, _Live] = {}
        self._pending: list[Event] = []
        self._batches: deque[EventBatch] = deque(maxlen=MAX_BATCHES)
        self._last_sequence = 0

    @property
    def last_sequence(self) -> int:
        """Number of the newest batch; 0 if there was none."""
        return self._last_sequence

    def stored(self, event: BlockStored) -> None:
        """A group can find one more block."""
        live = self._live.get(event.block_hash)
        if live is not None:
            live.num_groups += 1
            return
        self._live[event.block_hash] = _Live(event)
        self._add(event)

    def removed(self, block_hash: BlockHash) -> None:
        """A group has dropped a block."""
        live = self._live.get(block_hash)
        if live is None:
            return
        live.num_groups -= 1
        if live.num_groups == 0:
            del self._live[block_hash]
            self._add(BlockRemoved(block_hash) if self._live else AllBlocksCleared())

    def forget(self, hashes: Iterable[BlockHash]) -> None:
        """A group is gone, with all its blocks."""
        for block_hash in list(hashes):
            self.removed(block_hash)

    def since(self, sequence: int) -> list[EventBatch] | None:
        """The batches from number `sequence`; None if some of them are no longer kept."""
        self.flush()
        oldest = self._batches[0].sequence if self._batches else self._last_sequence + 1
        if sequence < oldest:
            return None
        return list(islice(self._batches, sequence - oldest, None))

    def kept(self) -> list[EventBatch]:
        """Every batch that is still kept."""
        return list(self._batches)

    def snapshot(self) -> list[BlockStored]:
        """Every cached block, parents before children."""
        self.flush()
        order: dict[BlockHash, BlockStored] = {}
        for live in self._live.values():
            chain: list[BlockStored] = []
            link: _Live | None = live
            while link is not None and link.event.block_hash not in order:
                chain.append(link.event)
                link = self._live.get(link.event.parent) if link.event.parent is not None else None
            order.update((event.block_hash, event) for event in reversed(chain))
        return list(order.values())

    def flush(self) -> None:
        """Make a batch of the pending events."""
        if self._pending:
            self._last_sequence += 1
            batch = EventBatch(self._last_sequence, time.time(), tuple(self._pending))
            self._pending.clear()
            self._batches.append(batch)
            for tell in list(self.on_batch):
                tell(batch)

    def _add(self, event: Event) -> None:
        if not self._pending:
            asyncio.get_running_loop().call_soon(self.flush)
        self._pending.append(event)
