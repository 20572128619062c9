"""Events, host memory and tables of blocks at their bounds."""

import hashlib
from array import array

import pytest

from pagoda_common.params.lora_adapter import LoraAdapter
from pagoda_scheduler.kv import kv_events
from pagoda_scheduler.kv.block_hashes import BlockHasher
from pagoda_scheduler.kv.block_pool import BlockPool
from pagoda_scheduler.kv.block_tables import BlockTables
from pagoda_scheduler.kv.cache_group import CacheGroup, CacheSizes, computes_whole, has_states
from pagoda_scheduler.kv.host_cache import HostCache
from pagoda_scheduler.kv.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KVEventLog,
    short_hash,
)
from pagoda_scheduler.rpc.kv_events_zmq import END_OF_REPLAY, _number, encode_event
from tests.unit.scheduler.stories import make_request


def stored(name: bytes, parent: bytes | None = None) -> BlockStored:
    return BlockStored(name, parent, (1, 2))


async def test_events_of_a_turn_are_one_batch_and_told_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events.time, "time", lambda: 12.5)
    log, heard = KVEventLog(), list[EventBatch]()
    log.on_batch += [heard.append, heard.append]
    assert (log.last_sequence, log.since(1), log.since(0), log.kept()) == (0, [], None, [])
    log.stored(stored(b"a"))
    log.stored(stored(b"b", b"a"))
    log.flush()
    log.flush()
    batch = EventBatch(1, 12.5, (stored(b"a"), stored(b"b", b"a")))
    assert (heard, log.last_sequence, log.kept()) == ([batch, batch], 1, [batch])
    assert (log.since(1), log.since(2), log.since(0)) == ([batch], [], None)


async def test_a_block_counts_once_however_many_groups_have_it() -> None:
    log = KVEventLog()
    for name in (b"a", b"a", b"b"):
        log.stored(stored(name))
    log.removed(b"a")
    log.removed(b"unknown")
    assert [event.block_hash for event in log.snapshot()] == [b"a", b"b"]
    log.removed(b"a")
    log.removed(b"b")
    log.stored(stored(b"a"))
    log.flush()
    events = [event for batch in log.kept() for event in batch.events]
    assert events == [stored(b"a"), stored(b"b"), BlockRemoved(b"a"), AllBlocksCleared(), stored(b"a")]


async def test_of_old_batches_those_within_the_bound_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kv_events.MAX_BATCHES == 10_000
    monkeypatch.setattr(kv_events, "MAX_BATCHES", 2)
    log = KVEventLog()
    for name in (b"a", b"b", b"c"):
        log.stored(stored(name))
        log.flush()
    assert [batch.sequence for batch in log.kept()] == [2, 3]
    assert log.since(1) is None
    assert [batch.sequence for batch in log.since(2) or []] == [2, 3]
    assert [batch.sequence for batch in log.since(3) or []] == [3]


async def test_a_parent_that_came_again_later_still_comes_first() -> None:
    log = KVEventLog()
    log.stored(stored(b"child", b"parent"))
    log.stored(stored(b"parent", b"root"))
    log.stored(stored(b"other"))
    assert [event.block_hash for event in log.snapshot()] == [b"parent", b"child", b"other"]


@pytest.mark.parametrize(
    ("name", "number"),
    [(b"\x01" + bytes(7), 1), (b"\xff" * 8, -1), (bytes(7) + b"\x80", -(2**63)), (b"\x02" + bytes(15), 2)],
)
def test_routers_know_blocks_by_64_signed_bits(name: bytes, number: int) -> None:
    assert short_hash(name) == number


def test_events_are_vllm_s_arrays() -> None:
    parent, child = b"\x01" + bytes(15), b"\x02" + bytes(15)
    first = BlockStored(parent, None, (5, 6, 7, 8))
    assert encode_event(first, 4) == ("BlockStored", (1,), None, (5, 6, 7, 8), 4, None, "GPU")
    second = BlockStored(child, parent, (9,) * 4)
    assert encode_event(second, 4) == ("BlockStored", (2,), 1, (9,) * 4, 4, None, "GPU")
    assert encode_event(BlockRemoved(child), 4) == ("BlockRemoved", (2,), "GPU")
    assert encode_event(AllBlocksCleared(), 4) == ("AllBlocksCleared",)
    assert (_number(1), _number(258), END_OF_REPLAY) == (bytes(8), bytes(6) + b"\x01\x01", b"\xff" * 8)


