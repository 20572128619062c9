"""Messages over gRPC that begin and do not end are given up, before one has a key and after, and honest calls go on."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from pagoda.v1 import inference_pb2, inference_pb2_grpc
from pagoda_common.rpc import arrival
from tests.fakes.fake_scheduler import FakeScheduler
from tests.harness.raw_http2 import END_HEADERS, END_STREAM, HEADERS, RawConnection, call_headers, frame
from tests.service.frontend.harness import Running, running_frontend, until

UNARY, STREAM = "/pagoda.v1.Inference/GenerateUnary", "/pagoda.v1.Inference/Generate"


@pytest.fixture
async def attacker(frontend: Running) -> AsyncIterator[RawConnection]:
    connection = await asyncio.to_thread(RawConnection, frontend.server.grpc_port)
    yield connection
    connection.close()


async def begin(attacker: RawConnection, numbers: list[int], path: str = UNARY) -> None:
    """Half a message on each stream."""
    for number in numbers:
        await asyncio.to_thread(attacker.begin_message, number, path, size=40_000, num_bytes=1000)


async def is_served(running: Running) -> bool:
    stub = inference_pb2_grpc.InferenceStub(running.channel)
    return bool((await stub.GenerateUnary(inference_pb2.GenerateRequest(text="x"))).outputs)


@pytest.mark.parametrize("path", [UNARY, STREAM])
async def test_a_message_that_does_not_end_is_given_up(
    frontend: Running, attacker: RawConnection, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrival, "LATE_S", 0.01)
    monkeypatch.setattr(arrival, "LIMIT_S", 0.1)
    await begin(attacker, [1, 3], path)
    await until(lambda: attacker.ended == {1, 3})
    assert frontend.server._rpc.arrivals.num_late == 0
    assert not attacker.is_closed
    assert await is_served(frontend)


async def test_only_so_many_messages_may_be_late(
    frontend: Running, attacker: RawConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrival, "LATE_S", 0.01)
    monkeypatch.setattr(arrival, "LIMIT_S", 1000.0)
    monkeypatch.setattr(arrival, "MAX_LATE_EACH", 2)
    await begin(attacker, [1, 3, 5, 7])
    await until(lambda: len(attacker.ended) == 2)
    assert frontend.server._rpc.arrivals.num_late == 2
    assert await is_served(frontend)
    attacker.close()
    await until(lambda: frontend.server._rpc.arrivals.num_late == 0)


async def test_without_a_key_no_message_is_awaited() -> None:
    async with running_frontend(FakeScheduler(), api_key=("secret",)) as keyed:
        attacker = await asyncio.to_thread(RawConnection, keyed.server.grpc_port)
        await begin(attacker, [1])
        await until(lambda: attacker.ended == {1})
        await begin(attacker, [3], STREAM)
        await until(lambda: attacker.ended == {1, 3})
        assert keyed.server._rpc.arrivals.num_late == 0
        attacker.close()


async def test_a_call_without_a_message_is_refused(frontend: Running, attacker: RawConnection) -> None:
    attacker.send(frame(HEADERS, END_HEADERS | END_STREAM, 1, call_headers(UNARY)))
    await until(lambda: attacker.ended == {1})

    async def nothing() -> AsyncIterator[bytes]:
        return
        yield b""

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await frontend.channel.stream_unary(UNARY)(nothing())
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
