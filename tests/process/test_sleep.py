"""Real processes under load: sleep, wake-up and other weights, while eight streams run. Fp32 on a CPU: exact."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.process.stack import Stack
from tests.weights import cut_short, other_weights, same_weights

NUM_STREAMS = 8
NUM_TOKENS = 240


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    stack = Stack("--enable-sleep-mode", "--allowed-weights=*", "--dtype=float32", "--kv-cache-memory=64M")
    try:
        stack.wait_ready()
        yield stack
    finally:
        stack.end()


@pytest.fixture
async def http(stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=stack.url, timeout=240) as http:
        yield http


@dataclass
class Stream:
    """What a client has of one stream."""

    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    is_done: bool = False


def body_of(index: int) -> dict[str, Any]:
    """The request of a stream: greedy, or seeded."""
    return {
        "model": "pagoda-tiny",
        "prompt": f"{index} friends went to the sea. One of them had a red ball and said hello to",
        "temperature": 0.9 if index % 2 else 0.0,
        "seed": index,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "return_token_ids": True,
    }


class Load:
    """Eight streams, greedy and seeded, at once."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self.streams = [Stream() for _ in range(NUM_STREAMS)]
        self._tasks = [asyncio.create_task(self._follow(index)) for index in range(NUM_STREAMS)]

    async def _follow(self, index: int) -> None:
        body = body_of(index) | {"stream": True}
        stream = self.streams[index]
        async with self._http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    stream.is_done = True
                elif line.startswith("data: "):
                    event: dict[str, Any] = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    choice = event["choices"][0]
                    stream.tokens += choice.get("token_ids") or []
                    stream.finish_reason = choice["finish_reason"] or stream.finish_reason

    async def until_running(self) -> None:
        """Wait until every stream has some tokens."""
        while not all(len(stream.tokens) > 5 for stream in self.streams):
            for task in self._tasks:
                if task.done():
                    task.result()
            await asyncio.sleep(0.005)

    @property
    def is_running(self) -> bool:
        """Whether no stream has ended."""
        return not any(task.done() for task in self._tasks)

    async def tokens(self) -> list[list[int]]:
        """Of every stream, at its end, which must be a proper one."""
        await asyncio.gather(*self._tasks)
        for stream in self.streams:
            assert (stream.finish_reason, stream.is_done, len(stream.tokens)) == ("length", True, NUM_TOKENS)
        return [stream.tokens for stream in self.streams]


async def test_streams_go_on_exactly_over_a_sleep_and_over_their_own_weights_anew(
    stack: Stack, http: httpx.AsyncClient, tmp_path: Path
) -> None:
    expected = await Load(http).tokens()
    worker = stack.service("worker")
    load = Load(http)
    await load.until_running()
    before = worker.memory_info().rss
    assert (await http.post("/sleep?level=1")).status_code == 200
    assert before - worker.memory_info().rss > 6_000_000  # half of the weights, which are not all that goes
    ready = await http.get("/ready")
    assert ready.status_code == 503
    assert "the model sleeps (level 1)" in ready.json()["error"]["message"]
    assert (await http.get("/is_sleeping")).json() == {"is_sleeping": True}
    assert (await http.post("/wake_up")).status_code == 200
    for directory in (tmp_path / "nowhere", cut_short(tmp_path / "cut")):
        answer = await http.post("/reload_weights", json={"model": str(directory)})
        assert answer.status_code == 409
        assert directory.name in answer.json()["error"]["message"]
    answer = await http.post("/reload_weights", json={"model": str(same_weights(tmp_path / "same"))})
    assert answer.status_code == 200, answer.text
    assert load.is_running
    assert await load.tokens() == expected
    assert worker.is_running()
    # Other weights take over after what was delivered.
    load = Load(http)
    await load.until_running()
    delivered = [len(stream.tokens) for stream in load.streams]
    answer = await http.post("/reload_weights", json={"model": str(other_weights(tmp_path / "other"))})
    assert answer.status_code == 200, answer.text
    for count, old, new in zip(delivered, expected, await load.tokens(), strict=True):
        assert new[:count] == old[:count]
        assert new != old
    # What the old weights have cached of these prompts is not used: the first token already is another.
    prompts = [await first_token(http, index) for index in range(0, NUM_STREAMS, 2)]
    assert all(token != tokens[0] for token, tokens in zip(prompts, expected[::2], strict=True))


async def first_token(http: httpx.AsyncClient, index: int) -> int:
    """Of a stream's prompt."""
    answer = await http.post("/v1/completions", json=body_of(index) | {"max_tokens": 1})
    return int(answer.json()["choices"][0]["token_ids"][0])
