"""Every service is ended by SIGTERM and replaced, one after the other, under streams: nothing is lost."""

import asyncio
import itertools
import random
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import aiohttp
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagoda_common.process.children import free_port
from pagoda_common.rpc.service import connect
from tests.process.chaos_clients import LINE_BYTES, Progress, read
from tests.process.chaos_requests import ChaosRequest, make_requests
from tests.process.stack import Process, get_status
from tests.process.transcript import Transcript, differences

SERVING = health_pb2.HealthCheckResponse.SERVING
NUM_STREAMS = 16
DRAIN_S = 1.0
"""Short: what is left has to be handed over."""
REFUSED = aiohttp.ClientConnectionError
"""Before an answer has begun: nothing of it was seen."""


class Deployment:
    """Two frontends, a scheduler, a worker: processes of their own, which no one starts again."""

    def __init__(self) -> None:
        self.scheduler = f"127.0.0.1:{free_port()}"
        self.processes: dict[str, Process] = {}
        self.urls: dict[str, str] = {}
        """Of the frontends that have been ready, by name: a load balancer asks them."""
        self.starting: dict[str, str] = {}
        self._retired: list[Process] = []

    def start(self, name: str) -> None:
        """Start frontend-0, frontend-1, scheduler or worker; in the place of one that has ended, where there is one."""
        if name in self.processes:
            self._retired.append(self.processes[name])
        argv = [f"--scheduler={self.scheduler}", "--host=127.0.0.1", f"--drain-timeout={DRAIN_S}"]
        if name.startswith("frontend"):
            port = free_port()
            self.starting[name] = f"http://127.0.0.1:{port}"
            argv = [argv[0], "--drain-timeout=600", f"--port={port}", "--grpc-port=0"]
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
async def deployment() -> AsyncGenerator[Deployment]:
    running = Deployment()
    try:
        for name in ("scheduler", "worker", "frontend-0", "frontend-1"):
            running.start(name)
        for name in ("frontend-0", "frontend-1"):
            await running.ready(name)
        yield running
    finally:
        running.end()


async def stream(http: aiohttp.ClientSession, running: Deployment, request: ChaosRequest) -> Transcript:
    """One answer. As a load balancer does: a replica that refuses the request is passed over for the other."""
    for name in itertools.islice(itertools.cycle(random.sample(sorted(running.urls), 2)), 600):
        transcript = Transcript(times=[0.0])
        try:
            response = await http.post(f"{running.urls[name]}{request.path}", json=request.body)
        except REFUSED:
            await asyncio.sleep(0.05)
            continue
        async with response:
            if response.status == 503 and "shutting down" in await response.text():
                await asyncio.sleep(0.05)
                continue
            assert response.status == 200, await response.text()
            await read(response, transcript, Progress())
        return transcript
    raise AssertionError("no replica takes a request")


async def test_every_service_is_replaced_under_streams_and_every_answer_is_whole() -> None:
    requests = make_requests(NUM_STREAMS, seed=3)
    async with (
        deployment() as running,
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True), read_bufsize=LINE_BYTES
        ) as http,
    ):
        expected = await asyncio.gather(*(stream(http, running, request) for request in requests))
        is_over = False
        num_answers = 0

        async def client(number: int) -> None:
            nonlocal num_answers
            while not is_over:
                got = await stream(http, running, requests[number])
                faults = [*got.own_faults(), *differences(expected[number], got)]
                assert faults == [], f"{requests[number]}\n{running.log}"
                num_answers += 1

        async def roll() -> None:
            nonlocal is_over
            for name in ("frontend-1", "worker", "scheduler"):
                await running.replace(name)
            is_over = True

        async with asyncio.TaskGroup() as tasks:
            for number in range(NUM_STREAMS):
                tasks.create_task(client(number))
            tasks.create_task(roll())
        assert num_answers >= NUM_STREAMS
        assert "Traceback" not in running.all_logs
        assert "sequences will be recomputed" in running.all_logs, "nothing had to be handed over"
