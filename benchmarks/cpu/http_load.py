"""Requests to an OpenAI server, a number of streams at a time: one client for every engine.

It shares the processors with the server, where users' clients have their own. So of each stream it reads the first
event and the last ones, no more, and after the first one it sleeps until the server ends the stream or much has come.
"""

import asyncio
import json
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from benchmarks.cpu.session import EngineFailure, EngineGone

TAIL_BYTES = 16 << 10
"""Of a stream, in which its last event is: the usage."""
MUCH_BYTES = 256 << 10
"""Of a stream, that have come: the kernel wakes the client then, or when the stream ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What one stream gave."""

    ttft_s: float
    num_tokens: int
    """As the server counts them."""


async def send_all(
    url: str, model: str, prompts: Sequence[list[int]], *, num_outputs: int, concurrency: int, timeout_s: float
) -> list[Answer]:
    """Send every prompt to `url` (the server's /v1/completions), `concurrency` streams at a time.

    Raises:
        EngineFailure: a request was refused.
        EngineGone: the server ended, or took longer.
    """
    places = asyncio.Semaphore(concurrency)
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    connector = aiohttp.TCPConnector(limit=concurrency, force_close=True)  # llama.cpp's server ends it with the stream
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

        async def one(prompt: list[int]) -> Answer:
            async with places:
                return await _send(session, url, model, prompt, num_outputs)

        try:
            return await asyncio.gather(*map(one, prompts))
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineGone(f"{type(error).__name__}: {error}") from error


async def _send(session: aiohttp.ClientSession, url: str, model: str, prompt: list[int], num_outputs: int) -> Answer:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": num_outputs,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started = time.perf_counter()
    ttft_s, text = 0.0, b""
    async with session.post(url, json=body) as response:
        if response.status != 200:
            raise EngineFailure(f"HTTP {response.status}: {(await response.text())[:200]}")
        async for piece in response.content.iter_any():
            text += piece
            if ttft_s:
                text = text[-TAIL_BYTES:]
            elif any(event.get("choices") for event in events(text)):
                ttft_s = time.perf_counter() - started
                _sleep_until_much_has_come(response)
    usages = [event["usage"] for event in events(text) if event.get("usage")]
    if not usages:
        raise EngineFailure("the stream ended without usage")
    return Answer(ttft_s=ttft_s, num_tokens=usages[-1]["completion_tokens"])


def _sleep_until_much_has_come(response: aiohttp.ClientResponse) -> None:
    """The socket counts as readable from now on when MUCH_BYTES are there, or its end is."""
    connection = response.connection
    if connection is not None and connection.transport is not None:  # else all of it has come
        connection.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, MUCH_BYTES)


def events(text: bytes) -> Iterator[dict[str, Any]]:
    """The whole events of a part of a stream."""
    for line in text.split(b"\n")[:-1]:
        if line.startswith(b"data: {"):
            yield json.loads(line.removeprefix(b"data: "))


async def wait_until_served(url: str, *, timeout_s: float, is_alive: Callable[[], bool]) -> None:
    """Wait until `url` of the server answers 200.

    Raises:
        EngineGone: it does not in time, or the server is no longer alive.
    """
    deadline = time.monotonic() + timeout_s
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session:
        while time.monotonic() < deadline and is_alive():
            try:
                async with session.get(url) as response:
                    if response.status == 200:
                        return
            except (aiohttp.ClientError, TimeoutError):
                pass
            await asyncio.sleep(0.2)
    reason = f"did not answer in {timeout_s:.0f} s" if is_alive() else "ended"
    raise EngineGone(f"the server {reason}")
