"""Clients that do not read: what waits for them is bounded, others are served, and in the end they are cut off."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator

import pytest

from pagoda_frontend.requests import run
from tests.fakes.fake_scheduler import FakeScheduler
from tests.service.frontend.harness import MODEL, Running, running_frontend, until

NUM_TOKENS = 2000
BODY = {
    "model": MODEL,
    "prompt": [5, 6, 7],
    "max_tokens": NUM_TOKENS,
    "stream": True,
    "logprobs": 5,
    "ignore_eos": True,
}
SEND_TIMEOUT_S = 0.7


@pytest.fixture
async def frontend() -> AsyncIterator[Running]:
    fake = FakeScheduler(max_model_len=100_000, tokens_per_step=20)
    async with running_frontend(fake, send_timeout_s=SEND_TIMEOUT_S) as running:
        assert running.server._http is not None
        for listener in running.server._http.servers[0].sockets:  # the system would take megabytes
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        yield running


def connect(running: Running, num_prompts: int = 1) -> socket.socket:
    """A client that has asked for a long stream, with little room for it."""
    body = json.dumps({**BODY, "prompt": [[5, 6, 7]] * num_prompts}).encode()
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", running.server.port))
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: [::1]\r\ncontent-type:application/json\r\ncontent-length: %d\r\n\r\n"
    )
    client.sendall(head % len(body) + body)
    client.setblocking(False)
    return client


async def test_a_client_that_reads_nothing_is_cut_off_and_others_are_served(
    frontend: Running, caplog: pytest.LogCaptureFixture
) -> None:
    with connect(frontend) as client:
        loop = asyncio.get_running_loop()
        assert (await loop.sock_recv(client, 12)).startswith(b"HTTP/1.1 200")
        answer = await frontend.complete(max_tokens=5)
        assert answer["usage"]["completion_tokens"] == 5
        await until(lambda: "a client that did not read its answer for 0.7 s" in caplog.text, timeout_s=240)
        await until(lambda: frontend.server.serving.num_open == 0)
        received = bytearray()
        with contextlib.suppress(ConnectionResetError):
            while piece := await loop.sock_recv(client, 1 << 20):
                received += piece
        assert b"[DONE]" not in received


def without_chunks(answer: bytes) -> bytes:
    """The body of a chunked answer."""
    rest, body = answer.partition(b"\r\n\r\n")[2], b""
    while size := int(rest.partition(b"\r\n")[0], 16):
        rest = rest.partition(b"\r\n")[2]
        body, rest = body + rest[:size], rest[size + 2 :]
    return body


async def test_a_client_that_reads_slowly_gets_everything(frontend: Running) -> None:
    with connect(frontend) as client:
        loop, received = asyncio.get_running_loop(), bytearray()
        async with asyncio.timeout(240):
            while not received.endswith(b"0\r\n\r\n"):
                received += await loop.sock_recv(client, 1 << 18)
                await asyncio.sleep(0.02)
    lines = [line for line in without_chunks(bytes(received)).split(b"\n") if line.startswith(b"data: {")]
    tokens = [token for line in lines for token in json.loads(line[6:])["choices"][0]["logprobs"]["tokens"]]
    assert len(tokens) == NUM_TOKENS
    assert b"data: [DONE]" in received


async def test_the_text_of_several_prompts_is_not_made_before_its_client_has_room(
    frontend: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "MAX_ARRIVED", 2)
    response = await frontend.complete(prompt=[[5], [6], [7]], max_tokens=200)
    assert [choice["finish_reason"] for choice in response["choices"]] == ["length"] * 3
    assert response["usage"]["completion_tokens"] == 600
