"""BlockPool: free, shared and cached KV-cache blocks. Knows block ids, reference counts and hashes; no requests."""

from collections.abc import Callable, Collection, Iterable, Sequence

from pagoda_scheduler.kv.free_queue import FreeQueue

_IDS: list[int] = []
"""Block ids, one int object each, shared by all pools of the process. Otherwise a pool that is made during a burst (a
worker came back) would pin the burst's memory pages by its own objects."""

BlockHash = bytes
"""Identity of a full block: a digest over its tokens and everything before them."""


class BlockPool:
    """Blocks with reference counts, and a cache of full blocks by hash with LRU eviction.

    A block is in exactly one state: in use (ref count > 0) or free (in the free queue). A free block may still be
    cached: its content is valid until the block is taken for something else.
    Source: automatic prefix caching, vLLM; paged KV cache, Kwon et al. 2023 (arXiv 2309.06180).
    """

    def __init__(self, *, num_blocks: int, on_evict: Callable[[int, BlockHash], None] | None = None) -> None:
        """`on_evict`: called with block id and hash before cached content is overwritten."""
        self.num_blocks = num_blocks
        self.on_forget: Callable[[BlockHash], None] | None = None
        """Called with the hash of a block that can no longer be found."""
        self._on_evict = on_evict
        self._ref_counts = [0] * num_blocks
        self._hashes: list[BlockHash | None] = [None] * num_blocks
        self._cached: dict[BlockHash, int] = {}
        # Front is taken first: blocks without content, then the least recently used.
        self._free = FreeQueue(size=num_blocks)
        _IDS.extend(range(len(_IDS), num_blocks))

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks that `allocate` can return."""
        return len(self._free)

    @property
    def num_used_blocks(self) -> int:
        """Number of blocks held by requests."""
        return self.num_blocks - len(self._free)

    @property
    def num_cached_blocks(self) -> int:
        """Number of blocks whose content can be found by hash."""
        return len(self._cached)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks and drop their cached content. The caller checks `num_free_blocks` first."""
        assert count <= len(self._free), "allocate() beyond num_free_blocks"
        free, refs = self._free, self._ref_counts
        blocks = []
        for _ in range(count):
            block_id = _IDS[free.pop_front()]
            block_hash = self._hashes[block_id]
            if block_hash is not None:
                if self._on_evict is not None:
                    self._on_evict(block_id, block_hash)
                self._forget(block_id)
            refs[block_id] = 1
            blocks.append(block_id)
        return blocks

    def free(self, block_ids: Iterable[int]) -> None:
        """Drop one reference to each block, the last block first, so that a prefix's tail is evicted first."""
        refs, free = self._ref_counts, self._free
        for block_id in reversed(list(block_ids)):
            refs[block_id] -= 1
            assert refs[block_id] >= 0, "a block was freed twice"
            if refs[block_id] == 0:
                if self._hashes[block_id] is None:
                    free.append_front(block_id)
                else:
                    free.append(block_id)

    def find(self, hashes: Sequence[BlockHash]) -> list[int]:
        """The cached blocks of the longest known prefix of `hashes`; takes no reference."""
        found = []
        for block_hash in hashes:
            block_id = self._cached.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def get(self, block_hash: BlockHash) -> int | None:
        """The cached block with this content; takes no reference."""
        return self._cached.get(block_hash)

    def has(self, block_hash: BlockHash) -> bool:
        """Whether a block with this content is cached."""
        return block_hash in self._cached

    @property
    def hashes(self) -> Collection[BlockHash]:
        """Hashes of the cached blocks that can be found."""
        return self._cached.keys()

    def touch(self, block_ids: Iterable[int]) -> None:
        """Take one more reference to each block."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                self._free.remove(block_id)
            self._ref_counts[block_id] += 1

    def is_free(self, block_id: int) -> bool:
        """Whether no request holds the block."""
        return self._ref_counts[block_id] == 0

    def cache(self, block_id: int, block_hash: BlockHash) -> bool:
        """Make a full block findable; False when equal content is cached already: the older block stays known."""
        if block_hash in self._cached or self._hashes[block_id] is not None:
            return False
        self._cached[block_hash] = block_id
        self._hashes[block_id] = block_hash
        return True

    def uncache(self, block_ids: Iterable[int]) -> None:
        """Forget the content of blocks that may hold garbage."""
        for block_id in block_ids:
            self._forget(block_id)

    def forget(self, block_hash: BlockHash) -> None:
        """Forget the block with this content, if there is one."""
        if (block_id := self._cached.get(block_hash)) is not None:
            self._forget(block_id)

    def reset_cache(self) -> int:
        """Drop all cached content, in use or not; returns the number of blocks."""
        count = len(self._cached)
        self.uncache(list(self._cached.values()))
        return count

    def compact(self) -> None:
        """Copy the hashes into new memory, because scattered ones keep a burst's pages from being freed."""
        cached = self._cached
        self._cached = {}
        for block_hash, block_id in cached.items():
            copied = bytes(memoryview(block_hash))
            self._cached[copied] = block_id
            self._hashes[block_id] = copied

    def _forget(self, block_id: int) -> None:
        block_hash = self._hashes[block_id]
        if block_hash is not None:
            del self._cached[block_hash]
            self._hashes[block_id] = None
            if self.on_forget is not None:
                self.on_forget(block_hash)

    def check_invariants(self) -> None:
        """Assert that counts, queue and cache agree (for tests)."""
        for block_id, count in enumerate(self._ref_counts):
            assert count >= 0
            assert (count == 0) == (block_id in self._free)
        for block_hash, block_id in self._cached.items():
            assert self._hashes[block_id] == block_hash
        assert sum(known is not None for known in self._hashes) == len(self._cached)
