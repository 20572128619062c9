"""The manager of the KV cache, block by block: what a request is given, what is counted, and what moves with a step."""

from types import SimpleNamespace
from typing import Any

import pytest

from pagoda_scheduler.core.request import Request, RequestStatus
from pagoda_scheduler.kv.cache_group import NO_BLOCK, CacheGroup, CacheSizes
from pagoda_scheduler.kv.kv_cache_manager import KVCacheManager
from pagoda_scheduler.kv.prefix import Prefix
from tests.unit.scheduler.stories import make_request

WINDOW = (CacheGroup("full"), CacheGroup("window", window=5))


def make_kv(
    num_blocks: int = 10,
    *,
    num_host_blocks: int = 0,
    groups: tuple[CacheGroup, ...] = (CacheGroup("full"),),
    caches: bool = True,
) -> KVCacheManager:
    return KVCacheManager(
        sizes=CacheSizes(num_blocks, num_host_blocks=num_host_blocks),
        block_size=4,
        groups=groups,
        enable_prefix_caching=caches,
        max_step_tokens=8,
    )


def run(kv: KVCacheManager, request: Request) -> Prefix:
    """Admit a request and compute all that is known of it."""
    prefix = kv.find_prefix(request)
    kv.admit(request, prefix)
    assert kv.extend(request, request.num_known_tokens) is not None
    request.num_computed_tokens = request.num_known_tokens
    kv.cache_computed(request, request.num_computed_tokens)
    kv.take_transfers()
    request.status = RequestStatus.RUNNING
    return prefix


