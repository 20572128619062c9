"""Clients that request many log probabilities and leave the answers unread: the frontend grows by what the arrays take,
not by the answers, and gives it back when they go away."""

import asyncio
import json
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import pytest

from tests.process.hostile.test_growth import HANG_S, MAX_GROWTH_BYTES
from tests.process.stack import Stack, ask, poll_until

NUM_CALLS, NUM_PROMPTS, NUM_TOKENS, NUM_TOP = 4, 32, 300, 20
MAX_PEAK_BYTES = 75 * 1024**2
"""Growth while all answers wait to be read. Their JSON has 55 MB, lists of Python's numbers would take 57 MB more."""


@pytest.fixture
def stack() -> Iterator[Stack]:
    stack = Stack("--disable-uvicorn-access-log")
    try:
        stack.wait_ready()
        yield stack
    finally:
        stack.end()


def call() -> bytes:
    """A request with its head."""
    prompts = [[10 + (place + number) % 50 for place in range(NUM_TOKENS)] for number in range(NUM_PROMPTS)]
    content = json.dumps({"prompt": prompts, "max_tokens": 1, "prompt_logprobs": NUM_TOP}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def num_answered(stack: Stack) -> float:
    """Requests of the engine that came to their end."""
    lines = httpx.get(f"{stack.url}/metrics", timeout=HANG_S).text.split("\n")
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:request_success_total"))


def test_answers_that_no_one_reads_are_not_in_memory(stack: Stack) -> None:
    expected = ask(stack.url)
    frontend = stack.service("frontend")
    before = frontend.memory_info().rss
    num_prompts, address = NUM_CALLS * NUM_PROMPTS, urlsplit(stack.url)

    async def leave_unread() -> None:
        writers = []
        for _ in range(NUM_CALLS):
            _, writer = await asyncio.open_connection(address.hostname, address.port, limit=1024)
            writer.write(call())
            await writer.drain()
            writers.append(writer)
        await asyncio.to_thread(
            poll_until,
            lambda: num_answered(stack) >= num_prompts + 1,
            what="all prompts are computed",
            timeout_s=HANG_S,
        )
        assert await asyncio.to_thread(ask, stack.url) == expected
        assert frontend.memory_info().rss < before + MAX_PEAK_BYTES
        for writer in writers:
            writer.transport.abort()

    asyncio.run(leave_unread())
    poll_until(
        lambda: frontend.memory_info().rss < before + MAX_GROWTH_BYTES // 2,
        what="the frontend gives its memory back",
        timeout_s=HANG_S,
    )
    assert ask(stack.url) == expected
    assert stack.service("frontend").pid == frontend.pid
    assert "Traceback" not in stack.log
