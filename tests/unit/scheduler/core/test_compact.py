"""What lives on after a burst can be moved together: nothing is lost by it, and what was removed is gone."""

import gc
import weakref

import pytest

from tests.unit.scheduler.stories import PretendWorker, make_request, make_scheduler, run


def test_cached_prefixes_are_found_after_a_compaction() -> None:
    scheduler, worker = make_scheduler(), PretendWorker()
    scheduler.add(make_request("a", 20))
    run(scheduler, worker)
    pool = scheduler.kv.pool
    before = dict(pool._cached)
    scheduler.compact()
    assert pool._cached == before
    moved = {id(block_hash) for block_hash in pool._cached}
    assert moved.isdisjoint(map(id, before)), "every hash is a new object"
    assert all(id(known) in moved for known in pool._hashes if known is not None), "and no old one is kept"
    pool.check_invariants()
    again = make_request("b", 20)
    scheduler.add(again)
    run(scheduler, worker)
    assert again.first_cached_tokens == 16


def test_hashes_on_the_host_are_found_after_a_compaction() -> None:
    scheduler = make_scheduler(num_host_blocks=2)
    host = scheduler.kv.host
    digest = b"\1" * 16
    place = host.save(digest)
    host.compact()
    assert host.find(digest) == place
    assert next(iter(host._by_hash)) is not digest


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_a_removed_sequence_is_gone_after_a_compaction(policy: str) -> None:
    scheduler = make_scheduler(policy=policy)

    class Mark:
        """Lives as long as its request."""

    mark = Mark()
    request = make_request("a", 8, sink=mark)
    seen = weakref.ref(mark)
    scheduler.add(request)
    scheduler.finish(request)
    del request, mark
    scheduler.compact()
    gc.collect()
    assert seen() is None
    other = make_request("b", 8)
    scheduler.add(other)
    run(scheduler, PretendWorker())
    assert other.finish_reason is not None
