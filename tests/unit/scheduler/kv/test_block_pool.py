"""Blocks and their cache at the level of one block: who is evicted, who is found, and what a move costs."""

import pytest

from pagoda_scheduler.kv.block_pool import BlockPool
from pagoda_scheduler.kv.cache_group import CacheSizes
from pagoda_scheduler.kv.host_cache import HostCache
from pagoda_scheduler.kv.kv_cache_manager import KVCacheManager
from pagoda_scheduler.kv.swap_cost import SwapCost
from tests.unit.scheduler.stories import make_request


def cached_pool(names: str, *, size: int = 8) -> tuple[BlockPool, list[bytes]]:
    """A pool whose first blocks are cached and free, the first of `names` freed first; what it forgets."""
    pool, forgotten = BlockPool(num_blocks=size), list[bytes]()
    pool.on_forget = forgotten.append
    blocks = pool.allocate(len(names))
    for block, name in zip(blocks, names, strict=True):
        assert pool.cache(block, name.encode())
    for block in blocks:
        pool.free([block])
    return pool, forgotten


def test_blocks_without_content_are_taken_before_cached_ones_and_those_by_age() -> None:
    pool, forgotten = cached_pool("abc", size=5)
    pool.allocate(2)
    assert forgotten == []
    pool.allocate(1)
    pool.allocate(1)
    assert forgotten == [b"a", b"b"]
    assert (pool.num_free_blocks, pool.num_used_blocks, pool.num_cached_blocks) == (1, 4, 1)
    pool.check_invariants()


def test_a_request_gives_its_last_block_up_for_eviction_first() -> None:
    pool, forgotten = BlockPool(num_blocks=3), list[bytes]()
    pool.on_forget = forgotten.append
    blocks = pool.allocate(3)
    for block, name in zip(blocks, "abc", strict=True):
        pool.cache(block, name.encode())
    pool.free(blocks)
    pool.allocate(2)
    assert forgotten == [b"c", b"b"]


def test_a_block_that_is_touched_is_not_evicted_until_both_have_freed_it() -> None:
    pool, forgotten = cached_pool("ab", size=2)
    (block,) = pool.find([b"a"])
    pool.touch([block])
    pool.touch([block])
    assert (pool.num_free_blocks, pool.is_free(block)) == (1, False)
    pool.free([block])
    assert not pool.is_free(block)
    pool.allocate(1)
    assert forgotten == [b"b"]
    pool.free([block])
    assert pool.is_free(block)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free([block])


def test_a_prefix_is_found_up_to_the_first_gap() -> None:
    pool, _ = cached_pool("acd")
    assert len(pool.find([b"a", b"b", b"c"])) == 1
    assert len(pool.find([b"a", b"c", b"d", b"x"])) == 3
    assert pool.find([b"x", b"a"]) == []
    assert (pool.has(b"a"), pool.has(b"b"), set(pool.hashes)) == (True, False, {b"a", b"c", b"d"})


def test_equal_content_is_known_by_the_older_block() -> None:
    pool, _ = cached_pool("a")
    (block,) = pool.allocate(1)
    assert not pool.cache(block, b"a")
    assert pool.cache(block, b"b")
    assert not pool.cache(block, b"c"), "a block has one content"
    assert pool.find([b"a"]) != [block]


def test_a_reset_forgets_everything_once() -> None:
    pool, forgotten = cached_pool("abc")
    pool.touch(pool.find([b"b"]))
    assert (pool.reset_cache(), sorted(forgotten)) == (3, [b"a", b"b", b"c"])
    assert (pool.reset_cache(), pool.find([b"a"])) == (0, [])
    pool.check_invariants()


def test_compact_changes_nothing_that_can_be_found() -> None:
    pool, _ = cached_pool("abc")
    before = pool.find([b"a", b"b", b"c"])
    pool.compact()
    assert pool.find([b"a", b"b", b"c"]) == before
    pool.check_invariants()


def test_the_host_keeps_what_was_used_last_and_what_this_step_reads() -> None:
    host = HostCache(num_blocks=2)
    a, b = host.save(b"a"), host.save(b"b")
    assert (a, b) == (0, 1)
    assert host.find(b"a") == a
    assert host.save(b"c") == b, "a is read in this step, and was used last"
    assert (b"a" in host, b"b" in host, len(host)) == (True, False, 2)
    assert host.find(b"c") == b
    assert host.save(b"d") is None, "both are read in this step"
    host.end_step()
    assert host.save(b"a") is None, "it is there already"
    assert host.save(b"d") == b, "c is older now"
    host.clear()
    assert (len(host), host.save(b"x"), host.save(b"y"), host.save(b"z")) == (0, 0, 1, 0)


def test_swapping_pays_when_both_moves_cost_less_than_the_blocks_tokens() -> None:
    cost = SwapCost(swap_block_ns=1000, block_size=4)
    assert cost.add(forward_ns=63 * 10_000, num_tokens=63) is None
    assert cost.add(forward_ns=64 * 500, num_tokens=64) is False  # 2,000 against 2 × 1,000
    assert cost.add(forward_ns=64 * 508, num_tokens=64) is True  # smoothed: 501 a token
    assert cost.add(forward_ns=64 * 485, num_tokens=64) is False  # 499


def manager(*, num_blocks: int = 6, num_host_blocks: int = 0) -> KVCacheManager:
    return KVCacheManager(sizes=CacheSizes(num_blocks, num_host_blocks), block_size=4)


