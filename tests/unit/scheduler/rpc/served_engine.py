"""A servicer over an engine without a server or workers, and what is sent to it."""

from typing import Any

from pagoda.v1 import scheduler_pb2, types_pb2
from pagoda_common.config.engine_config import CacheConfig, EngineConfig
from pagoda_common.engine.convert import token_ids_to_bytes
from pagoda_scheduler.engine.engine import Engine
from pagoda_scheduler.engine.engine_core import EngineCore
from pagoda_scheduler.groups.worker_groups import WorkerGroups
from pagoda_scheduler.kv.cache_group import CacheSizes
from pagoda_scheduler.rpc.scheduler_state import SchedulerState
from pagoda_scheduler.rpc.servicer import SchedulerServicer
from pagoda_scheduler.rpc.sinks import SessionSink
from tests.unit.scheduler.engine.test_engine_core import Group


class Scheduler:
    """A servicer over an engine, and all of its parts."""

    def __init__(self, **config: Any) -> None:
        config.setdefault("cache", CacheConfig(block_size=4))
        self.config = EngineConfig(**config)
        self.engine = Engine(config=self.config)
        self.groups = WorkerGroups(config=self.config, engine=self.engine, session_epoch=7)
        self.state = SchedulerState(session_epoch=7, engine=self.engine, groups=self.groups)
        self.servicer = SchedulerServicer(
            engine=self.engine, groups=self.groups, state=self.state, version="1.2", render_metrics=lambda: b"metrics"
        )

    def add_core(self, **more: Any) -> EngineCore:
        core = EngineCore(
            config=self.config,
            executor=more.pop("group", Group()),
            sizes=CacheSizes(100),
            max_model_len=64,
            deliver=self.engine.deliver,
            **more,
        )
        self.engine.add_core(core)
        return core

    def session(self) -> SessionSink:
        sink = SessionSink(state=self.state, on_room=self.engine.unpark)
        self.engine.sinks.add(sink)
        return sink


def submit(name: str, **more: Any) -> scheduler_pb2.SubmitRequest:
    fields: dict[str, Any] = {
        "request_id": name,
        "slots": [3],
        "prompt_token_ids": token_ids_to_bytes([1, 2, 3, 4, 5]),
        "sampling_params": types_pb2.SamplingParams(n=1, max_tokens=4, seed=1),
    }
    return scheduler_pb2.SubmitRequest(**{**fields, **more})


def sent(sink: SessionSink) -> list[scheduler_pb2.SchedulerMessage]:
    """Messages on their way."""
    return list(sink.outbox._messages)
