"""The log of KV events against the caches that it reports on."""

import random

from pagoda_common.params.sampling_params import SamplingParams
from pagoda_scheduler.core.request import Request
from pagoda_scheduler.kv.block_pool import BlockHash
from pagoda_scheduler.kv.cache_group import CacheGroup, CacheSizes
from pagoda_scheduler.kv.kv_cache_manager import KVCacheManager
from pagoda_scheduler.kv.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KVEventLog

BLOCK_SIZE = 4


def follow(batches: list[EventBatch]) -> dict[BlockHash, BlockStored]:
    """What a subscriber knows who has read `batches`."""
    known: dict[BlockHash, BlockStored] = {}
    for batch in batches:
        for event in batch.events:
            if isinstance(event, BlockStored):
                assert event.block_hash not in known
                known[event.block_hash] = event
            elif isinstance(event, BlockRemoved):
                del known[event.block_hash]
            else:
                assert isinstance(event, AllBlocksCleared)
                known.clear()
    return known


def compute(kv: KVCacheManager, prompt: list[int], name: str) -> Request:
    """Admit a prompt and compute all of it."""
    request = Request(
        request_id=name, prompt_token_ids=prompt, sampling_params=SamplingParams(seed=0), max_model_len=1000
    )
    kv.admit(request, kv.find_prefix(request))
    assert kv.extend(request, len(prompt)) is not None
    kv.cache_computed(request, len(prompt))
    return request


async def test_a_subscriber_knows_what_two_caches_have() -> None:
    log, generator = KVEventLog(), random.Random(3)
    caches = [KVCacheManager(sizes=CacheSizes(24), block_size=BLOCK_SIZE) for _ in range(2)]
    for kv in caches:
        kv.tell(log)
    stems = [[generator.randrange(50) for _ in range(12)] for _ in range(3)]
    running: list[tuple[KVCacheManager, Request]] = []
    for number in range(200):
        kv = generator.choice(caches)
        if len(running) > 4:
            owner, request = running.pop(generator.randrange(len(running)))
            owner.free(request)
        prompt = generator.choice(stems) + [generator.randrange(50) for _ in range(generator.randrange(1, 9))]
        if kv.pool.num_free_blocks >= 6:
            running.append((kv, compute(kv, prompt, str(number))))
        if number == 120:
            caches[0].reset_cache()
        log.flush()
        batches = log.since(1)
        assert batches is not None
        assert set(follow(batches)) == {block for kv in caches for block in kv.pool.hashes}
    assert len(follow(log.since(1) or [])) > 5


async def test_events_are_of_the_first_group_of_layers() -> None:
    log = KVEventLog()
    groups = (CacheGroup("full"), CacheGroup("window", window=4), CacheGroup("full"))
    kv = KVCacheManager(sizes=CacheSizes(24), block_size=BLOCK_SIZE, groups=groups, max_step_tokens=100)
    kv.tell(log)
    first = compute(kv, list(range(9)), "first")
    log.flush()
    assert list(follow(log.since(1) or [])) == first.block_hashes
    assert kv.pool.num_cached_blocks == 3 * len(first.block_hashes)
    kv.free(first)
    for number in range(6):  # until everything before has been evicted
        kv.free(compute(kv, list(range(100 * (number + 1), 100 * (number + 1) + 9)), str(number)))
        log.flush()
        known = {block for block in kv.pool.hashes if len(block) == len(first.block_hashes[0])}
        assert set(follow(log.since(1) or [])) == known
    assert not known & set(first.block_hashes)
    kv.tell(None)
    log.flush()
    assert follow(log.since(1) or []) == {}


async def test_a_snapshot_has_parents_first_and_says_the_same() -> None:
    log = KVEventLog()
    kv = KVCacheManager(sizes=CacheSizes(32), block_size=BLOCK_SIZE)
    kv.tell(log)
    for number in range(3):
        compute(kv, [*range(8), *range(100 * number, 100 * number + 9)], str(number))
    seen: set[BlockHash] = set()
    for event in log.snapshot():
        assert event.parent is None or event.parent in seen
        assert len(event.token_ids) == BLOCK_SIZE
        seen.add(event.block_hash)
    assert seen == set(kv.pool.hashes)


async def test_a_group_that_goes_takes_its_blocks_with_it() -> None:
    log = KVEventLog()
    caches = [KVCacheManager(sizes=CacheSizes(32), block_size=BLOCK_SIZE) for _ in range(2)]
    for kv in caches:
        kv.tell(log)
        compute(kv, list(range(9)), "shared")
    compute(caches[0], list(range(50, 59)), "own")
    caches[0].tell(None)
    assert {event.block_hash for event in log.snapshot()} == set(caches[1].pool.hashes)
    caches[1].tell(None)
    batches = log.since(1)
    assert batches is not None
    assert isinstance(batches[-1].events[-1], AllBlocksCleared)
    assert log.since(log.last_sequence + 1) == []
