"""What a session tells the scheduler of what it has taken."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
import pytest_asyncio

from pagoda.v1 import scheduler_pb2
from pagoda_common.engine import session as engine_session
from pagoda_common.engine.session import ACK_BYTES, ACK_EVERY, EngineSession


class FakeCall:
    """A Session call: the test says what comes, and reads what was written."""

    def __init__(self) -> None:
        self.incoming: asyncio.Queue[scheduler_pb2.SchedulerMessage] = asyncio.Queue()
        self.acknowledged: list[int] = []
        hello = scheduler_pb2.SchedulerHello(takes_acknowledgements=True)
        self.incoming.put_nowait(scheduler_pb2.SchedulerMessage(session_epoch=1, hello=hello))

    async def read(self) -> scheduler_pb2.SchedulerMessage:
        return await self.incoming.get()

    async def write(self, message: scheduler_pb2.FrontendMessage) -> None:
        if message.HasField("acknowledgement"):
            self.acknowledged.append(message.acknowledgement.num_messages)

    def cancel(self) -> None:
        """It has no other end."""

    async def take(self, *messages: scheduler_pb2.SchedulerMessage) -> list[int]:
        """Let the session take these; what it has acknowledged so far."""
        for message in messages:
            self.incoming.put_nowait(message)
        for _ in range(10 + 2 * len(messages)):
            await asyncio.sleep(0)
        assert self.incoming.empty()
        return self.acknowledged


class FakeStub:
    def __init__(self) -> None:
        self.call = FakeCall()

    def Session(self) -> FakeCall:
        return self.call


@pytest_asyncio.fixture
async def call() -> AsyncIterator[FakeCall]:
    stub = FakeStub()
    session = EngineSession(
        stub=cast("Any", stub), frontend_id="f", streams={}, on_open=lambda _: None, on_state=lambda _: None
    )
    task = asyncio.create_task(session.run())
    yield stub.call
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def step(num_bytes: int = 0) -> scheduler_pb2.SchedulerMessage:
    message = scheduler_pb2.SchedulerMessage(session_epoch=1, step=1)
    if num_bytes:
        message.finished.add(slot=99, embedding=bytes(num_bytes))
    return message


async def test_many_messages_are_acknowledged_together(call: FakeCall) -> None:
    assert await call.take(*[step()] * (ACK_EVERY - 2)) == []  # the hello is one
    assert await call.take(step()) == [ACK_EVERY]
    assert await call.take(*[step()] * (ACK_EVERY + 1)) == [ACK_EVERY, 2 * ACK_EVERY]


async def test_large_ones_are_acknowledged_sooner(call: FakeCall) -> None:
    assert await call.take(step(ACK_BYTES // 2)) == []
    assert await call.take(step(ACK_BYTES // 2)) == [3]
    assert await call.take(step(ACK_BYTES // 2)) == [3]
    assert await call.take(step(2 * ACK_BYTES)) == [3, 5]


async def test_the_last_ones_are_acknowledged_a_little_later(call: FakeCall, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_session, "ACK_DELAY_S", 0.0)
    assert await call.take(step(ACK_BYTES)) == [2]
    assert await call.take(step()) == [2, 3]


async def test_one_timer_acknowledges_all_that_came_meanwhile(call: FakeCall, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, timers = asyncio.get_running_loop(), list[Any]()
    monkeypatch.setattr(loop, "call_later", lambda delay, call: timers.append(call) or asyncio.Handle(call, (), loop))
    monkeypatch.setattr(engine_session, "ACK_DELAY_S", 3600.0)
    await call.take(step(ACK_BYTES))  # ends the timer that was there, if there was one
    timers.clear()
    for _ in range(3):
        await call.take(step())
    assert len(timers) == 1
    timers[0]()
    assert await call.take(step()) == [2, 5]
    assert len(timers) == 2, "and the next one for what comes then"
