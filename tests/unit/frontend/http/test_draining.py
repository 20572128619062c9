"""What a call that a closing server gives up is told: 503 before its answer has begun, nothing after that."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagoda_frontend.budget.held_memory import HeldMemory
from pagoda_frontend.http.draining import CountCalls
from pagoda_frontend.serving.serving import Serving

SCOPE: Scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
HEAD: Message = {"type": "http.response.start", "status": 200, "headers": []}


class FakeServing:
    """What `CountCalls` asks of `Serving`."""

    not_ready_reason = "the frontend is shutting down"

    def __init__(self, *, is_draining: bool) -> None:
        self.is_draining = is_draining
        self.held_memory = HeldMemory(max_bytes=100)
        self.num_calls = 0

    def begin_call(self) -> None:
        self.num_calls += 1

    def end_call(self) -> None:
        self.num_calls -= 1


def given_up(*sent: Message) -> ASGIApp:
    """An app that sends some messages and is then cancelled."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for message in sent:
            await send(message)
        raise asyncio.CancelledError

    return app


async def call(app: ASGIApp, serving: FakeServing, sent: list[Message]) -> None:
    async def send(message: Message) -> None:
        sent.append(message)

    never = cast("Callable[[], Any]", asyncio.Event().wait)
    try:
        await CountCalls(app, serving=cast("Serving", serving))(dict(SCOPE), never, send)
    finally:
        assert serving.num_calls == 0


async def test_a_call_whose_answer_has_not_begun_gets_503_from_a_draining_server() -> None:
    sent: list[Message] = []
    await call(given_up(), FakeServing(is_draining=True), sent)
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert sent[0]["status"] == 503
    assert b"shutting down" in sent[1]["body"]


@pytest.mark.parametrize(("has_begun", "is_draining"), [(True, True), (True, False), (False, False)])
async def test_a_call_is_cancelled_when_its_answer_has_begun_or_no_one_drains(
    has_begun: bool, is_draining: bool
) -> None:
    sent: list[Message] = []
    before = [HEAD] if has_begun else []
    with pytest.raises(asyncio.CancelledError):
        await call(given_up(*before), FakeServing(is_draining=is_draining), sent)
    assert sent == before, "a second head would follow the first"
