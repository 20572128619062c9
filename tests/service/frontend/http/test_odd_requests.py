"""Requests that are odd but legal by RFC 9112 are answered; what cannot be answered is a 4xx, never a 500."""

import asyncio
import json
import socket
import struct
from typing import Any

import pytest

from pagoda_frontend.http.body import MAX_NESTING
from pagoda_frontend.http.connection.http_protocol import BoundedHttpProtocol
from tests.service.frontend.harness import MODEL, Running, running_frontend, until

BODY = json.dumps({"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 2}).encode()
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n"
JSON = b"Content-Type: application/json\r\n"
SIZED = b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n%x;note=1\r\n%b\r\n0\r\nTrailer: 1\r\n\r\n" % (len(BODY), BODY)
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"


async def exchange(running: Running, *parts: bytes, num_answers: int = 1) -> list[tuple[int, Any]]:
    """Send `parts`, each as a packet of its own; status and JSON body of each answer on the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", running.server.port)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
        answers = []
        async with asyncio.timeout(240):
            for _ in range(num_answers):
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
                body = await reader.readexactly(length)
                answers.append((int(head.split(b" ", 2)[1]), json.loads(body) if body else None))
        return answers
    finally:
        writer.close()


def in_bytes(request: bytes) -> list[bytes]:
    """Packets of one byte."""
    return [request[place : place + 1] for place in range(len(request))]


@pytest.mark.parametrize("body", [SIZED, CHUNKED], ids=["sized", "chunked"])
async def test_an_offer_of_http_2_is_ignored_however_it_arrives(frontend: Running, body: bytes) -> None:
    request = POST + H2C + JSON + body
    for parts in ([request], [request[:150], request[150:]], in_bytes(request)):
        [(status, answer)] = await exchange(frontend, *parts)
        assert (status, len(answer["choices"])) == (200, 1), answer


@pytest.mark.parametrize("offer", [b"Connection: upgrade\r\nUpgrade: websocket\r\n", b"Upgrade: TLS/1.0\r\n", H2C])
async def test_any_offer_is_ignored_and_the_connection_goes_on(frontend: Running, offer: bytes) -> None:
    offered = POST + offer + JSON + SIZED
    answers = await exchange(frontend, offered, POST + JSON + SIZED, offered, num_answers=3)
    assert [status for status, _ in answers] == [200, 200, 200]


async def test_an_offer_with_close_still_closes(frontend: Running) -> None:
    offer = b"Connection: close, Upgrade\r\nUpgrade: h2c\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", frontend.server.port)
    writer.write(POST + offer + JSON + SIZED)
    async with asyncio.timeout(240):
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")  # read() ends with the connection
    writer.close()


async def test_heads_with_an_offer_are_bounded_too() -> None:
    async with running_frontend(h11_max_incomplete_event_size=4096, h11_max_header_count=20) as running:
        many = b"".join(b"A%d: 1\r\n" % number for number in range(40))
        [(status, _)] = await exchange(running, POST + H2C + many + b"\r\n")
        assert status == 431


ODD = {
    "empty lines first": b"\r\n\r\n" + POST + JSON + SIZED,
    "absolute form": b"POST http://x/v1/completions HTTP/1.1\r\nHost: localhost\r\n" + JSON + SIZED,
    "HTTP/1.0 without a host": b"POST /v1/completions HTTP/1.0\r\n" + JSON + SIZED,
    "no space and much space": b"POST /v1/completions HTTP/1.1\r\nHost:localhost\r\nX:   y   \r\n" + JSON + SIZED,
    "empty header": POST + b"X-Empty:\r\n" + JSON + SIZED,
    "the same header twice": POST + b"X: 1\r\nX: 2\r\n" + JSON + SIZED,
    "other case": b"POST /v1/completions HTTP/1.1\r\nHOST: [::1]\r\nCONTENT-TYPE: Application/JSON;Charset=UTF-8\r\n"
    + SIZED,
    "chunk extensions and trailers": POST + JSON + CHUNKED,
    "a query": b"POST /v1/completions?api-version=1 HTTP/1.1\r\nHost: localhost\r\n" + JSON + SIZED,
    "escaped path": b"POST /v1/%63ompletions HTTP/1.1\r\nHost: localhost\r\n" + JSON + SIZED,
}


@pytest.mark.parametrize("request_bytes", ODD.values(), ids=ODD.keys())
async def test_odd_but_legal_requests_are_answered(frontend: Running, request_bytes: bytes) -> None:
    [(status, answer)] = await exchange(frontend, request_bytes)
    assert status == 200, answer


async def test_what_is_expected_first_is_sent_first(frontend: Running) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", frontend.server.port)
    head, _, body = SIZED.partition(b"\r\n\r\n")
    writer.write(POST + JSON + b"Expect: 100-continue\r\n" + head + b"\r\n\r\n")
    async with asyncio.timeout(240):
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
        writer.write(body)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
    writer.close()


REFUSED = {
    "a tunnel": (b"CONNECT x:443 HTTP/1.1\r\nHost: x:443\r\n\r\n", 405),
    "length and chunks": (POST + JSON + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "no version": (b"POST /v1/completions HTTP/9.9\r\nHost: localhost\r\n\r\n", 400),
    "a bad chunk": (POST + JSON + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
}


@pytest.mark.parametrize(("request_bytes", "expected"), REFUSED.values(), ids=REFUSED.keys())
async def test_what_cannot_be_answered_is_refused(frontend: Running, request_bytes: bytes, expected: int) -> None:
    [(status, _)] = await exchange(frontend, request_bytes)
    assert status == expected
    await frontend.complete(max_tokens=1)


def nested(levels: int, *, is_object: bool) -> Any:
    """A value of so many levels."""
    value: Any = 1
    for _ in range(levels):
        value = {"a": value} if is_object else [value]
    return value


PATHS = {
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
    "/v1/embeddings": {"input": "a"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
}


@pytest.mark.parametrize("is_object", [False, True], ids=["lists", "objects"])
@pytest.mark.parametrize("path", PATHS)
async def test_a_deep_body_is_a_400_that_names_the_field(frontend: Running, path: str, is_object: bool) -> None:
    usual = PATHS[path] | {"model": MODEL}
    for is_stream in (False, True):
        for field in ("x", "metadata", "messages", "input", "prompt", "tools"):
            deep = {**usual, field: nested(MAX_NESTING + 1, is_object=is_object), "stream": is_stream}
            response = await frontend.post(path, deep)
            assert response.status_code == 400, (field, response.text)
            assert f"{field} is nested more than {MAX_NESTING} levels deep" in response.text
        allowed = {**usual, "x": nested(MAX_NESTING, is_object=is_object), "stream": is_stream}
        response = await frontend.post(path, allowed)
        assert response.status_code < 500, response.text
        assert "nested" not in response.text


async def test_many_shallow_values_are_no_deep_ones(frontend: Running) -> None:
    answer = await frontend.complete(max_tokens=1, x=[[{"a": []}]] * 500)
    assert len(answer["choices"]) == 1


async def test_as_many_headers_as_allowed_are_read_and_one_more_is_refused() -> None:
    async with running_frontend(h11_max_header_count=5) as running:
        more = b"".join(b"A%d: 1\r\n" % number for number in range(2))
        [(status, _)] = await exchange(running, POST + JSON + more + SIZED)  # with Host, Content-Type, Content-Length
        assert status == 200
        [(status, answer)] = await exchange(running, POST + JSON + more + b"B: 1\r\n" + SIZED)
        assert status == 431
        assert "more than 5 headers" in answer["error"]["message"]


async def test_a_connection_that_is_reset_is_not_kept_for_a_next_request(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[BoundedHttpProtocol] = []
    connection_made = BoundedHttpProtocol.connection_made

    def noted(self: BoundedHttpProtocol, transport: asyncio.Transport) -> None:
        made.append(self)
        connection_made(self, transport)

    monkeypatch.setattr(BoundedHttpProtocol, "connection_made", noted)
    async with running_frontend() as running:
        made.clear()
        reader, writer = await asyncio.open_connection("127.0.0.1", running.server.port)
        writer.write(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        [protocol] = made
        await until(lambda: protocol.timeout_keep_alive_task is not None)
        linger = struct.pack("ii", 1, 0)  # close() sends a reset
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()
        await until(lambda: protocol not in protocol.connections)
        assert protocol.timeout_keep_alive_task is None, "the timer holds the connection's memory until it fires"
