"""What a user relies on, seen from outside: the openai client and curl-like calls against `pagoda serve`."""

import asyncio
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.process.stack import Stack, ask, poll_until

QUESTIONS = [
    "Hello!",
    "Tell me a story about a fox.",
    "What is the capital of France?",
    "Tell me a story.",
    "Write a story about Anna.",
    "What can you do?",
    "Tell me a story about a robot.",
    "Tell me about the moon.",
]


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    stack = Stack()
    try:
        stack.wait_ready()
        yield stack
    finally:
        stack.end()


def gauge(stack: Stack, name: str) -> float:
    """A metric without extra labels."""
    with urllib.request.urlopen(f"{stack.url}/metrics", timeout=240) as response:
        text = response.read().decode()
    match = re.search(rf"^{re.escape(name)}{{[^}}]*}} (\S+)$", text, re.MULTILINE)
    assert match is not None, name
    return float(match[1])


async def stream_text(client: openai.AsyncOpenAI, question: str, seed: int) -> str:
    stream = await client.chat.completions.create(
        model="pagoda-tiny",
        messages=[{"role": "user", "content": question}],
        stream=True,
        max_tokens=24,
        temperature=0.8,
        seed=seed,
    )
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


async def test_64_streaming_chats_at_once_give_the_texts_of_one_by_one(stack: Stack) -> None:
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        asked = [(QUESTIONS[number % len(QUESTIONS)], number) for number in range(64)]
        together = await asyncio.gather(*(stream_text(client, *question) for question in asked))
        one_by_one = [await stream_text(client, *question) for question in asked]
    assert together == one_by_one
    assert len(set(together)) > 32
    poll_until(lambda: gauge(stack, "vllm:kv_cache_usage_perc") == 0, what="all blocks are free")


async def test_a_client_that_disconnects_frees_its_blocks(stack: Stack) -> None:
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.completions.create(
            model="pagoda-tiny",
            prompt="Once upon a time",
            stream=True,
            max_tokens=400,
            extra_body={"ignore_eos": True},
        )
        await anext(aiter(stream))
        assert await asyncio.to_thread(gauge, stack, "vllm:num_requests_running") == 1
        assert await asyncio.to_thread(gauge, stack, "vllm:kv_cache_usage_perc") > 0
        await stream.close()
    await asyncio.to_thread(
        poll_until, lambda: gauge(stack, "vllm:kv_cache_usage_perc") == 0, what="the blocks are free"
    )
    assert gauge(stack, "vllm:num_requests_running") == 0
    assert ask(stack.url)


def test_the_stub_example_streams_an_answer(stack: Stack) -> None:
    example = Path(__file__).parents[2] / "examples" / "grpc_stub_stream.py"
    command = [sys.executable, str(example), "Hello!", f"127.0.0.1:{stack.grpc_port}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.strip()
