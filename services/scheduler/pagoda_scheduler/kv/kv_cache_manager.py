"""KVCacheManager: allocates KV-cache blocks of requests and finds shared prefixes. Knows requests and blocks; no
scheduling policy."""

from collections.abc import Mapping, Sequence

from pagoda_scheduler.core.request import Request
from pagoda_scheduler.kv.block_hashes import BlockHasher
from pagoda_scheduler.kv.block_pool import BlockHash, BlockPool
from pagoda_scheduler.kv.block_tables import HASH_BYTES, BlockTables
from pagoda_scheduler.kv.cache_group import NO_BLOCK, ONE_GROUP, CacheGroup, CacheSizes, computes_whole, has_states
from pagoda_scheduler.kv.host_cache import HostCache
from pagoda_scheduler.kv.kv_events import BlockStored, KVEventLog
from pagoda_scheduler.kv.prefix import Prefix, PrefixFinder
from pagoda_scheduler.kv.recurrent_states import RecurrentStates
from pagoda_scheduler.kv.state_snapshots import StateSnapshots
from pagoda_scheduler.kv.transfers import Transfers

NOTHING: Mapping[Request, int] = {}


class KVCacheManager:
    """Block tables of requests over one BlockPool, with prefix caching by hash chains and a second tier on the host.

    Each cache group of a model has its table, with blocks of one pool; a block's key is its hash and its group. A block
    can be found from the step that computes it: the worker stores all keys and values of a batch before it attends, and
    steps run in order, so a request that finds the block reads it after it was written. For the same reason a block
    that has left a window may be reused by the step that is being decided.

    Evicted cached blocks move to host memory if there is room. So a preempted request resumes in the cheapest way: from
    blocks still on the device, blocks swapped in, and recomputation of the rest. Without prefix caching the host tier
    serves only preempted requests, because each request then has its own salt.
    """

    def __init__(
        self,
        *,
        sizes: CacheSizes,
        block_size: int,
        groups: Sequence[CacheGroup] = ONE_GROUP,
        enable_prefix_caching: bool = True,
        max_step_tokens: int = 1,
        snapshot_interval: int = 512,
    ) -> None:
        """`max_step_tokens`: maximum tokens of a sequence in one step; `snapshot_interval`: tokens between two
        snapshots of a sequence's recurrent state."""
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.tables = BlockTables(groups=groups, block_size=block_size, max_step_tokens=max_step_tokens)
        self.host = HostCache(num_blocks=sizes.num_host_blocks)
        self.pool = BlockPool(num_blocks=sizes.num_blocks, on_evict=self._save if sizes.num_host_blocks else None)
        self.is_swap_cheaper = True
        """Whether swapping a block is cheaper than recomputing its tokens; set from measurements."""
        self.num_prefix_queries = 0
        """Counter: tokens looked up."""
        self.num_prefix_hits = 0
        """Counter: tokens found."""
        # Layers that keep nothing compute every sequence whole, without a prefix.
        self._hashes_blocks = (enable_prefix_caching or sizes.num_host_blocks > 0) and not computes_whole(groups)
        self._hasher = BlockHasher(block_size=block_size, is_shared=enable_prefix_caching)
        self.states = self._make_states(sizes, snapshot_interval) if has_states(groups) else None
        """States of recurrent layers, if the model has any."""
        self._finder = PrefixFinder(
            tables=self.tables,
            pool=self.pool,
            host=self.host,
            block_size=block_size,
            snapshots=None if self.states is None else self.states.snapshots,
        )
        self._transfers = Transfers()
        self._events: KVEventLog | None = None

    def _make_states(self, sizes: CacheSizes, interval: int) -> RecurrentStates:
        return RecurrentStates(
            snapshots=StateSnapshots(
                num_snapshots=sizes.num_state_snapshots, num_host_snapshots=sizes.num_host_state_snapshots
            ),
            hasher=self._hasher,
            block_size=self.block_size,
            interval=interval,
            is_named=self._hashes_blocks,
        )

    def capacity_tokens(self, most: int) -> int:
        """Maximum tokens of a request that has the whole cache, at most `most`."""
        capacity = self.tables.capacity(self.pool.num_blocks)
        return most if capacity is None else min(most, capacity)

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks of one table for `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def prefix_hashes(self, request: Request) -> list[BlockHash]:
        """Hashes of the blocks that a request may find. The last token is in none of them, because it must run."""
        if not self._hashes_blocks or request.is_uncached:
            return []
        num_full = (request.num_known_tokens - 1) // self.block_size
        return self._hasher.of(request, num_full)[:num_full]

    def has_state(self, block_hash: BlockHash) -> bool:
        """Whether a recurrent state is kept for the end of the block with this hash."""
        return self.states is not None and block_hash in self.states.snapshots

    def find_prefix(self, request: Request) -> Prefix:
        """The cached prefix of the request; takes no blocks."""
        leader = request.leader
        if leader is not None and leader.has_computed_prompt and not request.output_token_ids:
            shared = self._finder.fork(request, leader)
            if shared is not None:
                return shared
        uses_host = self.host.num_blocks > 0 and self.is_swap_cheaper
        prefix = self._finder.find(self.prefix_hashes(request), uses_host=uses_host)
        request.branch_point = prefix.branch_point
        return prefix

    def can_admit(self, request: Request, prefix: Prefix, *, watermark_blocks: int = 0) -> bool:
        """Whether all known tokens after `prefix` fit now, leaving `watermark_blocks` free."""
        found = prefix.device_blocks
        needed = self.tables.num_needed(request.num_known_tokens, prefix.num_tokens) - len(found)
        # Touching a cached block that no request holds takes it from the free queue.
        revived = sum(self.pool.is_free(block_id) for block_id in found)
        return needed + revived + watermark_blocks <= self.pool.num_free_blocks

    def admit(self, request: Request, prefix: Prefix) -> None:
        """Start the request's block tables with its prefix; `can_admit` must have returned True."""
        assert not request.block_ids
        # Hashes are pinned before anything is allocated, as allocating may evict to the host.
        host_keys = [entry for entries in prefix.tables for entry in entries if not isinstance(entry, int)]
        host_blocks = {key: self.host.find(key) for key in host_keys}
        self.pool.touch(prefix.device_blocks)
        tables = [
            [
                entry if isinstance(entry, int) else self._swap_in(request, index, entry, host_blocks[entry])
                for index, entry in enumerate(entries)
            ]
            for entries in prefix.tables
        ]
        if prefix.forked_from is not None:
            # The shared last block is copied now, before its first write: the last token runs again.
            self._add_copies(prefix.forked_from, tables, num_tokens=prefix.num_tokens)
        self.tables.start(request, tables)
        if self.states is not None and prefix.state is not None:
            self.states.admit(request, prefix.state)
        request.num_cached_blocks = prefix.num_tokens // self.block_size
        request.num_computed_tokens = prefix.num_tokens
        if self.enable_prefix_caching and not request.is_uncached:
            self.num_prefix_queries += request.num_known_tokens
            self.num_prefix_hits += request.num_computed_tokens

    def can_fork(self, parent: Request) -> bool:
        """Whether the sequence can be forked now."""
        return self.pool.num_free_blocks >= self.tables.count and self.can_begin_anew(parent)

    def can_begin_anew(self, request: Request) -> bool:
        """Whether the request can enter its slot again at its position, with other tokens to follow."""
        return self.states is None or self.states.can_begin_anew(request)

    def go_on(self, request: Request) -> None:
        """The request stays in its slot, with the token that the worker has."""
        if self.states is not None:
            self.states.let_go(request)

    def begin_anew(self, request: Request) -> None:
        """The request enters its slot again with the next step; `can_begin_anew` must have returned True."""
        if self.states is not None:
            self.states.begin_anew(request)

    def fork(self, parent: Request, child: Request) -> None:
        """Let `child` share everything that `parent` has computed; partly filled blocks are copied.

        Both have the same tokens as far as the parent's are computed. `can_fork` must have returned True.
        """
        num_full, rest = divmod(parent.num_computed_tokens, self.block_size)
        tables = [table[:num_full] for table in self.tables.of(parent)]
        for table in tables:
            self.pool.touch(block_id for block_id in table if block_id != NO_BLOCK)
        if rest:
            self._add_copies(parent, tables, num_tokens=parent.num_computed_tokens)
        self.tables.start(child, tables)
        if self.states is not None:
            self.states.fork(parent, child)
        child.num_computed_tokens = parent.num_computed_tokens
        child.num_cached_blocks = min(parent.num_cached_blocks, num_full)
        child.block_hashes = parent.block_hashes[:num_full]

    def extend(self, request: Request, num_tokens: int) -> list[int] | None:
        """Allocate blocks for the request's first `num_tokens` tokens. Returns the new blocks, the same number for
        every table, or None if too few are free. Blocks that no query reads any more are freed first."""
        missing = self.blocks_for(num_tokens) - len(request.block_ids)
        if missing <= 0:
            return []
        if self.tables.is_plain:
            if missing > self.pool.num_free_blocks:
                return None
            blocks = self.pool.allocate(missing)
            request.block_ids.extend(blocks)
            return blocks
        self.trim(request, request.num_computed_tokens)
        missing *= self.tables.count
        if missing > self.pool.num_free_blocks:
            return None
        if not missing:  # no group keeps blocks
            return []
        blocks = self.pool.allocate(missing)
        self.tables.append(request, blocks)
        return blocks

    def trim(self, request: Request, query: int) -> None:
        """Free the request's blocks that no query from position `query` reads. They can still be found."""
        left = self.tables.trim(request, query)
        if left:
            if not self.enable_prefix_caching:
                self.pool.uncache(left)  # only this request could find them, and it never starts earlier again
            self.pool.free(left)

    def cache_computed(self, request: Request, num_computed_tokens: int) -> None:
        """Make the request's full blocks findable up to `num_computed_tokens`, as far as their tokens are known."""
        if not self._hashes_blocks:
            return
        num_full = min(num_computed_tokens, request.num_known_tokens) // self.block_size
        if num_full <= request.num_cached_blocks:
            return
        hashes = self._hasher.of(request, num_full)
        for number, table in enumerate(self.tables.of(request)):
            for index in range(request.num_cached_blocks, num_full):
                if table[index] == NO_BLOCK:  # it has left the window
                    continue
                key = self.tables.key(number, hashes[index]) if number else hashes[index]
                if self.pool.cache(table[index], key) and self._events is not None and number == 0:
                    self._tell_stored(request, index)
        request.num_cached_blocks = num_full
        if request.unnamed_states and self.states is not None:
            self.states.name_known(request, hashes, num_full)

    def tell(self, events: KVEventLog | None) -> None:
        """Report blocks that this group's cache stores and drops to `events` from now on; None: stop, all blocks are
        gone."""
        if self._events is not None:
            self._events.forget(self.pool.hashes)
        self._events = events
        self.pool.on_forget = None if events is None else events.removed

    def _tell_stored(self, request: Request, index: int) -> None:
        assert self._events is not None
        hashes, start = request.block_hashes, index * self.block_size
        tokens = request.known_tokens(start, start + self.block_size)
        parent = hashes[index - 1] if index else None
        self._events.stored(BlockStored(hashes[index], parent, tuple(tokens), request.cache_salt))

    def free(self, request: Request) -> None:
        """Free the request's blocks; their cached content can be found until they are reused."""
        blocks = self.tables.held(request)
        if self._transfers.copy:
            self._give_up_copies(blocks)
        self.pool.free(blocks)
        self.tables.clear(request)
        if self.states is not None:
            self.states.free(request)
        request.num_cached_blocks = 0

    def forget(self, request: Request) -> None:
        """Drop the cached content of the request's blocks: it has ended and no other request may share it, or it is
        garbage."""
        self.pool.uncache(self.tables.held(request))
        if self.tables.has_windows:  # including those that it has freed
            for block_hash in request.block_hashes:
                for table in range(self.tables.count):
                    self.pool.forget(self.tables.key(table, block_hash))
        if self.states is not None:
            self.states.forget(request)

    def take_transfers(
        self, scheduled: Mapping[Request, int] = NOTHING, ahead: Mapping[Request, int] = NOTHING
    ) -> Transfers:
        """The transfers for the step that is being sent, which computes `scheduled` and tries drafts for `ahead`."""
        transfers, self._transfers = self._transfers, Transfers()
        if self.states is not None:
            self.states.save_after(scheduled, ahead)
            self.states.take(transfers)
        if transfers.copy:
            self.pool.free(transfers.copy.values())
        self.host.end_step()
        return transfers

    def compact(self) -> None:
        """Free memory that a burst of requests has left fragmented; only while no request is open."""
        self.pool.compact()
        self.host.compact()
        if self.states is not None:
            self.states.snapshots.compact()

    def reset_cache(self) -> int:
        """Drop every cached block and state, on device and host; returns the number of blocks on the device."""
        if self.states is not None:
            self.states.snapshots.clear()
        self.host.clear()
        return self.pool.reset_cache()

    def _swap_in(self, request: Request, index: int, key: BlockHash, host_block: int) -> int:
        """A new block for content that is swapped in with the next step."""
        block_id = self.pool.allocate(1)[0]
        self._transfers.swap_in.append((host_block, block_id))
        if self.pool.cache(block_id, key) and self._events is not None and len(key) == HASH_BYTES:
            self._tell_stored(request, index)
        return block_id

    def _add_copies(self, source: Request, tables: list[list[int]], *, num_tokens: int) -> None:
        """Add one block to every table: a copy of the block of `source` that holds some of `num_tokens`, if any."""
        for table, shared in zip(tables, self.tables.of(source), strict=True):
            table += self.pool.allocate(1)
            if num_tokens % self.block_size:
                self._copy(shared[len(table) - 1], table[-1])

    def _copy(self, source: int, target: int) -> None:
        """Copy a block with the next step. The source is kept until then, because its new owner could swap into it
        first."""
        self.pool.touch([source])
        self._transfers.copy[target] = source

    def _give_up_copies(self, targets: list[int]) -> None:
        """Cancel copies into freed blocks, because their next owner may swap into them first."""
        for target in targets:
            if (source := self._transfers.copy.pop(target, None)) is not None:
                self.pool.free([source])

    def _save(self, block_id: int, block_hash: BlockHash) -> None:
        """Move evicted content to the host if that is worthwhile."""
        if self.is_swap_cheaper and (host_block := self.host.save(block_hash)) is not None:
            self._transfers.swap_out[host_block] = block_id
