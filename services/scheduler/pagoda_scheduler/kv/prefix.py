"""PrefixFinder: finds the longest prefix of a request that is cached in every cache group. Takes no blocks."""

from dataclasses import dataclass, field

from pagoda_scheduler.core.request import Request
from pagoda_scheduler.kv.block_pool import BlockHash, BlockPool
from pagoda_scheduler.kv.block_tables import BlockTables
from pagoda_scheduler.kv.cache_group import NO_BLOCK
from pagoda_scheduler.kv.host_cache import HostCache
from pagoda_scheduler.kv.state_snapshots import StateSnapshots


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prefix of a request that is in the cache."""

    tables: list[list[int | BlockHash]] = field(default_factory=list)
    """For each group with blocks: blocks on the device, or keys of blocks in host memory."""
    device_blocks: list[int] = field(default_factory=list)
    """The blocks of all tables that are on the device."""
    num_tokens: int = 0
    """Number of tokens that need not be computed."""
    forked_from: Request | None = None
    """A sibling whose prompt this request shares up to the last token, without a lookup."""
    state: BlockHash | None = None
    """Key of the recurrent state to begin with."""
    branch_point: int = 0
    """Number of tokens that blocks alone would offer, if the states offer fewer; else 0."""


class PrefixFinder:
    """Looks prefixes up, on the device and in host memory.

    A group of full attention offers a prefix if it has all its blocks; a group with a window, if it has the blocks that
    the first query after the prefix reads; a recurrent group, if there is a snapshot of its state after the prefix.
    """

    def __init__(
        self,
        *,
        tables: BlockTables,
        pool: BlockPool,
        host: HostCache,
        block_size: int,
        snapshots: StateSnapshots | None = None,
    ) -> None:
        """`snapshots`: of recurrent layers, if the model has any."""
        self._snapshots = snapshots
        self._is_plain = tables.is_plain and snapshots is None
        self._tables = tables
        self._pool = pool
        self._host = host
        self._block_size = block_size

    def find(self, hashes: list[BlockHash], *, uses_host: bool) -> Prefix:
        """The longest prefix, by the hashes of the request's blocks."""
        if self._is_plain:
            return self._find_plain(hashes, uses_host=uses_host)
        count = self._within_full(hashes, uses_host=uses_host)
        branch = count = self._within_windows(hashes, count, uses_host=uses_host)
        if self._snapshots is not None:
            while count and (shorter := self._longest_state(hashes, count)):
                count = self._within_windows(hashes, shorter, uses_host=uses_host)
                if count == shorter:
                    break
            else:
                count = 0
        tables: list[list[int | BlockHash]] = []
        device_blocks: list[int] = []
        for table in range(self._tables.count):
            first = self._tables.first_needed(table, count * self._block_size)
            entries: list[int | BlockHash] = [NO_BLOCK] * first
            for block_hash in hashes[first:count]:
                key = self._tables.key(table, block_hash) if table else block_hash
                block_id = self._pool.get(key)
                if block_id is None:
                    entries.append(key)
                else:
                    entries.append(block_id)
                    device_blocks.append(block_id)
            tables.append(entries)
        return Prefix(
            tables,
            device_blocks,
            count * self._block_size,
            state=hashes[count - 1] if count and self._snapshots is not None else None,
            branch_point=branch * self._block_size if branch > count else 0,
        )

    def fork(self, request: Request, leader: Request) -> Prefix | None:
        """The prompt that `request` shares with `leader`, less its last token; None if a window has moved past it, or
        if there are recurrent layers, whose state is already beyond it."""
        if self._snapshots is not None:
            return None
        num_tokens = request.num_prompt_tokens - 1
        num_shared = num_tokens // self._block_size
        tables: list[list[int | BlockHash]] = []
        device_blocks: list[int] = []
        for index, table in enumerate(self._tables.of(leader)):
            first = self._tables.first_needed(index, num_tokens)
            if leader.first_blocks and leader.first_blocks[index] > first:
                return None
            tables.append([*[NO_BLOCK] * first, *table[first:num_shared]])
            device_blocks += table[first:num_shared]
        return Prefix(tables, device_blocks, num_tokens, leader)

    def _find_plain(self, hashes: list[BlockHash], *, uses_host: bool) -> Prefix:
        """The same for one table that keeps everything."""
        device_blocks = self._pool.find(hashes)
        entries: list[int | BlockHash] = [*device_blocks]
        for block_hash in hashes[len(entries) :] if uses_host else ():
            if block_hash not in self._host:
                break
            entries.append(block_hash)
        return Prefix([entries], device_blocks, len(entries) * self._block_size)

    def _within_full(self, hashes: list[BlockHash], *, uses_host: bool) -> int:
        """Number of blocks of the longest prefix that every group of full attention offers."""
        count = len(hashes)
        for table in range(self._tables.count):
            if not self._tables.is_window(table):
                missing = self._missing(table, hashes, range(count), uses_host=uses_host)
                count = count if missing is None else missing
        return count

    def _within_windows(self, hashes: list[BlockHash], count: int, *, uses_host: bool) -> int:
        """Number of blocks of the longest prefix that every group with a window offers, at most `count`."""
        table = 0
        while count and table < self._tables.count:
            first = self._tables.first_needed(table, count * self._block_size)
            indexes = range(count - 1, first - 1, -1) if self._tables.is_window(table) else range(0)
            missing = self._missing(table, hashes, indexes, uses_host=uses_host)
            count, table = (count, table + 1) if missing is None else (missing, 0)
        return count

    def _missing(self, table: int, hashes: list[BlockHash], indexes: range, *, uses_host: bool) -> int | None:
        """The first block of `indexes` that is neither on the device nor in host memory."""
        cached, key, host = self._pool.get, self._tables.key, self._host
        for index in indexes:
            name = key(table, hashes[index]) if table else hashes[index]
            if cached(name) is None and not (uses_host and name in host):
                return index
        return None

    def _longest_state(self, hashes: list[BlockHash], count: int) -> int:
        """Number of blocks of the longest prefix with a state after it, at most `count`."""
        assert self._snapshots is not None
        while count and hashes[count - 1] not in self._snapshots:
            count -= 1
        return count