@pytest.mark.parametrize(("num_tokens", "count"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_of_tokens(num_tokens: int, count: int) -> None:
    assert make_kv().blocks_for(num_tokens) == count


def test_the_capacity_is_that_of_all_blocks() -> None:
    assert make_kv(10).capacity_tokens(100) == 40
    assert make_kv(10).capacity_tokens(39) == 39
    assert make_kv(10, groups=(CacheGroup("window", window=5),)).capacity_tokens(1000) == 1000


@pytest.mark.parametrize(("num_prompt", "count"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_the_last_token_is_in_no_hash(num_prompt: int, count: int) -> None:
    kv = make_kv()
    assert len(kv.prefix_hashes(make_request("r", num_prompt))) == count
    assert make_kv(caches=False).prefix_hashes(make_request("r", num_prompt)) == []
    assert len(make_kv(caches=False, num_host_blocks=1).prefix_hashes(make_request("r", num_prompt))) == count
    assert make_kv(groups=(CacheGroup("none"),)).prefix_hashes(make_request("r", num_prompt)) == []


def test_a_request_that_is_not_to_be_cached_has_no_hashes() -> None:
    request = make_request("r", 9)
    assert not request.is_uncached
    request.is_uncached = True
    kv = make_kv()
    assert kv.prefix_hashes(request) == []
    run(kv, request)
    assert (kv.num_prefix_queries, kv.num_prefix_hits) == (0, 0)


def test_what_was_looked_up_and_found_is_counted() -> None:
    kv = make_kv()
    assert run(kv, make_request("a", 10)).num_tokens == 0
    assert (kv.num_prefix_queries, kv.num_prefix_hits) == (10, 0)
    prefix = run(kv, make_request("b", 9))
    assert prefix == Prefix([[0, 1]], [0, 1], 8)
    assert (kv.num_prefix_queries, kv.num_prefix_hits) == (19, 8)
    kv = make_kv(caches=False)
    run(kv, make_request("a", 10))
    assert run(kv, make_request("b", 10)).num_tokens == 0
    assert (kv.num_prefix_queries, kv.num_prefix_hits) == (0, 0)


def test_an_admitted_request_begins_after_its_prefix() -> None:
    kv = make_kv()
    run(kv, make_request("a", 10))
    request = make_request("b", 10)
    prefix = kv.find_prefix(request)
    kv.admit(request, prefix)
    assert (request.block_ids, request.num_cached_blocks, request.num_computed_tokens) == ([0, 1], 2, 8)
    assert kv.extend(request, 10) == [3]


@pytest.mark.parametrize(
    ("num_prompt", "watermark", "fits"), [(16, 0, True), (17, 0, False), (12, 1, True), (13, 1, False)]
)
def test_a_request_fits_when_all_its_tokens_do(num_prompt: int, watermark: int, fits: bool) -> None:
    kv, request = make_kv(4), make_request("r", num_prompt)
    assert kv.can_admit(request, Prefix([[]]), watermark_blocks=watermark) is fits
    if not watermark:
        assert kv.can_admit(request, Prefix([[]])) is fits


@pytest.mark.parametrize(("num_prompt", "fits"), [(16, True), (17, False)])
def test_found_blocks_that_no_one_holds_come_out_of_the_free_ones(num_prompt: int, fits: bool) -> None:
    kv, first = make_kv(4), make_request("a", 9)
    run(kv, first)
    kv.free(first)
    request = make_request("b", num_prompt)
    prefix = kv.find_prefix(request)
    assert (prefix.num_tokens, kv.pool.num_free_blocks) == (8, 4)
    assert kv.can_admit(request, prefix) is fits


@pytest.mark.parametrize(("num_prompt", "fits"), [(12, True), (13, False)])
def test_found_blocks_that_another_holds_cost_nothing(num_prompt: int, fits: bool) -> None:
    kv, first = make_kv(3), make_request("a", 8)
    run(kv, first)
    request = make_request("b", num_prompt)
    prefix = kv.find_prefix(request)
    assert (prefix.num_tokens, kv.pool.num_free_blocks) == (8, 1)
    assert kv.can_admit(request, prefix) is fits


def test_room_is_made_block_by_block_and_all_or_none() -> None:
    kv, request = make_kv(3), make_request("r", 4)
    assert kv.extend(request, 4) == [0]
    assert kv.extend(request, 4) == []
    assert kv.extend(request, 5) == [1]
    assert kv.extend(request, 16) is None
    assert request.block_ids == [0, 1]
    assert kv.extend(request, 12) == [2]
    assert kv.extend(request, 13) is None


def test_every_group_gets_as_many_blocks() -> None:
    kv, request = make_kv(5, groups=WINDOW), make_request("r", 8)
    assert kv.extend(request, 8) == [0, 1, 2, 3]
    assert (request.block_ids, request.group_block_ids) == ([0, 1], [[2, 3]])
    assert kv.extend(request, 9) is None, "one is free, two are needed"
    request.num_computed_tokens = 8
    assert kv.extend(request, 9) == [2, 4], "the first block of the window is given back and used"
    assert (request.block_ids, request.group_block_ids) == ([0, 1, 2], [[NO_BLOCK, 3, 4]])


def test_what_keeps_nothing_needs_no_block() -> None:
    kv, request = make_kv(0, groups=(CacheGroup("none"),)), make_request("r", 8)
    assert kv.extend(request, 8) == []
    assert kv.blocks_for(8) == 2


def test_full_blocks_are_found_as_far_as_their_tokens_are_known() -> None:
    kv, request = make_kv(), make_request("r", 9)
    kv.admit(request, Prefix([[]]))
    kv.extend(request, 9)
    kv.cache_computed(request, 3)
    assert (request.num_cached_blocks, len(kv.pool.hashes)) == (0, 0)
    kv.cache_computed(request, 4)
    assert (request.num_cached_blocks, len(kv.pool.hashes)) == (1, 1)
    kv.cache_computed(request, 100)
    assert (request.num_cached_blocks, len(kv.pool.hashes)) == (2, 2), "9 tokens are known"
    kv.cache_computed(request, 4)
    assert request.num_cached_blocks == 2


def test_a_sibling_shares_the_prompt_and_copies_its_last_block() -> None:
    kv, leader = make_kv(), make_request("a", 10)
    run(kv, leader)
    assert leader.has_computed_prompt
    sibling = make_request("b", 10)
    sibling.leader = leader
    prefix = kv.find_prefix(sibling)
    assert (prefix.num_tokens, prefix.forked_from) == (9, leader)
    kv.admit(sibling, prefix)
    assert (sibling.block_ids, sibling.num_computed_tokens, sibling.num_cached_blocks) == ([0, 1, 3], 9, 2)
    assert kv.pool.num_free_blocks == 6
    assert kv.take_transfers().copy == {3: 2}
    assert kv.take_transfers().copy == {}
    kv.free(leader)
    kv.free(sibling)
    assert kv.pool.num_free_blocks == 10


@pytest.mark.parametrize("change", ["prompt", "output"])
def test_a_sibling_looks_for_itself_otherwise(change: str) -> None:
    kv, leader = make_kv(), make_request("a", 10)
    run(kv, leader)
    if change == "prompt":
        leader.num_computed_tokens -= 1
    assert leader.has_computed_prompt is (change == "output")
    sibling = make_request("b", 10)
    sibling.leader = leader
    if change == "output":
        sibling.output_token_ids.append(5)
    assert kv.find_prefix(sibling).forked_from is None


def test_a_sibling_at_the_end_of_a_block_copies_nothing() -> None:
    kv, leader = make_kv(), make_request("a", 9)
    run(kv, leader)
    assert leader.has_computed_prompt
    sibling = make_request("b", 9)
    sibling.leader = leader
    kv.admit(sibling, kv.find_prefix(sibling))
    assert (sibling.block_ids, kv.take_transfers().copy) == ([0, 1, 3], {})


@pytest.mark.parametrize(("num_computed", "copy", "tables"), [(8, {}, [0, 1]), (10, {3: 2}, [0, 1, 3])])
def test_a_fork_has_what_its_parent_has_computed(num_computed: int, copy: dict[int, int], tables: list[int]) -> None:
    kv, parent, child = make_kv(), make_request("a", 10), make_request("b", 10)
    run(kv, parent)
    parent.num_computed_tokens = num_computed
    parent.num_cached_blocks = 1
    kv.fork(parent, child)
    assert (child.block_ids, child.num_computed_tokens, child.num_cached_blocks) == (tables, num_computed, 1)
    assert child.block_hashes == parent.block_hashes[:2]
    assert kv.take_transfers().copy == copy


def test_a_copy_for_one_that_has_left_is_not_made() -> None:
    kv, parent, child = make_kv(), make_request("a", 10), make_request("b", 10)
    run(kv, parent)
    kv.fork(parent, child)
    kv.free(child)
    assert kv.take_transfers().copy == {}
    kv.free(parent)
    assert kv.pool.num_free_blocks == 10


@pytest.mark.parametrize(("num_free", "can"), [(1, True), (0, False)])
def test_a_fork_needs_a_block_for_each_table(num_free: int, can: bool) -> None:
    kv, parent = make_kv(3 + num_free), make_request("a", 10)
    run(kv, parent)
    assert kv.can_fork(parent) is can
    assert kv.can_begin_anew(parent)


def test_evicted_blocks_move_to_the_host_and_back() -> None:
    kv, first = make_kv(3, num_host_blocks=4), make_request("a", 9)
    run(kv, first)
    kv.free(first)
    other = make_request("b", [7] * 12)
    kv.admit(other, kv.find_prefix(other))
    kv.extend(other, 12)
    transfers = kv.take_transfers()
    assert sorted(transfers.swap_out.values()) == [0, 1]
    assert transfers.swap_in == []
    kv.free(other)
    again = make_request("c", 9)
    prefix = kv.find_prefix(again)
    assert (prefix.num_tokens, prefix.device_blocks) == (8, [])
    kv.admit(again, prefix)
    hosts = {device: host for host, device in transfers.swap_out.items()}
    assert kv.take_transfers().swap_in == [(hosts[0], again.block_ids[0]), (hosts[1], again.block_ids[1])]
    assert (again.num_computed_tokens, kv.num_prefix_hits) == (8, 8)


@pytest.mark.parametrize("when", ["out", "in"])
def test_what_is_computed_faster_is_not_moved(when: str) -> None:
    kv, first = make_kv(3, num_host_blocks=4), make_request("a", 9)
    assert kv.is_swap_cheaper
    run(kv, first)
    kv.free(first)
    kv.is_swap_cheaper = when != "out"
    other = make_request("b", [7] * 12)
    kv.admit(other, kv.find_prefix(other))
    kv.extend(other, 12)
    assert len(kv.take_transfers().swap_out) == (0 if when == "out" else 2)
    kv.is_swap_cheaper = when != "in"
    assert kv.find_prefix(make_request("c", 9)).num_tokens == 0


@pytest.mark.parametrize(("caches", "num_found"), [(True, 4), (False, 3)])
def test_a_block_that_left_a_window_is_found_where_prefixes_are_shared(caches: bool, num_found: int) -> None:
    kv, request = make_kv(10, groups=WINDOW, caches=caches, num_host_blocks=1), make_request("r", 9)
    run(kv, request)
    kv.trim(request, 9)
    assert request.group_block_ids[0].count(NO_BLOCK) == 1
    assert kv.pool.num_free_blocks == 10 - 5
    assert len(kv.pool.hashes) == num_found


def test_a_reset_tells_how_many_blocks_were_forgotten() -> None:
    kv, request = make_kv(), make_request("a", 9)
    run(kv, request)
    kv.free(request)
    assert kv.reset_cache() == 2
    assert kv.find_prefix(make_request("b", 9)).num_tokens == 0
    assert kv.reset_cache() == 0


def test_forgotten_blocks_are_found_no_more() -> None:
    kv, request = make_kv(groups=WINDOW), make_request("a", 9)
    run(kv, request)
    kv.trim(request, 9)
    assert len(kv.pool.hashes) == 4
    kv.forget(request)
    assert len(kv.pool.hashes) == 0


def test_events_are_told_until_they_are_not_wanted() -> None:
    kv, told = make_kv(3), list[tuple[str, Any]]()
    events: Any = SimpleNamespace(
        stored=lambda event: told.append(("stored", event)),
        removed=lambda block_hash: told.append(("removed", block_hash)),
        forget=lambda hashes: told.append(("forget", list(hashes))),
    )
    kv.tell(events)
    first = make_request("a", 9)
    run(kv, first)
    hashes = first.block_hashes[:2]
    stored = [event for kind, event in told if kind == "stored"]
    assert [(event.block_hash, event.parent) for event in stored] == [(hashes[0], None), (hashes[1], hashes[0])]
    assert [event.token_ids for event in stored] == [tuple(range(1000, 1004)), tuple(range(1004, 1008))]
    kv.free(first)
    other = make_request("b", [7] * 12)
    run(kv, other)
    assert sorted(value for kind, value in told if kind == "removed") == sorted(hashes)
    kv.tell(None)
    assert told[-1] == ("forget", list(kv.pool.hashes))
    count = len(told)
    kv.free(other)
    run(kv, make_request("c", [8] * 12))
    assert len(told) == count
