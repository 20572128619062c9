"""A scheduler process with fake workers, and a session to it: what benchmarks of the engine alone start."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import psutil

from pagoda.v1 import scheduler_pb2, scheduler_pb2_grpc
from pagoda_common.engine.client import EngineClient
from pagoda_common.process.children import free_port, spawn_service, stop_process
from pagoda_common.rpc.service import connect

QUIET = {"PAGODA_LOG_LEVEL": "error"}
READY_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class FakeEngine:
    """Its session and processes."""

    client: EngineClient
    scheduler: psutil.Process
    workers: list[psutil.Process]
    stub: "scheduler_pb2_grpc.SchedulerAsyncStub"

    async def counters(self) -> tuple[int, int]:
        """Tokens looked up in the prefix caches so far, and tokens found there."""
        load = await self.stub.GetLoad(scheduler_pb2.GetLoadRequest(), timeout=10)
        return load.prefix_cache_queries, load.prefix_cache_hits


@asynccontextmanager
async def fake_engine(
    flags: Sequence[str] = (), *, worker_flags: Sequence[str] = (), num_workers: int = 1
) -> AsyncIterator[FakeEngine]:
    """Start a scheduler with `flags` and workers with `worker_flags`; ready when every worker serves."""
    port = free_port()
    address = f"127.0.0.1:{port}"
    scheduler = spawn_service("pagoda_scheduler", ["--port", str(port), *flags], env=QUIET)
    command = ["--scheduler", address, *worker_flags]
    workers = [spawn_service("benchmarks.tools.fake_worker", command, env=QUIET) for _ in range(num_workers)]
    client = EngineClient(address=address)
    try:
        async with connect(address) as channel:
            stub = scheduler_pb2_grpc.SchedulerStub(channel)
            await client.start()
            await client.wait_until_ready(READY_TIMEOUT_S)
            async with asyncio.timeout(READY_TIMEOUT_S):
                while client.load.num_groups < num_workers:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            yield FakeEngine(
                client, psutil.Process(scheduler.pid), [psutil.Process(worker.pid) for worker in workers], stub
            )
    finally:
        await client.close()
        for process in (scheduler, *workers):
            await asyncio.to_thread(stop_process, process, timeout_s=5)
