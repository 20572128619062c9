"""KV events as VllmEngine's batches: snapshots in chunks, every field of an event, numbers without a gap."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

pytest.importorskip("smg_grpc_proto")

from smg_grpc_proto.generated import common_pb2

from pagoda_common.errors import Code, PagodaError
from pagoda_scheduler.kv.kv_events import BlockStored, KVEventLog, short_hash
from pagoda_scheduler.vllm_engine import events
from pagoda_scheduler.vllm_engine.events import stream_events


def block(number: int, *, parent: int | None = None, salt: str = "") -> BlockStored:
    before = None if parent is None else hashed(parent)
    return BlockStored(hashed(number), before, (abs(number), 70_000), salt)


def hashed(number: int) -> bytes:
    return number.to_bytes(8, "little", signed=True) + b"more"


def stored(*blocks: BlockStored) -> KVEventLog:
    log = KVEventLog()
    for one in blocks:
        log.stored(one)
        log.flush()
    return log


def load() -> common_pb2.EngineLoad:
    return common_pb2.EngineLoad()


def followed(log: KVEventLog, *, start: int = 0, before_first: bool = False) -> Any:
    return aclosing(stream_events(log, start=start, before_first=before_first, block_size=2, load=load))


async def first(stream: AsyncIterator[Any], count: int) -> list[Any]:
    return [await anext(stream) for _ in range(count)]


async def test_what_is_there_comes_as_a_snapshot_with_every_field() -> None:
    async with followed(stored(block(1), block(2, parent=1), block(-3, salt="s"))) as stream:
        [batch] = await first(stream, 1)
    assert (batch.sequence_number, batch.HasField("load")) == (3, False)
    assert (batch.snapshot.index, batch.snapshot.count, batch.snapshot.blocks) == (0, 1, 3)
    cleared, one, two, three = batch.events
    assert cleared.HasField("cleared")
    assert not any(event.event_id for event in batch.events)
    assert [list(event.stored.blocks[0].token_ids) for event in (one, two, three)] == [
        [1, 70_000],
        [2, 70_000],
        [3, 70_000],
    ]
    assert [event.stored.blocks[0].block_hash for event in (one, two, three)] == [1, 2, -3]
    assert [event.stored.blocks[0].block_size for event in (one, two, three)] == [2, 2, 2]
    assert [event.stored.HasField("parent_block_hash") for event in (one, two, three)] == [False, True, False]
    assert two.stored.parent_block_hash == 1
    assert [event.stored.cache_salt for event in (one, two, three)] == ["", "", "s"]


async def test_a_snapshot_has_as_many_chunks_as_there_are_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "SNAPSHOT_BLOCKS", 2)
    log = stored(*(block(number) for number in range(1, 6)))
    async with followed(log) as stream:
        chunks = await first(stream, 3)
    assert [chunk.sequence_number for chunk in chunks] == [3, 4, 5]
    assert [(one.snapshot.index, one.snapshot.count, one.snapshot.blocks) for one in chunks] == [
        (0, 3, 5),
        (1, 3, 5),
        (2, 3, 5),
    ]
    told = [[event.stored.blocks[0].block_hash for event in one.events if event.HasField("stored")] for one in chunks]
    assert told == [[1, 2], [3, 4], [5]]
    assert [one.events[0].HasField("cleared") for one in chunks] == [True, False, False]
    log = KVEventLog()
    for number in range(1, 6):
        log.stored(block(number))
    log.flush()  # one number for all: one chunk
    async with followed(log) as stream:
        [chunk] = await first(stream, 1)
    assert (chunk.sequence_number, chunk.snapshot.count, len(chunk.events)) == (1, 1, 6)


async def test_later_batches_follow_without_a_gap() -> None:
    log = stored(block(1))
    async with followed(log) as stream:
        await anext(stream)
        log.stored(block(2, parent=1))
        log.removed(hashed(1))
        log.flush()
        log.removed(hashed(2))
        log.flush()
        second, third = await first(stream, 2)
        assert len(log.on_batch) == 1
    assert [second.sequence_number, third.sequence_number] == [2, 3]
    assert second.HasField("load")
    assert second.timestamp > 0
    assert [event.event_id for event in second.events] == [2 << 20, (2 << 20) + 1]
    assert second.events[0].stored.blocks[0].block_hash == 2
    assert list(second.events[1].removed.block_hashes) == [1]
    assert third.events[0].HasField("cleared"), "nothing is left"
    assert log.on_batch == []


async def test_who_comes_back_gets_what_came_meanwhile() -> None:
    log = stored(block(1), block(2), block(3))
    async with followed(log, start=2) as stream:
        batches = await first(stream, 2)
    assert [one.sequence_number for one in batches] == [2, 3]
    assert not any(one.HasField("snapshot") for one in batches)
    async with followed(log, start=4) as stream:
        log.stored(block(4))
        task = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        log.flush()
        assert (await task).sequence_number == 4


@pytest.mark.parametrize(("before_first", "blocks", "number"), [(False, (1,), 1), (True, (), 0), (True, (1,), 1)])
async def test_silence_is_told_with_the_load(
    before_first: bool, blocks: tuple[int, ...], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "HEARTBEAT_S", 0.0)
    async with followed(stored(*map(block, blocks)), before_first=before_first) as stream:
        if blocks:
            await anext(stream)
        beat = await anext(stream)
    assert (beat.sequence_number, beat.load.load_only, len(beat.events)) == (number, True, 0)


async def test_a_reader_that_is_too_far_behind_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_BACKLOG", 2)
    log = stored(block(1))
    async with followed(log) as stream:
        await anext(stream)
        for number in range(2, 5):
            log.stored(block(number))
            log.flush()
        with pytest.raises(PagodaError, match="the reader is 2 batches behind") as caught:
            await first(stream, 5)
    assert caught.value.code is Code.ABORTED
    assert log.on_batch == []


def test_routers_know_the_first_64_bits_with_their_sign() -> None:
    assert [short_hash(hashed(number)) for number in (1, -1, 2**63 - 1)] == [1, -1, 2**63 - 1]
