"""Streams the log of KV events as VllmEngine's batches, each with the load."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable

from smg_grpc_proto.generated import common_pb2

from pagoda_common.errors import Code, PagodaError
from pagoda_scheduler.kv.kv_events import BlockRemoved, BlockStored, Event, EventBatch, KVEventLog, short_hash

HEARTBEAT_S = 1.0
"""Seconds of silence after which a batch with only the load is sent."""
MAX_BACKLOG = 10_000
SNAPSHOT_BLOCKS = 256
"""Number of blocks in one chunk of a snapshot."""


async def stream_events(
    log: KVEventLog, *, start: int, before_first: bool, block_size: int, load: Callable[[], common_pb2.EngineLoad]
) -> AsyncIterator[common_pb2.KvEventBatch]:
    """Batches from number `start` (0: a snapshot of the current blocks, then new batches), until the caller stops.

    `before_first`: heartbeats, numbered 0, may come before any batch.

    Raises:
        PagodaError: ABORTED, the reader is too slow; it may subscribe again.
    """
    queue: asyncio.Queue[EventBatch] = asyncio.Queue(MAX_BACKLOG)
    is_behind = asyncio.Event()

    def take(batch: EventBatch) -> None:
        if queue.full():
            is_behind.set()
        else:
            queue.put_nowait(batch)

    known = log.since(start) if start else None
    last = log.last_sequence
    log.on_batch.append(take)
    try:
        if known is None:
            for message in _snapshot(log.snapshot(), last=last, block_size=block_size):
                yield message
        for batch in known or ():
            yield _batch_to_proto(batch, block_size=block_size, load=load())
        while not is_behind.is_set():
            try:
                batch = await asyncio.wait_for(queue.get(), HEARTBEAT_S)
            except TimeoutError:
                if last or before_first:
                    record = load()
                    record.load_only = True
                    yield common_pb2.KvEventBatch(sequence_number=last, load=record)
                continue
            last = batch.sequence
            yield _batch_to_proto(batch, block_size=block_size, load=load())
        raise PagodaError(f"the reader is {MAX_BACKLOG} batches behind", code=Code.ABORTED)
    finally:
        log.on_batch.remove(take)


def _snapshot(blocks: list[BlockStored], *, last: int, block_size: int) -> list[common_pb2.KvEventBatch]:
    """The current content as chunks whose numbers end at `last`; no chunks if there never was content."""
    if not last:
        return []
    count = min(last, max(1, -(-len(blocks) // SNAPSHOT_BLOCKS)))  # each has its own number
    size = -(-len(blocks) // count)
    chunks = []
    for index in range(count):
        part: list[Event] = list(blocks[index * size : (index + 1) * size])
        chunk = common_pb2.KvEventBatch(sequence_number=last - (count - 1 - index))
        chunk.snapshot.index, chunk.snapshot.count, chunk.snapshot.blocks = index, count, len(blocks)
        if index == 0:
            chunk.events.add().cleared.SetInParent()
        _add_events(chunk, part, block_size=block_size)
        chunks.append(chunk)
    return chunks


def _batch_to_proto(batch: EventBatch, *, block_size: int, load: common_pb2.EngineLoad) -> common_pb2.KvEventBatch:
    message = common_pb2.KvEventBatch(sequence_number=batch.sequence, timestamp=batch.timestamp, load=load)
    _add_events(message, batch.events, block_size=block_size, first_id=batch.sequence << 20)
    return message


def _add_events(
    message: common_pb2.KvEventBatch, events: Iterable[Event], *, block_size: int, first_id: int = 0
) -> None:
    for number, event in enumerate(events):
        entry = message.events.add(event_id=first_id and first_id + number)
        if isinstance(event, BlockStored):
            block = entry.stored.blocks.add(block_hash=short_hash(event.block_hash), block_size=block_size)
            block.token_ids.extend(event.token_ids)
            if event.parent is not None:
                entry.stored.parent_block_hash = short_hash(event.parent)
            if event.cache_salt:
                entry.stored.cache_salt = event.cache_salt
        elif isinstance(event, BlockRemoved):
            entry.removed.block_hashes.append(short_hash(event.block_hash))
        else:
            entry.cleared.SetInParent()
