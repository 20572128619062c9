"""A stack to break: Pagoda's processes under their supervisor in this process, with a proxy in every connection."""

import asyncio
import collections
import os
import signal
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

import grpc.aio

from pagoda.v1 import scheduler_pb2, scheduler_pb2_grpc
from pagoda_common.config.flags.flags import frontend_config_to_argv
from pagoda_common.config.frontend_config import FrontendConfig
from pagoda_common.process.children import free_port, service_command
from pagoda_common.process.supervisor import Child, RestartPolicy, Service, Supervisor
from pagoda_common.rpc.service import connect
from tests.process.stack import WAIT_S, get_status
from tests.process.tcp_proxy import TcpProxy

HOST = "127.0.0.1"
NUM_TAIL_LINES = 400
POLL_S = 0.05
POLICY = RestartPolicy(healthy_after_s=0.5)
"""What dies here was killed: a process that came up at all has not failed, however soon the next round kills it."""


class ChaosStack:
    """Frontend, scheduler and workers, and the links between them:

    session (frontend to scheduler), registration (workers to scheduler), execute (scheduler to workers).
    """

    def __init__(self, *, num_workers: int = 1, scheduler_flags: Sequence[str] = ()) -> None:
        """`scheduler_flags`: such as --num-gpu-blocks-override=64."""
        port, grpc_port, self._scheduler_port = free_port(), free_port(), free_port()
        worker_ports = [free_port() for _ in range(num_workers)]
        self.url = f"http://{HOST}:{port}"
        self.links: dict[str, list[TcpProxy]] = {
            "session": [TcpProxy(target_port=self._scheduler_port)],
            "registration": [TcpProxy(target_port=self._scheduler_port) for _ in worker_ports],
            "execute": [TcpProxy(target_port=worker_port) for worker_port in worker_ports],
        }
        self.workers = [f"worker-{number}" for number in range(num_workers)]
        self._ports = (port, grpc_port, worker_ports)
        self._scheduler_flags = scheduler_flags
        self.num_tracebacks = 0
        """In all that the services have printed: a loss is no bug, and is not to look like one."""
        self._lines: collections.deque[str] = collections.deque(maxlen=NUM_TAIL_LINES)
        self._children: dict[str, Child] = {}
        self._running: asyncio.Task[int] | None = None

    @asynccontextmanager
    async def run(self) -> AsyncGenerator[None, None]:
        """Start everything, wait until it serves, and end it at last."""
        for link in self.links.values():
            for proxy in link:
                await proxy.start()
        supervisor = Supervisor(services=self._services(), output=self._take_line, policy=POLICY)
        self._children = {child.service.name: child for child in supervisor.children}
        self._running = asyncio.create_task(supervisor.run())
        try:
            async with connect(f"{HOST}:{self._scheduler_port}") as self._channel:
                await self.settle({})
                yield
        finally:
            supervisor.kill(0)
            await self._running
            for link in self.links.values():
                for proxy in link:
                    await proxy.close()

    def _services(self) -> list[Service]:
        port, grpc_port, worker_ports = self._ports
        frontend = FrontendConfig(
            host=HOST,
            port=port,
            grpc_port=grpc_port,
            scheduler=f"{HOST}:{self.links['session'][0].port}",
            disable_uvicorn_access_log=True,
        )
        listen = [f"--host={HOST}", f"--port={self._scheduler_port}"]
        commands = {
            "frontend": service_command("pagoda_frontend", frontend_config_to_argv(frontend)),
            "scheduler": service_command("pagoda_scheduler", [*listen, *self._scheduler_flags]),
        }
        links = zip(self.workers, worker_ports, self.links["registration"], self.links["execute"], strict=True)
        for name, worker_port, registration, execute in links:
            argv = [
                f"--scheduler={HOST}:{registration.port}",
                f"--host={HOST}",
                f"--port={worker_port}",
                f"--advertise-address={HOST}:{execute.port}",
            ]
            commands[name] = service_command("pagoda_worker", argv)
        return [Service(name=name, command=tuple(command)) for name, command in commands.items()]

    def _take_line(self, service: str, line: str) -> None:
        self.num_tracebacks += "Traceback" in line
        self._lines.append(f"{time.strftime('%H:%M:%S')} {service:<9} | {line}")

    @property
    def log(self) -> str:
        """The last lines of all services."""
        return "\n".join(self._lines)

    def pid(self, name: str) -> int | None:
        """Of the process of now; None while there is none."""
        process = self._children[name].process
        return process.pid if process is not None and process.returncode is None else None

    def send_signal(self, name: str, number: signal.Signals) -> None:
        """To the process of now, which must be there."""
        pid = self.pid(name)
        assert pid is not None, f"{name} does not run"
        os.kill(pid, number)

    def drop(self, link: str) -> int:
        """Reset the connections of a link; returns how many."""
        return sum(proxy.drop() for proxy in self.links[link])

    async def settle(self, replaced: dict[str, int | None]) -> None:
        """Wait until all is as it was before: everything serves, no request is open, every block is free.

        Args:
            replaced: names and former pids of processes that must be others now.

        Raises:
            AssertionError: it does not get so far; the message says what is missing.
        """
        deadline = time.monotonic() + WAIT_S
        while reason := await self._unsettled(replaced):
            assert not (self._running and self._running.done()), f"the stack has ended\n{self.log}"
            assert time.monotonic() < deadline, f"not settled after {WAIT_S:g} s: {reason}"
            await asyncio.sleep(POLL_S)

    async def _unsettled(self, replaced: dict[str, int | None]) -> str:
        for name, child in self._children.items():
            if child.process is None or child.process.returncode is not None:
                return f"{name} does not run"
            if replaced.get(name) == child.process.pid:
                return f"{name} was not replaced"
        try:
            stub = scheduler_pb2_grpc.SchedulerStub(self._channel)
            state = await stub.GetState(scheduler_pb2.GetStateRequest(), timeout=240)
        except grpc.aio.AioRpcError as error:
            return f"the scheduler does not answer: {error.details()}"
        num_serving = sum(worker.state == "serving" for worker in state.workers)
        if num_serving != len(self.workers):
            return f"{num_serving} of {len(self.workers)} workers serve"
        if state.sequences:
            return f"open sequences: {[f'{one.request_id} {one.status}' for one in state.sequences]}"
        if state.load.num_used_blocks:
            return f"{state.load.num_used_blocks} blocks are not free"
        status = await asyncio.to_thread(get_status, f"{self.url}/ready")
        return "" if status == 200 else f"/ready answers {status}"