# Host memory.


def test_a_block_that_is_discarded_gives_its_place_back() -> None:
    host = HostCache(num_blocks=2)
    host.save(b"a")
    host.save(b"b")
    host.find(b"a")
    host.discard(b"unknown")
    host.discard(b"a")
    assert (b"a" in host, len(host), host.save(b"c"), host.save(b"d")) == (False, 1, 0, 1)
    host.find(b"c")
    assert host.save(b"e") == 1, "d was not read in this step"
    host.discard(b"c")
    assert host.save(b"f") == 0
    host.compact()
    assert (b"e" in host, b"f" in host, host.find(b"f"), host.save(b"g")) == (True, True, 0, 1)
    host.find(b"g")
    assert host.save(b"h") is None
    host.end_step()
    assert host.save(b"h") == 0, "the least recently used"


def test_what_is_saved_again_counts_as_used() -> None:
    host = HostCache(num_blocks=2)
    for name in (b"a", b"b", b"a"):
        host.save(name)
    assert host.save(b"c") == 1
    assert (b"a" in host, b"b" in host) == (True, False)


def test_without_host_memory_nothing_is_saved() -> None:
    host = HostCache(num_blocks=0)
    assert (host.save(b"a"), len(host), host.num_blocks) == (None, 0, 0)


def test_what_is_evicted_is_told_before_it_is_forgotten() -> None:
    told: list[tuple[int, bytes, bool]] = []
    pool = BlockPool(num_blocks=2, on_evict=lambda block, name: told.append((block, name, pool.has(name))))
    (block,) = pool.allocate(1)
    pool.cache(block, b"a")
    pool.free([block])
    pool.allocate(2)
    assert told == [(block, b"a", True)]
    assert not pool.has(b"a")


# Names of blocks.


def test_a_hash_covers_everything_before_it() -> None:
    hasher = BlockHasher(block_size=2, is_shared=True)
    request = make_request("a", [1, 2, 3, 4, 5], cache_salt="salt")
    first = hashlib.blake2b(b"salt\0" + array("I", [1, 2]).tobytes(), digest_size=16).digest()
    second = hashlib.blake2b(first + array("I", [3, 4]).tobytes(), digest_size=16).digest()
    assert hasher.of(request, 1) == [first]
    assert hasher.of(request, 2) == [first, second]
    assert hasher.of(request, 1) == [first, second], "each is computed once"


def test_requests_share_blocks_of_the_same_salt_and_adapter_alone() -> None:
    def first_of(*, is_shared: bool = True, **more: object) -> bytes:
        request = make_request("a", [1, 2], **more)
        return BlockHasher(block_size=2, is_shared=is_shared).of(request, 1)[0]

    sql, newer = LoraAdapter(name="sql"), LoraAdapter(name="sql", version=1)
    variants = [{}, {"cache_salt": "x"}, {"lora": sql}, {"lora": newer}, {"lora": sql, "cache_salt": "x"}]
    assert len({first_of(**variant) for variant in variants}) == len(variants)
    assert first_of(lora=sql) == first_of(lora=LoraAdapter(name="sql"))
    own = [{}, {"index": 1}, {"attempt": 1}]
    assert len({first_of(is_shared=False, **variant) for variant in own} | {first_of()}) == 4


# Tables.


def tables_of(*windows: int, block_size: int = 4, max_step_tokens: int = 8) -> BlockTables:
    groups = [CacheGroup("window", window=window) if window else CacheGroup("full") for window in windows]
    return BlockTables(groups=groups, block_size=block_size, max_step_tokens=max_step_tokens)


