"""Gives requests their KV-cache blocks and finds shared prefixes. Knows requests and blocks; no scheduling policy."""

from array import array
from dataclasses import dataclass, field
from hashlib import blake2b

from pagoda_scheduler.core.request import Request
from pagoda_scheduler.kv.block_pool import BlockHash, BlockPool
from pagoda_scheduler.kv.host_cache import HostCache
from pagoda_scheduler.kv.kv_events import BlockStored, KVEventLog


@dataclass(frozen=True, slots=True)
class Prefix:
    """What of a request lies in the cache already: blocks on the device, then blocks in host memory."""

    device_blocks: list[int] = field(default_factory=list)
    host_hashes: list[BlockHash] = field(default_factory=list)
    forked_from: Request | None = None
    """A sibling whose prompt this request shares up to the last token, instead of looking anything up."""
    num_tokens: int = 0
    """Tokens that need not be computed."""


@dataclass(slots=True)
class Transfers:
    """Block moves that go with the next step, in the order in which the worker does them."""

    swap_out: dict[int, int] = field(default_factory=dict)
    """Device block by host block: one that changes hands within a step takes the last content only."""
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    """(host block, device block)"""
    copy: dict[int, int] = field(default_factory=dict)
    """Source by target, both device blocks."""


class KVCacheManager:
    """Block tables of requests over one BlockPool, with prefix caching by hash chains and a second tier on the host.

    A full block's hash covers its tokens and its predecessor's hash; the first predecessor is the cache salt. A block
    is made findable in the step that computes it: the worker stores every key and value of a batch before it attends,
    and steps run in order, so whoever finds the block reads it after it was written.

    Cached blocks that are evicted move to host memory if there is room for them there. So a preempted request comes
    back by whatever is cheapest: blocks still on the device, blocks swapped in, and recomputation of the rest. Without
    prefix caching the host tier serves preempted requests alone: each request then has a salt of its own.
    """

    def __init__(
        self, *, num_blocks: int, block_size: int, enable_prefix_caching: bool = True, num_host_blocks: int = 0
    ) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.host = HostCache(num_blocks=num_host_blocks)
        self.pool = BlockPool(num_blocks=num_blocks, on_evict=self._save if num_host_blocks else None)
        self.is_swap_cheaper = True
        """Whether moving a block costs less than computing its tokens again; set from measurements."""
        self.num_prefix_queries = 0
        """Counter: tokens looked up."""
        self.num_prefix_hits = 0
        """Counter: tokens found."""
        self._hashes_blocks = enable_prefix_caching or num_host_blocks > 0
        self._transfers = Transfers()
        self._events: KVEventLog | None = None

    @property
    def capacity_tokens(self) -> int:
        """Tokens that fit when one request has everything."""
        return self.pool.num_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens fill."""
        return -(-num_tokens // self.block_size)

    def prefix_hashes(self, request: Request) -> list[BlockHash]:
        """Hashes of the blocks that could be found for the request. The last token is in none: it must run."""
        if not self._hashes_blocks or request.is_uncached:
            return []
        num_full = (request.num_known_tokens - 1) // self.block_size
        return self._hashes(request, num_full)[:num_full]

    def find_prefix(self, request: Request) -> Prefix:
        """What of the request is in the cache; takes nothing."""
        leader = request.leader
        if leader is not None and leader.has_computed_prompt and not request.output_token_ids:
            num_shared = (request.num_prompt_tokens - 1) // self.block_size
            return Prefix(leader.block_ids[:num_shared], [], leader, request.num_prompt_tokens - 1)
        hashes = self.prefix_hashes(request)
        device = self.pool.find(hashes)
        host: list[BlockHash] = []
        if self.host.num_blocks and self.is_swap_cheaper:
            for block_hash in hashes[len(device) :]:
                if block_hash not in self.host:
                    break
                host.append(block_hash)
        return Prefix(device, host, None, (len(device) + len(host)) * self.block_size)

    def can_admit(self, request: Request, prefix: Prefix, *, watermark_blocks: int = 0) -> bool:
        """Whether all known tokens behind `prefix` fit at once, leaving `watermark_blocks` free."""
        needed = self.blocks_for(request.num_known_tokens) - len(prefix.device_blocks)
        # Cached blocks that nobody holds leave the free queue when they are touched.
        revived = sum(self.pool.is_free(block_id) for block_id in prefix.device_blocks)
        return needed + revived + watermark_blocks <= self.pool.num_free_blocks

    def admit(self, request: Request, prefix: Prefix) -> None:
        """Start the request's block table with its prefix; `can_admit` has said yes."""
        assert not request.block_ids
        # Hashes are pinned before anything is allocated, as allocating may evict to the host.
        swapped_in = [(block_hash, self.host.find(block_hash)) for block_hash in prefix.host_hashes]
        self.pool.touch(prefix.device_blocks)
        request.block_ids = list(prefix.device_blocks)
        for block_hash, host_block in swapped_in:
            block_id = self.pool.allocate(1)[0]
            self._transfers.swap_in.append((host_block, block_id))
            if self.pool.cache(block_id, block_hash) and self._events is not None:
                self._tell_stored(request, len(request.block_ids))
            request.block_ids.append(block_id)
        if prefix.forked_from is not None:
            # The shared last block is copied on the first write, which is now: the last token runs again.
            shared = prefix.forked_from.block_ids[len(request.block_ids)]
            request.block_ids += self.pool.allocate(1)
            if prefix.num_tokens % self.block_size:
                self._copy(shared, request.block_ids[-1])
        request.num_cached_blocks = len(prefix.device_blocks) + len(prefix.host_hashes)
        request.num_computed_tokens = prefix.num_tokens
        if self.enable_prefix_caching and not request.is_uncached:
            self.num_prefix_queries += request.num_known_tokens
            self.num_prefix_hits += request.num_computed_tokens

    def can_fork(self) -> bool:
        """Whether a sequence can be forked now."""
        return self.pool.num_free_blocks > 0

    def fork(self, parent: Request, child: Request) -> None:
        """Let `child` share everything that `parent` has computed; the partly filled block is copied.

        The parent's tokens are the child's as far as they are computed. `can_fork` has said yes.
        """
        num_full, rest = divmod(parent.num_computed_tokens, self.block_size)
        child.block_ids = parent.block_ids[:num_full]
        self.pool.touch(child.block_ids)
        if rest:
            child.block_ids += self.pool.allocate(1)
            self._copy(parent.block_ids[num_full], child.block_ids[-1])
        child.num_computed_tokens = parent.num_computed_tokens
        child.num_cached_blocks = min(parent.num_cached_blocks, num_full)
        child.block_hashes = parent.block_hashes[:num_full]

    def extend(self, request: Request, num_tokens: int) -> list[int] | None:
        """Make room for the request's first `num_tokens` tokens; the new blocks, or None when too few are free."""
        missing = self.blocks_for(num_tokens) - len(request.block_ids)
        if missing <= 0:
            return []
        if missing > self.pool.num_free_blocks:
            return None
        blocks = self.pool.allocate(missing)
        request.block_ids.extend(blocks)
        return blocks

    def cache_computed(self, request: Request, num_computed_tokens: int) -> None:
        """Make the request's full blocks findable up to `num_computed_tokens`, as far as their tokens are known."""
        if not self._hashes_blocks:
            return
        num_full = min(num_computed_tokens, request.num_known_tokens) // self.block_size
        if num_full <= request.num_cached_blocks:
            return
        hashes = self._hashes(request, num_full)
        for index in range(request.num_cached_blocks, num_full):
            if self.pool.cache(request.block_ids[index], hashes[index]) and self._events is not None:
                self._tell_stored(request, index)
        request.num_cached_blocks = num_full

    def tell(self, events: KVEventLog | None) -> None:
        """Report to `events` what this group's cache stores and forgets from now on; None: no more, all is gone."""
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
        """Give the request's blocks back; what they cached can still be found until they are reused."""
        if self._transfers.copy:
            self._give_up_copies(request.block_ids)
        self.pool.free(request.block_ids)
        request.block_ids = []
        request.num_cached_blocks = 0

    def forget(self, request: Request) -> None:
        """Drop what the request's blocks cached: it has ended and nobody else may share it, or it is garbage."""
        self.pool.uncache(request.block_ids)

    def take_transfers(self) -> Transfers:
        """The block moves of the step that is being sent."""
        transfers, self._transfers = self._transfers, Transfers()
        if transfers.copy:
            self.pool.free(transfers.copy.values())
        self.host.end_step()
        return transfers

    def compact(self) -> None:
        """Give back memory that a burst of requests has left fragmented; while no request is open."""
        self.pool.compact()
        self.host.compact()

    def reset_cache(self) -> int:
        """Forget every cached block, on the device and on the host; the number on the device."""
        self.host.clear()
        return self.pool.reset_cache()

    def _copy(self, source: int, target: int) -> None:
        """Copy a block with the next step. Nobody else gets the source before that: it could be swapped into first."""
        self.pool.touch([source])
        self._transfers.copy[target] = source

    def _give_up_copies(self, targets: list[int]) -> None:
        """Blocks that are given back are copied to no more: who gets them next may swap something into them first."""
        for target in targets:
            if (source := self._transfers.copy.pop(target, None)) is not None:
                self.pool.free([source])

    def _save(self, block_id: int, block_hash: BlockHash) -> None:
        """Move evicted content to the host if that pays."""
        if self.is_swap_cheaper and (host_block := self.host.save(block_hash)) is not None:
            self._transfers.swap_out[host_block] = block_id

    def _hashes(self, request: Request, count: int) -> list[BlockHash]:
        """Hashes of the request's first `count` blocks or more, computed once."""
        hashes, size = request.block_hashes, self.block_size
        while len(hashes) < count:
            start = len(hashes) * size
            # The digests have a fixed length and a salt stands only before the first one, so no two chains meet.
            parent = hashes[-1] if hashes else self._salt(request)
            tokens = array("I", request.known_tokens(start, start + size)).tobytes()
            hashes.append(blake2b(parent + tokens, digest_size=16).digest())
        return hashes

    def _salt(self, request: Request) -> bytes:
        own = "" if self.enable_prefix_caching else f"\0{request.request_id}/{request.index}/{request.attempt}"
        return f"{request.cache_salt}{own}".encode() + b"\0"
