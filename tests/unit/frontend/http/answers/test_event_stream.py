"""An answer of events: a fault of sending is raised, and what was sent counts for the pings."""

import asyncio
import itertools
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from pagoda_frontend.http.answers import sse
from pagoda_frontend.http.answers.sse import EventStream


async def events() -> AsyncGenerator[bytes]:
    for number in range(3):
        yield b"data: %d\n\n" % number


async def receive() -> Any:
    await asyncio.Event().wait()


async def test_a_fault_of_sending_is_raised() -> None:
    async def send(message: Any) -> None:
        raise OSError("no connection")

    with pytest.raises(OSError, match="no connection"):
        await EventStream(events(), request_id="a", keep_alive_s=0.0)({}, receive, send)


async def test_silence_begins_with_the_last_event(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    ticks = itertools.count(1)
    monkeypatch.setattr(sse, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))
    stream = EventStream(events(), request_id="a", keep_alive_s=1000.0)
    await stream({}, receive, send)
    assert b"".join(sent) == b"data: 0\n\ndata: 1\n\ndata: 2\n\n"
    assert stream._last_sent_s >= 3.0, "later than the head, by an event or two"