def test_blocks_are_counted_to_the_token() -> None:
    kv = manager()
    assert [kv.blocks_for(count) for count in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]
    assert kv.capacity_tokens(1000) == 24
    request = make_request("a", 9)
    assert kv.extend(request, 9) == request.block_ids
    assert (len(request.block_ids), kv.extend(request, 12), kv.extend(request, 3)) == (3, [], [])
    assert (kv.extend(request, 25), kv.pool.num_free_blocks) == (None, 3)
    assert len(kv.extend(request, 24) or []) == 3


def test_a_prompt_is_admitted_when_it_fits_beside_the_watermark() -> None:
    kv = manager()
    kv.extend(make_request("other", 8), 8)
    request = make_request("a", 15, cache_salt="own")
    prefix = kv.find_prefix(request)
    assert kv.can_admit(request, prefix)
    kv.extend(make_request("third", 1), 1)
    assert not kv.can_admit(request, prefix)
    smaller = make_request("b", 8, cache_salt="own")
    assert kv.can_admit(smaller, kv.find_prefix(smaller), watermark_blocks=1)
    assert not kv.can_admit(smaller, kv.find_prefix(smaller), watermark_blocks=2)


def test_free_blocks_of_the_prefix_are_not_free_for_the_rest() -> None:
    kv = manager(num_blocks=4)
    first = make_request("a", 12)
    kv.extend(first, 12)
    kv.cache_computed(first, 12)
    kv.free(first)
    second = make_request("b", 16)
    prefix = kv.find_prefix(second)
    assert (len(prefix.device_blocks), prefix.num_tokens) == (3, 12)
    assert kv.can_admit(second, prefix)
    assert not kv.can_admit(second, prefix, watermark_blocks=1)
    kv.admit(second, prefix)
    assert (second.num_computed_tokens, kv.pool.num_free_blocks) == (12, 1)
    assert (kv.num_prefix_queries, kv.num_prefix_hits) == (16, 12)


def test_hits_are_counted_for_prompts_that_may_be_found_alone() -> None:
    kv = manager()
    request = make_request("a", 5)
    request.is_uncached = True
    kv.admit(request, kv.find_prefix(request))
    assert (kv.num_prefix_queries, kv.prefix_hashes(request)) == (0, [])


def test_a_fork_shares_full_blocks_and_copies_the_rest() -> None:
    kv = manager()
    parent, child = make_request("a", 6), make_request("b", 6)
    kv.extend(parent, 6)
    parent.num_computed_tokens = 6
    kv.fork(parent, child)
    assert child.block_ids[0] == parent.block_ids[0]
    assert child.block_ids[1] != parent.block_ids[1]
    assert kv.take_transfers().copy == {child.block_ids[1]: parent.block_ids[1]}
    assert (child.num_computed_tokens, kv.pool.num_used_blocks, kv.can_fork(parent)) == (6, 3, True)
    kv.free(parent)
    kv.free(child)
    assert kv.pool.num_used_blocks == 0


def test_a_fork_leaves_uncached_what_its_parent_has_not_cached_yet() -> None:
    kv = manager()
    parent, child = make_request("a", 9), make_request("a", 9, index=1)
    kv.extend(parent, 9)
    parent.num_computed_tokens = 9
    kv.cache_computed(parent, 4)
    kv.fork(parent, child)
    kv.cache_computed(child, 9)
    assert kv.pool.num_cached_blocks == 2
    assert child.block_ids[:2] == parent.block_ids[:2]


def test_a_block_without_content_that_comes_back_goes_before_older_cached_ones() -> None:
    pool, forgotten = BlockPool(num_blocks=3), list[bytes]()
    pool.on_forget = forgotten.append
    cached, other, plain = pool.allocate(3)
    assert pool.cache(cached, b"a")
    assert pool.cache(other, b"b")
    for block in (cached, other, plain):
        pool.free([block])
    assert pool.allocate(1) == [plain]
    assert forgotten == []


def host_manager() -> KVCacheManager:
    """4 blocks, 2 of them cached and free, and 1 block on the host."""
    kv = manager(num_blocks=4, num_host_blocks=1)
    first = make_request("a", 8)
    kv.extend(first, 8)
    kv.cache_computed(first, 8)
    kv.free(first)
    return kv


def test_what_costs_more_to_move_than_to_compute_is_not_moved() -> None:
    for is_cheaper, num_moves in ((True, 1), (False, 0)):
        kv = host_manager()
        kv.is_swap_cheaper = is_cheaper
        kv.extend(make_request("b", 12, cache_salt="other"), 12)
        assert len(kv.take_transfers().swap_out) == num_moves


def test_a_host_block_is_kept_for_the_step_that_reads_it_and_no_longer() -> None:
    kv = host_manager()
    kv.extend(other := make_request("b", 16, cache_salt="other"), 16)
    kv.take_transfers()
    kv.free(other)
    first = make_request("a", 9)
    prefix = kv.find_prefix(first)
    assert prefix.num_tokens == 4
    kv.admit(first, prefix)
    assert len(kv.take_transfers().swap_in) == 1
    kv.extend(first, 9)
    kv.cache_computed(first, 8)
    kv.free(first)
    kv.extend(make_request("c", 16, cache_salt="third"), 16)
    assert len(kv.take_transfers().swap_out) == 1, "the host's only block has taken another content"
