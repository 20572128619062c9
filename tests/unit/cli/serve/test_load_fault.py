"""A worker that is registered and no more, in two polls in a row, cannot load the model."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest

from pagoda.server import load_fault
from pagoda.v1 import scheduler_pb2, types_pb2
from pagoda_common.config.security_config import SecurityConfig


def state(*workers: str, is_ready: bool = False) -> scheduler_pb2.GetStateResponse:
    found = scheduler_pb2.GetStateResponse(
        load=types_pb2.EngineLoad(is_ready=is_ready, not_ready_reason="no such file")
    )
    for name in workers:
        found.workers.add(state=name)
    return found


AWAY = grpc.aio.AioRpcError(
    grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), details="away", debug_error_string=""
)


async def polls_until_fault(monkeypatch: pytest.MonkeyPatch, answers: list[Any]) -> int | None:
    """Polls after which the fault is found; None when `answers` end before."""
    num_polls = 0

    class Stub:
        def __init__(self, _: object) -> None:
            """Of no channel."""

        async def GetState(self, _: object, *, timeout: float) -> scheduler_pb2.GetStateResponse:
            nonlocal num_polls
            assert timeout == load_fault.RPC_TIMEOUT_S
            if num_polls == len(answers):
                raise asyncio.CancelledError
            answer = answers[num_polls]
            num_polls += 1
            if isinstance(answer, Exception):
                raise answer
            found: scheduler_pb2.GetStateResponse = answer
            return found

    @contextlib.asynccontextmanager
    async def connect(address: str, *, security: SecurityConfig) -> AsyncIterator[None]:
        assert address == "127.0.0.1:1"
        yield None

    async def sleep(seconds: float) -> None:
        assert seconds == 0.25

    monkeypatch.setattr(load_fault, "connect", connect)
    monkeypatch.setattr(load_fault.asyncio, "sleep", sleep)
    monkeypatch.setattr(load_fault.scheduler_pb2_grpc, "SchedulerStub", Stub)
    try:
        reason = await load_fault.find_load_fault("127.0.0.1:1", security=SecurityConfig())
    except asyncio.CancelledError:
        return None
    assert reason == "no such file"
    return num_polls


IDLE, LOADING = state("registered"), state("loading")


@pytest.mark.parametrize(
    ("answers", "num_polls"),
    [
        ([IDLE, IDLE], 2),
        ([LOADING, IDLE, IDLE], 3),
        ([IDLE, LOADING, IDLE, LOADING], None),
        ([IDLE, AWAY, IDLE], 3),
        ([state(), state(), state()], None),
        ([state("ready", "registered")] * 2, 2),
        ([state("ready", "registered", is_ready=True)] * 5, None),
        ([IDLE, state("registered", is_ready=True), IDLE, IDLE], 4),
    ],
)
async def test_two_polls_in_a_row_find_a_fault(
    answers: list[Any], num_polls: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await polls_until_fault(monkeypatch, answers) == num_polls


@pytest.mark.parametrize(
    ("answer", "reason"),
    [(state(is_ready=True), None), (state("loading"), "no such file"), (AWAY, "")],
)
async def test_why_an_engine_is_not_ready(answer: Any, reason: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    security = SecurityConfig()
    asked: list[Any] = []

    class Stub:
        def __init__(self, channel: Any) -> None:
            asked.append(channel)

        async def GetState(self, _: object, *, timeout: float) -> Any:
            asked.append(timeout)
            if isinstance(answer, Exception):
                raise answer
            return answer

    @contextlib.asynccontextmanager
    async def connect(address: str, *, security: SecurityConfig) -> AsyncIterator[Any]:
        yield address, security

    monkeypatch.setattr(load_fault, "connect", connect)
    monkeypatch.setattr(load_fault.scheduler_pb2_grpc, "SchedulerStub", Stub)
    assert await load_fault.not_ready_reason("127.0.0.1:1", security=security) == reason
    assert asked == [("127.0.0.1:1", security), 5.0]
