"""Two frontends, a scheduler and a worker as processes of their own, to replace and kill one by one."""

import asyncio
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagoda_common.process.children import free_port
from pagoda_common.rpc.service import connect
from tests.process.stack import Process, get_status

SERVING = health_pb2.HealthCheckResponse.SERVING
DRAIN_S = 1.0
"""Short: what is left has to be handed over."""


class Deployment:
    """Two frontends, a scheduler, a worker: processes of their own, which no one starts again."""

    def __init__(self, *frontend_flags: str) -> None:
        self.scheduler = f"127.0.0.1:{free_port()}"
        self.processes: dict[str, Process] = {}
        self.urls: dict[str, str] = {}
        """Of the frontends that have been ready, by name: a load balancer asks them."""
        self.starting: dict[str, str] = {}
        self._frontend_flags = frontend_flags
        self._retired: list[Process] = []

    def start(self, name: str) -> None:
        """Start frontend-0, frontend-1, scheduler or worker; in the place of one that has ended, where there is one."""
        if name in self.processes:
            self._retired.append(self.processes[name])
        argv = [f"--scheduler={self.scheduler}", "--host=127.0.0.1", f"--drain-timeout={DRAIN_S}"]
        if name.startswith("frontend"):
            port = free_port()
            self.starting[name] = f"http://127.0.0.1:{port}"
            argv = [argv[0], "--drain-timeout=600", f"--port={port}", "--grpc-port=0", *self._frontend_flags]
        elif name == "scheduler":
            argv = [*argv[1:], f"--port={self.scheduler.rpartition(':')[2]}"]
        self.processes[name] = Process("-m", f"pagoda_{name.partition('-')[0]}", *argv)

    async def ready(self, name: str) -> None:
        """Wait until a frontend is."""
        async with asyncio.timeout(240):
            url = self.starting.get(name) or self.urls[name]
            while await asyncio.to_thread(get_status, f"{url}/ready") != 200:
                assert self.processes[name].popen.poll() is None, self.log
                await asyncio.sleep(0.1)
        self.urls[name] = url
        self.starting.pop(name, None)

    async def replace(self, name: str) -> None:
        """SIGTERM, wait for the end, start another and wait until it serves."""
        process = self.processes[name]
        process.signal(signal.SIGTERM)
        if name.startswith("frontend"):
            async with asyncio.timeout(240):
                while await asyncio.to_thread(get_status, f"{self.urls[name]}/ready") == 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
        assert await asyncio.to_thread(process.wait) == 0, self.log
        self.start(name)
        if name.startswith("frontend"):
            await self.ready(name)
        else:
            await self.engine_serves()

    async def engine_serves(self) -> None:
        """Wait until the scheduler says so: a frontend stays ready meanwhile."""
        async with connect(self.scheduler) as channel, asyncio.timeout(240):
            stub = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest()
            while (await stub.Check(request, wait_for_ready=True)).status != SERVING:  # noqa: ASYNC110
                await asyncio.sleep(0.1)

    @property
    def log(self) -> str:
        """The end of all logs."""
        return "\n".join(f"--- {name}\n{process.log[-2500:]}" for name, process in self.processes.items())

    @property
    def all_logs(self) -> str:
        """Everything that any process has printed."""
        return "\n".join(process.log for process in (*self.processes.values(), *self._retired))

    def end(self) -> None:
        """Kill what is left."""
        for process in (*self.processes.values(), *self._retired):
            process.end()


@asynccontextmanager
async def deployment(*frontend_flags: str) -> AsyncGenerator[Deployment]:
    """One whose frontends are ready."""
    running = Deployment(*frontend_flags)
    try:
        for name in ("scheduler", "worker", "frontend-0", "frontend-1"):
            running.start(name)
        for name in ("frontend-0", "frontend-1"):
            await running.ready(name)
        yield running
    finally:
        running.end()
