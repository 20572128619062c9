"""KV cache events on ZMQ sockets, in vLLM's format: frames (topic, number, msgpack). Publishes; decides nothing."""

import asyncio
import logging
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from pagoda_common.config.kv_events_config import KVEventsConfig, kv_events_config
from pagoda_common.errors import ConfigError
from pagoda_scheduler.engine.engine import Engine
from pagoda_scheduler.kv.kv_events import BlockRemoved, BlockStored, Event, EventBatch, KVEventLog, short_hash

if TYPE_CHECKING:
    import zmq.asyncio

logger = logging.getLogger(__name__)

MEDIUM = "GPU"
"""vLLM's name for the worker's own KV cache."""
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)


def start_kv_events(engine: Engine) -> "ZmqPublisher | None":
    """Enable the events that the config of `engine` asks for; returns the publisher, if there is one.

    Raises:
        ConfigError: they cannot be published.
    """
    config = kv_events_config(engine.config.cache.kv_events_config)
    if not config.enable_kv_cache_events:
        return None
    engine.kv_events = KVEventLog()
    if config.publisher != "zmq":
        return None
    for package in ("zmq", "msgspec"):
        if find_spec(package) is None:
            raise ConfigError("publisher zmq needs pip install 'pagoda-llm[kv-events]'", field="kv_events_config")
    return ZmqPublisher(engine.kv_events, config, block_size=engine.config.cache.block_size)


class ZmqPublisher:
    """Publishes every batch of a log on a PUB socket; a ROUTER socket replays batches that a subscriber has missed."""

    def __init__(self, log: KVEventLog, config: KVEventsConfig, *, block_size: int) -> None:
        """Raises ConfigError when an endpoint cannot be bound."""
        import zmq
        import zmq.asyncio

        self._log, self._block_size = log, block_size
        self._topic = config.topic.encode()
        self._context = zmq.Context()
        self._publisher = self._context.socket(zmq.PUB)
        self._publisher.set_hwm(config.hwm)
        self._router: zmq.asyncio.Socket | None = None
        self._replay: asyncio.Task[None] | None = None
        try:
            self._publisher.bind(config.endpoint)
            if config.replay_endpoint is not None:
                self._router = zmq.asyncio.Context.shadow(self._context.underlying).socket(zmq.ROUTER)
                self._router.bind(config.replay_endpoint)
                self._replay = asyncio.create_task(self._answer(self._router))
        except zmq.ZMQError as error:
            self._close_sockets()
            raise ConfigError(
                f"kv_events_config: cannot bind an endpoint: {error}", field="kv_events_config"
            ) from error
        logger.info("KV cache events on %s", config.endpoint)
        log.on_batch.append(self._publish)

    def close(self) -> None:
        """Close the sockets."""
        if self._replay is not None:
            self._replay.cancel()
        self._log.on_batch.remove(self._publish)
        self._close_sockets()

    def _close_sockets(self) -> None:
        # The context would wait for sockets that it does not know: the router belongs to its shadow.
        for socket in (self._router, self._publisher):
            if socket is not None:
                socket.close(linger=0)
        self._context.term()

    def _publish(self, batch: EventBatch) -> None:
        # A PUB socket never blocks: a slow subscriber misses batches, and notices that by their numbers.
        self._publisher.send_multipart((self._topic, _number(batch.sequence), self._encode(batch)))

    async def _answer(self, router: "zmq.asyncio.Socket") -> None:
        while True:
            frames = await router.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                logger.warning("a replay request has %d frames, must be identity, empty, number", len(frames))
                continue
            client, start = frames[0], int.from_bytes(frames[2], "big")
            kept = self._log.since(start + 1)
            for batch in self._log.kept() if kept is None else kept:
                await router.send_multipart((client, b"", _number(batch.sequence), self._encode(batch)))
            await router.send_multipart((client, b"", END_OF_REPLAY, b""))

    def _encode(self, batch: EventBatch) -> bytes:
        import msgspec

        events = [encode_event(event, self._block_size) for event in batch.events]
        return msgspec.msgpack.encode((batch.timestamp, events, 0))


def encode_event(event: Event, block_size: int) -> tuple[Any, ...]:
    """`event` as vLLM's array: its name, then its fields in order."""
    if isinstance(event, BlockStored):
        parent = None if event.parent is None else short_hash(event.parent)
        return ("BlockStored", (short_hash(event.block_hash),), parent, event.token_ids, block_size, None, MEDIUM)
    if isinstance(event, BlockRemoved):
        return ("BlockRemoved", (short_hash(event.block_hash),), MEDIUM)
    return ("AllBlocksCleared",)


def _number(sequence: int) -> bytes:
    """vLLM counts batches from 0."""
    return (sequence - 1).to_bytes(8, "big")