@pytest.mark.parametrize(("query", "first"), [(0, 0), (4, 0), (7, 0), (8, 1), (9, 1), (11, 1), (12, 2), (16, 3)])
def test_a_window_reads_from_its_first_token_on(query: int, first: int) -> None:
    tables = tables_of(0, 5)  # the query at 8 reads from 4 on
    assert (tables.first_needed(0, query), tables.first_needed(1, query)) == (0, first)
    assert (tables.is_window(0), tables.is_window(1), tables.num_full, tables.count) == (False, True, 1, 2)


def test_blocks_that_have_left_all_windows_are_given_back_once() -> None:
    tables, request = tables_of(0, 5), make_request("a", 3)
    tables.append(request, [10, 11, 12, 13, 20, 21, 22, 23])
    assert (request.block_ids, request.group_block_ids) == ([10, 11, 12, 13], [[20, 21, 22, 23]])
    assert tables.held(request) == [10, 20, 11, 21, 12, 22, 13, 23]
    assert tables.trim(request, 12) == [20, 21]
    assert tables.trim(request, 12) == []
    assert request.first_blocks == [0, 2]
    assert tables.held(request) == [10, 11, 12, 22, 13, 23]
    assert tables.trim(request, 100) == [22, 23], "no more than there are"
    tables.clear(request)
    assert (request.block_ids, request.group_block_ids, request.first_blocks) == ([], [], [])


@pytest.mark.parametrize(
    ("windows", "num_tokens", "num_cached", "expected"),
    [
        ((0,), 16, 0, 4),
        ((0,), 17, 0, 5),
        ((0, 0), 17, 0, 10),
        ((0, 5), 16, 0, 8),
        ((0, 5), 40, 0, 10 + 4),  # 4 tokens before a step of 8: 3 blocks, and one more for those that are not aligned
        ((0, 5), 40, 36, 10 + 2),
        ((5,), 40, 32, 3),
    ],
)
def test_blocks_are_needed_for_all_of_it_or_for_a_window(
    windows: tuple[int, ...], num_tokens: int, num_cached: int, expected: int
) -> None:
    assert tables_of(*windows).num_needed(num_tokens, num_cached) == expected


@pytest.mark.parametrize(
    ("windows", "num_blocks", "tokens"),
    [
        ((0,), 10, 40),
        ((0, 0), 11, 20),
        ((0, 5), 14, 40),
        ((0, 5), 13, 36),
        ((5,), 4, None),
        ((5,), 3, 12),
        ((0,), 0, 0),
    ],
)
def test_a_sequence_alone_has_room_for(windows: tuple[int, ...], num_blocks: int, tokens: int | None) -> None:
    assert tables_of(*windows).capacity(num_blocks) == tokens


def test_a_block_s_key_is_its_hash_and_its_table() -> None:
    tables = tables_of(0, 5)
    assert (tables.key(0, b"h"), tables.key(1, b"h")) == (b"h", b"h\x01")
    assert (tables_of(0).is_plain, tables.is_plain, tables_of(5).is_plain) == (True, False, False)
    assert (tables_of(0, 0).has_windows, tables.has_windows) == (False, True)


@pytest.mark.parametrize(
    ("kind", "window"), [("window", 0), ("full", 1), ("recurrent", 2), ("none", 1), ("window", -1)]
)
def test_a_window_is_of_its_kind_alone(kind: str, window: int) -> None:
    with pytest.raises(
        ValueError, match=f"window is {window}, must be at least 1 for kind window and 0 for kind {kind}"
    ):
        CacheGroup(kind, window=window)  # type: ignore[arg-type]  # a literal


def test_what_groups_keep() -> None:
    full, window = CacheGroup("full"), CacheGroup("window", window=1)
    recurrent, none = CacheGroup("recurrent"), CacheGroup("none")
    assert [group.has_blocks for group in (full, window, recurrent, none)] == [True, True, False, False]
    assert (has_states([full, recurrent]), has_states([full, none])) == (True, False)
    assert (computes_whole([full, none]), computes_whole([full, recurrent])) == (True, False)
    assert CacheSizes(1, 2, 3, 4).on_device() == CacheSizes(1, 0, 3, 0)
