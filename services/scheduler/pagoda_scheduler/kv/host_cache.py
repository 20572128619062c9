"""HostCache: the second tier of the KV cache, evicted blocks in host memory. Knows only hashes and host blocks."""

from collections import OrderedDict

from pagoda_scheduler.kv.block_pool import BlockHash


class HostCache:
    """Host blocks by content, evicted least recently used first.

    Blocks that a step about to be sent reads (`find`) are pinned until `end_step`, because the worker swaps out
    before it swaps in.
    """

    def __init__(self, *, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._by_hash: OrderedDict[BlockHash, int] = OrderedDict()
        self._free = list(range(num_blocks - 1, -1, -1))
        self._pinned: set[BlockHash] = set()

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._by_hash

    def __len__(self) -> int:
        return len(self._by_hash)

    def find(self, block_hash: BlockHash) -> int:
        """The host block with this content, which must be cached; pinned for this step."""
        self._by_hash.move_to_end(block_hash)
        self._pinned.add(block_hash)
        return self._by_hash[block_hash]

    def save(self, block_hash: BlockHash) -> int | None:
        """The host block to copy this content to; None if it is already cached or all blocks are pinned."""
        if block_hash in self._by_hash:
            self._by_hash.move_to_end(block_hash)
            return None
        if not self._free and not self._evict():
            return None
        host_block = self._free.pop()
        self._by_hash[block_hash] = host_block
        return host_block

    def discard(self, block_hash: BlockHash) -> None:
        """Drop this content, if it is cached."""
        if (host_block := self._by_hash.pop(block_hash, None)) is not None:
            self._free.append(host_block)
            self._pinned.discard(block_hash)

    def _evict(self) -> bool:
        for block_hash in self._by_hash:
            if block_hash not in self._pinned:
                self._free.append(self._by_hash.pop(block_hash))
                return True
        return False

    def end_step(self) -> None:
        """The step that reads the pinned blocks is sent: unpin them."""
        self._pinned.clear()

    def compact(self) -> None:
        """Copy the hashes into new memory, as `BlockPool.compact` does."""
        self._by_hash = OrderedDict((bytes(memoryview(known)), block) for known, block in self._by_hash.items())

    def clear(self) -> None:
        """Drop all content."""
        self._free = list(range(self.num_blocks - 1, -1, -1))
        self._by_hash.clear()
        self._pinned.clear()
