"""Attacks by what a client does with its connections: halves, drops, chunks, pipelines, upgrades. Knows HTTP/1.1."""

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable

from tests.process.hostile.attack import Attack, Outcome, in_parallel
from tests.process.stack import Stack

READ_S = 5.0
"""How long an answer is awaited; many of these get none."""
BODY = b'{"model": "pagoda-tiny", "prompt": "a", "max_tokens": 1}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
WHOLE = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
UPGRADE = b"GET /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\n"
MANY_HEADERS = b"".join(b"X-%d: 1\r\n" % number for number in range(20_000))
BOUNDARY = b"--x\r\nContent-Disposition: form-data; name=a\r\n\r\n1\r\n"

ODD = {
    "20,000 headers": HEAD + MANY_HEADERS + b"\r\n",
    "a header of a megabyte": HEAD + b"X-A: " + b"a" * 1_000_000 + b"\r\n\r\n",
    "a target of a megabyte": b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
    "a header without an end": HEAD + b"X-A: " + b"a" * 3_000_000,
    "folded headers": HEAD + b"X-A: a\r\n" + b" b\r\n" * 10_000 + b"\r\n",
    "two lengths": HEAD + b"Content-Length: 4\r\nContent-Length: 5\r\n\r\n" + BODY,
    "a length and chunks": HEAD + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + WHOLE,
    "chunks of chunks": HEAD + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
    "a huge chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * 16 + b"\r\n" + b"a" * 100_000,
    "a chunk size of a megabyte": HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"0" * 1_000_000,
    "extensions of chunks": HEAD
    + b"Transfer-Encoding: chunked\r\n\r\n"
    + (b"1;" + b"a=b;" * 2000 + b"\r\n{\r\n") * 200,
    "chunks of a byte": HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 200_000,
    "trailers": HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"X-A: b\r\n" * 100_000,
    "a huge length": HEAD + b"Content-Length: 99999999999999999999\r\n\r\n" + BODY,
    "a pipeline": WHOLE * 2000,
    "a pipeline of streams": WHOLE.replace(b'"max_tokens": 1}', b'"stream":true }') * 500,
    "an upgrade to websockets": UPGRADE
    + b"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    + b"\x81\xfe\xff\xff" * 10_000,
    "an upgrade to HTTP/2": UPGRADE
    + b"Upgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n\r\nPRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "multipart": HEAD.replace(b"application/json", b"multipart/form-data; boundary=x")
    + b"Content-Length: %d\r\n\r\n" % (len(BOUNDARY) * 20_000)
    + BOUNDARY * 20_000,
    "ranges": b"GET /metrics HTTP/1.1\r\nHost: a\r\nRange: bytes=" + b"0-1," * 5000 + b"0-1\r\n\r\n",
    "ranges of the document": b"GET /openapi.json HTTP/1.1\r\nHost: a\r\nRange: bytes=" + b"0-," * 5000 + b"0-\r\n\r\n",
    "a body that is expected": HEAD + b"Expect: 100-continue\r\nContent-Length: 10\r\n\r\n",
    "an unknown expectation": HEAD + b"Expect: the-unexpected\r\nContent-Length: 2\r\n\r\n{}",
    "compressed": HEAD + b"Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\n\x1f\x8b\x08\x00",
    "CONNECT": b"CONNECT 127.0.0.1:22 HTTP/1.1\r\nHost: 127.0.0.1:22\r\n\r\n",
    "TRACE": b"TRACE / HTTP/1.1\r\nHost: a\r\nCookie: secret\r\n\r\n",
    "an absolute target": b"GET http://169.254.169.254/latest HTTP/1.1\r\nHost: a\r\n\r\n",
    "a long method": b"A" * 500_000 + b" / HTTP/1.1\r\n\r\n",
    "bare line feeds": (b"GET /health HTTP/1.1\nHost: a\n\n") * 5000,
    "empty lines": b"\r\n" * 1_000_000,
    "spaces in names": HEAD + b"Content-Length : 4\r\n\r\n" + BODY,
    "zeros": b"\x00" * 1_000_000,
}
"""What is sent on one connection."""


async def _open(stack: Stack) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", stack.port, limit=2**20)


async def _send(stack: Stack, name: str, content: bytes, outcome: Outcome) -> None:
    """One connection: all bytes, then what comes back within some seconds."""
    answer = b""
    try:
        reader, writer = await _open(stack)
    except OSError:
        outcome.add("no connection")
        return
    try:
        async with asyncio.timeout(READ_S):
            writer.write(content)
            with contextlib.suppress(OSError):  # the server need not read what it refuses
                await writer.drain()
            while piece := await reader.read(2**16):
                answer = (answer + piece)[: 2**16]
    except (TimeoutError, OSError):
        pass
    finally:
        writer.transport.abort()
    statuses = {int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3})", answer)}
    wrong = {status for status in statuses if status >= 500 and status not in (501, 503, 505)}
    outcome.add(f"wrong: {sorted(wrong)} for {name}" if wrong else f"{min(statuses, default=0)}")


