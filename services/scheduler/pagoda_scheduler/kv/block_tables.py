"""BlockTables: the block tables of sequences, one per cache group: which blocks are needed, and which no longer are. No
pool."""

from collections.abc import Sequence

from pagoda_scheduler.core.request import Request
from pagoda_scheduler.kv.block_pool import BlockHash
from pagoda_scheduler.kv.cache_group import NO_BLOCK, CacheGroup

HASH_BYTES = 16
"""Bytes of a block's hash; the keys of groups other than the first are longer."""


class BlockTables:
    """Block tables of the groups that keep tokens in blocks, numbered from 0, aligned by position.

    A table of full attention holds every block. A table of a window holds those that a future query can read: the query
    at position q reads from q - window + 1, and the next one is at `num_computed_tokens` or later. The entries before
    these are NO_BLOCK. Source: the hybrid cache manager of vLLM.
    """

    def __init__(self, *, groups: Sequence[CacheGroup], block_size: int, max_step_tokens: int) -> None:
        """`max_step_tokens`: maximum tokens of a sequence in one step."""
        self._windows = [group.window for group in groups if group.has_blocks]
        self._block_size = block_size
        self._max_step_tokens = max_step_tokens
        self.count = len(self._windows)
        self.is_plain = self._windows == [0]
        """Whether there is one table that keeps everything, as in most models."""
        self.has_windows = any(self._windows)
        self.num_full = self._windows.count(0)
        """Indexes of tables that keep everything."""

    def of(self, request: Request) -> list[list[int]]:
        """The tables of a sequence."""
        if self.is_plain:
            return [request.block_ids]
        return [request.block_ids, *request.group_block_ids][: self.count]

    def held(self, request: Request) -> list[int]:
        """All blocks of a sequence, in order of position."""
        if self.is_plain:
            return request.block_ids
        rows = zip(*self.of(request), strict=True)
        return [block_id for row in rows for block_id in row if block_id != NO_BLOCK]

    def start(self, request: Request, tables: list[list[int]]) -> None:
        """Give a sequence its tables, which have the same length."""
        request.block_ids, *request.group_block_ids = tables or [[]]
        if self.has_windows:
            request.first_blocks = [_num_missing(table) for table in tables]

    def clear(self, request: Request) -> None:
        """Remove a sequence's tables."""
        request.block_ids = []
        request.group_block_ids = []
        request.first_blocks = []

    def append(self, request: Request, blocks: Sequence[int]) -> None:
        """New blocks: the same number for every table, table by table."""
        if self.has_windows and not request.first_blocks:
            request.first_blocks = [0] * self.count
        if self.count > 1 and not request.group_block_ids:
            request.group_block_ids = [[] for _ in range(self.count - 1)]
        each = len(blocks) // self.count
        for index, table in enumerate(self.of(request)):
            table += blocks[index * each : (index + 1) * each]

    def is_window(self, table: int) -> bool:
        """Whether the table's group keeps only a window."""
        return self._windows[table] > 0

    def first_needed(self, table: int, query: int) -> int:
        """Index of the first block that queries from position `query` read."""
        window = self._windows[table]
        return max(0, query - window + 1) // self._block_size if window else 0

    def trim(self, request: Request, query: int) -> list[int]:
        """Remove and return the blocks that no query from position `query` reads."""
        left: list[int] = []
        firsts = request.first_blocks
        if not firsts:
            return left
        for index, table in enumerate(self.of(request)):
            first, needed = firsts[index], min(self.first_needed(index, query), len(table))
            if first < needed:
                left += table[first:needed]
                table[first:needed] = [NO_BLOCK] * (needed - first)
                firsts[index] = needed
        return left

    def num_needed(self, num_tokens: int, num_cached: int) -> int:
        """Maximum number of blocks that a sequence holds while it computes `num_tokens` tokens, `num_cached` of them
        cached."""
        num_blocks, total = -(-num_tokens // self._block_size), 0
        for index, window in enumerate(self._windows):
            needed = num_blocks - self.first_needed(index, num_cached)
            total += min(needed, self._most(window)) if window else needed
        return total

    def capacity(self, num_blocks: int) -> int | None:
        """Maximum tokens of a sequence that has `num_blocks` blocks to itself; None: no limit."""
        if self.is_plain:
            return num_blocks * self._block_size
        if all(self._windows) and sum(map(self._most, self._windows)) <= num_blocks:
            return None
        low, high = 0, num_blocks  # blocks of the longest table
        while low < high:
            middle = (low + high + 1) // 2
            if self.num_needed(middle * self._block_size, 0) <= num_blocks:
                low = middle
            else:
                high = middle - 1
        return low * self._block_size

    def key(self, table: int, block_hash: BlockHash) -> BlockHash:
        """Key of a block's content in a table's group."""
        return block_hash + bytes((table,)) if table else block_hash

    def _most(self, window: int) -> int:
        """Maximum number of blocks in a table of a window: the window before a step, and the step."""
        return -(-(window - 1 + self._max_step_tokens) // self._block_size) + 1


def _num_missing(table: list[int]) -> int:
    return next((index for index, block_id in enumerate(table) if block_id != NO_BLOCK), len(table))
