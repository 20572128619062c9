"""What comes of bodies that are slow, or that are mostly no content, and of connections that ask for too much."""

import asyncio

import pytest

from pagoda_frontend.http.connection import body_watch, http_protocol, lingering
from tests.service.frontend.harness import Running, running_frontend, until

GET_HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
BODY = b'{"prompt": [5], "max_tokens": 1}'


async def raw(running: Running, *parts: bytes) -> bytes:
    """What the server answers to bytes on a connection until it ends it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", running.server.port)
    answer = b""
    try:
        async with asyncio.timeout(240):
            for part in parts:
                writer.write(part)
                await writer.drain()
            while piece := await reader.read(65536):
                answer += piece
    finally:
        writer.close()
    return answer


@pytest.mark.parametrize("head", [CHUNKED + b"400\r\n{", POST + b"Content-Length: 1000\r\n\r\n{"])
async def test_bodies_that_do_not_come_get_408(head: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_watch, "GRACE_S", 0.2)
    monkeypatch.setattr(http_protocol, "GRACE_S", 0.2)
    async with running_frontend() as running:
        answer = await raw(running, head)
        assert answer.startswith(b"HTTP/1.1 408 "), answer
        assert b"bytes per second" in answer
        assert running.server.serving.held_memory.num_bytes == 0
        assert (await running.post("/v1/completions", {"prompt": [5], "max_tokens": 1})).status_code == 200


@pytest.mark.parametrize(
    "rest",
    [
        b"20\r\n" + BODY + b"\r\n0\r\nA: " + b"x" * 200_000,
        b"20\r\n" + BODY + b"\r\n0\r\n" + b"A: x\r\n" * 20_000,
        b"20;" + b"x" * 200_000,
        b"1\r\n \r\n" * 40_000,
    ],
    ids=["trailer", "trailers", "extension", "tiny chunks"],
)
async def test_what_is_no_content_of_a_chunked_body_is_bounded(rest: bytes) -> None:
    async with running_frontend() as running:
        answer = await raw(running, CHUNKED + rest)
        assert answer[:13] in (b"HTTP/1.1 431 ", b"HTTP/1.1 400 "), answer[:300]
        assert not running.fake.submits


async def test_a_chunked_body_with_a_trailer_is_read() -> None:
    async with running_frontend(keep_alive_timeout_s=1) as running:
        answer = await raw(running, CHUNKED + b"20\r\n" + BODY + b"\r\n0\r\nA: b\r\n\r\n", GET_HEALTH)
        assert answer.count(b"HTTP/1.1 200 OK") == 2, answer


async def test_requests_that_wait_on_a_connection_are_bounded() -> None:
    async with running_frontend(keep_alive_timeout_s=1) as running:
        assert (await raw(running, GET_HEALTH * 50)).count(b"HTTP/1.1 200 OK") == 50
        answer = await raw(running, GET_HEALTH * 5000)
        assert answer.count(b"HTTP/1.1 200 OK") < 5000
        assert b"pipelined requests wait on this connection" in answer


async def test_large_heads_are_held_with_what_else_is() -> None:
    async with running_frontend() as running:
        memory = running.server.serving.held_memory
        memory._max_bytes = 400_000
        _, writer = await asyncio.open_connection("127.0.0.1", running.server.port)
        writer.write(b"GET /health HTTP/1.1\r\nA: " + b"x" * 190_000)
        await until(lambda: memory.num_bytes > 100_000)
        answer = await raw(running, b"GET /health HTTP/1.1\r\nA: " + b"x" * 190_000)
        assert answer.startswith(b"HTTP/1.1 503 "), answer
        assert b"retry-after" in answer
        writer.close()
        await until(lambda: memory.num_bytes == 0)


NOT_FOUND = b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 9000000\r\n\r\n{"
NO_HTTP = b"nonsense\r\n"


async def send_after_answer(running: Running, start: bytes, *, num_pieces: int = 50) -> bytes:
    """The whole answer to `start`, once more has been sent after its status had come."""
    reader, writer = await asyncio.open_connection("127.0.0.1", running.server.port)
    try:
        async with asyncio.timeout(240):
            writer.write(start)
            answer = await reader.readline()
            for _ in range(num_pieces):
                writer.write(b"x" * 1000)
                await writer.drain()
                await asyncio.sleep(0.002)
            return answer + await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize("start", [NOT_FOUND, NO_HTTP, POST + b"Content-Length: 9000000\r\n\r\n{"])
async def test_who_is_refused_while_it_sends_can_read_the_answer(start: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_watch, "GRACE_S", 0.2)
    monkeypatch.setattr(http_protocol, "GRACE_S", 0.2)
    async with running_frontend() as running:
        answer = await send_after_answer(running, start)
        assert answer.startswith((b"HTTP/1.1 404", b"HTTP/1.1 400", b"HTTP/1.1 408")), answer
        assert answer.endswith(b"}"), answer
        assert running.server._http is not None
        await until(lambda: not running.server._http.server_state.connections)  # type: ignore[union-attr]


@pytest.mark.parametrize(("name", "value"), [("LINGER_S", 0.05), ("LINGER_BYTES", 20_000)])
async def test_who_is_refused_and_sends_on_is_cut_off(name: str, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lingering, name, value)
    async with running_frontend() as running:
        with pytest.raises(ConnectionError):
            await send_after_answer(running, NO_HTTP, num_pieces=100_000)