async def _odd_requests(stack: Stack, outcome: Outcome, share: float) -> None:
    works: list[Callable[[], Awaitable[None]]] = []
    for _ in range(max(1, round(8 * share))):
        works += [
            lambda name=name, content=content: _send(stack, name, content, outcome)  # type: ignore[misc]  # its defaults
            for name, content in ODD.items()
        ]
    await in_parallel(works, concurrency=24)


async def _slow_clients(stack: Stack, outcome: Outcome, share: float) -> None:
    """Heads and bodies that arrive a byte at a time, until the server ends them."""

    async def drip(begun: bytes, piece: bytes) -> None:
        reader, writer = await _open(stack)
        writer.write(begun)
        ended = asyncio.ensure_future(reader.read(2**16))
        for _ in range(240):
            writer.write(piece)
            done, _ = await asyncio.wait({ended}, timeout=0.5)
            if done:
                break
        is_over = ended.done()
        ended.cancel()
        writer.transport.abort()
        outcome.add("ended" if is_over else "wrong: a slow client was never ended")

    number = max(4, round(200 * share))
    heads = [drip(HEAD, b"X-A: b\r\n"[: 1 + place % 8]) for place in range(number)]
    bodies = [drip(HEAD + b"Content-Length: 16000000\r\n\r\n", b"[") for _ in range(number)]
    chunks = [drip(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n[\r\n") for _ in range(number)]
    results = await asyncio.gather(*heads, *bodies, *chunks, return_exceptions=True)
    for result in results:
        if isinstance(result, OSError):
            outcome.add("ended")
        elif isinstance(result, BaseException):
            raise result


async def _half_bodies(stack: Stack, outcome: Outcome, share: float) -> None:
    """Bodies of which the last byte does not come: what they hold has a bound."""

    async def hold(size: int) -> None:
        reader, writer = await _open(stack)
        try:
            async with asyncio.timeout(60):
                writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % size)
                writer.write(b'{"prompt": "' + b"a" * (size - 20))
                await writer.drain()
                answer = await reader.read(200)
        except (TimeoutError, OSError):
            answer = b""
        finally:
            writer.transport.abort()
        outcome.add((answer[9:12] or b"ended").decode())

    sizes = [15_000_000] * max(2, round(60 * share)) + [100_000] * max(10, round(200 * share))
    await asyncio.gather(*(hold(size) for size in sizes))


async def _slow_clients_and_half_bodies(stack: Stack, outcome: Outcome, share: float) -> None:
    """Both at once: each waits ten seconds until the server ends it."""
    await asyncio.gather(_slow_clients(stack, outcome, share), _half_bodies(stack, outcome, share))


async def _idle_connections(stack: Stack, outcome: Outcome, share: float) -> None:
    """Connections that say nothing, and streams whose client does not read."""
    body = b'{"model": "pagoda-tiny", "prompt": "a", "max_tokens": 900, "ignore_eos": true, "stream": true, "n": 16}'
    stream = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    writers = []
    for number in range(max(20, round(1500 * share))):
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", stack.port, limit=2)
            if number % 20 == 0:
                writer.write(stream)
            writers.append(writer)
    await asyncio.sleep(20 * share)
    for writer in writers:
        writer.transport.abort()
    outcome.counts["opened"] += len(writers)


async def _storm(stack: Stack, outcome: Outcome, share: float) -> None:
    """Connections that are reset in the middle of what they ask."""

    async def cut(number: int) -> None:
        try:
            _, writer = await _open(stack)
        except OSError:
            return
        content = WHOLE.replace(b'"max_tokens": 1}', b'"stream":true }')
        writer.write(content if number % 2 else content[: number % len(content)])
        await asyncio.sleep(0.001 * (number % 30))
        writer.transport.abort()
        outcome.add("cut")

    await in_parallel(
        [lambda number=number: cut(number) for number in range(max(50, round(4000 * share)))],
        concurrency=64,
    )


ATTACKS: tuple[Attack, ...] = (
    Attack("odd requests on raw connections", _odd_requests),
    Attack("slow clients and half bodies", _slow_clients_and_half_bodies),
    Attack("idle connections", _idle_connections),
    Attack("a storm of resets", _storm),
)
