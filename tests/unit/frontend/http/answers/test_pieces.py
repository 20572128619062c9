"""Large bodies go to the server in pieces, whole and in order, and nothing comes between them."""

import asyncio
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from pagoda_frontend.http.answers.pieces import PIECE_BYTES, SendInPieces

SCOPE: Scope = {"type": "http"}


async def sent_by(*messages: Message, scope: Scope = SCOPE) -> list[Message]:
    sent: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.gather(*(send(message) for message in messages))

    async def send(message: Message) -> None:
        sent.append(message)
        await asyncio.sleep(0)

    async def receive() -> Any:
        raise AssertionError

    await SendInPieces(app)(scope, receive, send)
    return sent


def body(content: bytes, **more: Any) -> Message:
    return {"type": "http.response.body", "body": content, **more}


@pytest.mark.parametrize("has_more", [False, True])
async def test_a_large_body_is_sent_in_pieces(has_more: bool) -> None:
    content = bytes(range(256)) * 700
    sent = await sent_by(body(content, more_body=has_more))
    assert b"".join(message["body"] for message in sent) == content
    assert [len(message["body"]) for message in sent] == [PIECE_BYTES, PIECE_BYTES, len(content) - 2 * PIECE_BYTES]
    assert [message["more_body"] for message in sent] == [True, True, has_more]


async def test_what_is_small_is_passed_on_as_it_is() -> None:
    messages = [{"type": "http.response.start", "status": 200}, body(b"a" * PIECE_BYTES), body(b"")]
    assert await sent_by(*messages) == messages
    large = body(b"a" * 2 * PIECE_BYTES)
    assert await sent_by(large, scope={"type": "lifespan"}) == [large]


async def test_nothing_comes_between_the_pieces() -> None:
    sent = await sent_by(body(b"a" * 3 * PIECE_BYTES, more_body=True), body(b": keep-alive", more_body=True))
    assert [message["body"][:1] for message in sent] == [b"a", b"a", b"a", b":"]
