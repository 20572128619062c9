"""Health says what is possible: of a worker that a signal has stopped, and no one starts again, on every service."""

import asyncio
import signal
from collections.abc import AsyncIterator

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagoda_common.rpc.service import connect
from tests.process.deployment import Deployment
from tests.process.stack import get_status

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
async def running() -> AsyncIterator[Deployment]:
    running = Deployment()
    try:
        for name in ("scheduler", "worker", "frontend-0"):
            running.start(name)
        await running.ready("frontend-0")
        yield running
    finally:
        running.end()


async def test_a_stopped_worker_turns_readiness_false_and_its_return_turns_it_true(running: Deployment) -> None:
    worker = running.processes["worker"]
    url = running.urls["frontend-0"]
    async with connect(running.scheduler) as channel, asyncio.timeout(240):
        stub = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="pagoda.v1.Scheduler"))
        while (await watch.read()).status != SERVING:
            pass
        worker.signal(signal.SIGSTOP)
        assert (await watch.read()).status == NOT_SERVING
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == NOT_SERVING
        while await asyncio.to_thread(get_status, f"{url}/ready") != 503:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        assert await asyncio.to_thread(get_status, f"{url}/health") == 200
        worker.signal(signal.SIGCONT)
        assert (await watch.read()).status == SERVING
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == SERVING
        await running.ready("frontend-0")
        watch.cancel()
