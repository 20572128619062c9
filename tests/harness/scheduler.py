"""A real scheduler in this process, and what drives it."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from pagoda.v1 import scheduler_pb2_grpc
from pagoda_common.config.engine_config import EngineConfig
from pagoda_common.rpc.service import RpcServer, connect
from pagoda_scheduler.engine.engine import Engine
from pagoda_scheduler.groups.worker_groups import WorkerGroups
from pagoda_scheduler.observability.timeline import Timeline
from pagoda_scheduler.rpc.kv_events_zmq import start_kv_events
from pagoda_scheduler.rpc.scheduler_state import SchedulerState
from pagoda_scheduler.rpc.servicer import SchedulerServicer


@dataclass
class RunningScheduler:
    """A scheduler, its address and a stub."""

    address: str
    engine: Engine
    stub: "scheduler_pb2_grpc.SchedulerAsyncStub"

    async def until(self, condition: Callable[[], bool], *, timeout_s: float = 240.0) -> None:
        """Wait until `condition` holds."""
        async with asyncio.timeout(timeout_s):
            while not condition():  # noqa: ASYNC110 (conditions are of any kind)
                await asyncio.sleep(0.01)

    async def until_ready(self) -> None:
        """Wait until a group serves."""
        await self.until(lambda: self.engine.is_ready)


@asynccontextmanager
async def running_scheduler(
    config: EngineConfig, *, port: int = 0, timeline: Timeline | None = None, has_vllm_engine: bool = False
) -> AsyncIterator[RunningScheduler]:
    """A scheduler; on a free port if `port` is 0. With `has_vllm_engine` it also serves VllmEngine and its events."""
    engine = Engine(config=config)
    events = start_kv_events(engine)
    epoch = time.time_ns()
    groups = WorkerGroups(config=config, engine=engine, session_epoch=epoch, timeline=timeline)
    state = SchedulerState(session_epoch=epoch, engine=engine, groups=groups)
    server = RpcServer(services=("pagoda.v1.Scheduler",))
    servicer = SchedulerServicer(engine=engine, groups=groups, state=state, version="test")
    scheduler_pb2_grpc.add_SchedulerServicer_to_server(servicer, server.grpc_server)
    if has_vllm_engine:
        from pagoda_scheduler.vllm_engine.servicer import add_vllm_engine  # an extra

        add_vllm_engine(server.grpc_server, engine=engine, state=state)
    bound = await server.start(host="127.0.0.1", port=port)
    address = f"127.0.0.1:{bound}"
    async with connect(address) as channel:
        yield RunningScheduler(address, engine, scheduler_pb2_grpc.SchedulerStub(channel))
    await groups.close()
    if events is not None:
        events.close()
    await server.stop(grace_s=0)
