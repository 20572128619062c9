"""Health needs no key: what it keeps of its calls is small, and it awaits no message."""

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagoda_common.rpc import arrival
from pagoda_common.rpc.bounded_health import MAX_NAME_CHARS
from tests.harness.raw_http2 import RawConnection
from tests.service.frontend.harness import Running, until

CHECK = "/grpc.health.v1.Health/Check"


async def test_a_long_name_is_refused(frontend: Running) -> None:
    stub = health_pb2_grpc.HealthStub(frontend.channel)
    for size, code in ((MAX_NAME_CHARS, grpc.StatusCode.NOT_FOUND), (MAX_NAME_CHARS + 1, None)):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(health_pb2.HealthCheckRequest(service="n" * size))
        assert caught.value.code() is (code or grpc.StatusCode.INVALID_ARGUMENT)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in stub.Watch(health_pb2.HealthCheckRequest(service="n" * 300)):
            pass
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "service has 300 characters, at most 256 are allowed" in (caught.value.details() or "")


async def test_a_watch_of_an_unknown_service_waits_for_it(frontend: Running) -> None:
    stub = health_pb2_grpc.HealthStub(frontend.channel)
    watch = stub.Watch(health_pb2.HealthCheckRequest(service="n" * MAX_NAME_CHARS))
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    watch.cancel()


async def test_half_a_message_is_not_awaited(frontend: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrival, "LATE_S", 0.01)
    monkeypatch.setattr(arrival, "LIMIT_S", 1000.0)
    attacker = await asyncio.to_thread(RawConnection, frontend.server.grpc_port)
    await asyncio.to_thread(attacker.begin_message, 1, CHECK, size=40_000, num_bytes=1000)
    await until(lambda: attacker.ended == {1})
    assert frontend.server._rpc.arrivals.num_late == 0
    attacker.close()
