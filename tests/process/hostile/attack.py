"""One attack: what it sends to a stack, how it is repeated, and what must not come back. Knows sockets, no shapes."""

import asyncio
import collections
import json
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx

from tests.process.stack import Stack

HANG_S = 240.0
PATIENCE_S = 60.0
"""Of an attacker for a result, in the long form."""
MIN_PATIENCE_S = 5.0
MIN_REQUESTS = 16
"""Different ones of an attack that are sent in the short form."""
MODEL = "pagoda-tiny"
SHOWN_CHARS = 300


@dataclass(slots=True)
class Outcome:
    """What an attack has seen."""

    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    violations: list[str] = field(default_factory=list)

    def add(self, name: str) -> None:
        """Count one answer."""
        self.counts[name] += 1
        if name.startswith("wrong"):
            self.violations.append(name)


@dataclass(frozen=True, slots=True)
class Attack:
    """A kind of hostile traffic."""

    name: str
    send: Callable[[Stack, Outcome, float], Awaitable[None]]
    """Called with the stack, where to count, and the share of the traffic that is sent (1: the long form)."""


@dataclass(frozen=True, slots=True)
class Post:
    """A request over HTTP."""

    path: str
    content: bytes
    headers: tuple[tuple[str, str], ...] = ()
    method: str = "POST"


def post(path: str, body: dict[str, Any], *headers: tuple[str, str]) -> Post:
    """A body of JSON that names the model, unless it does so itself."""
    return Post(path, json.dumps({"model": MODEL, **body}).encode(errors="replace"), headers)


def posts(
    name: str, made: Callable[[], Iterable[Post]], *, repeat: int = 1, concurrency: int = 16, reads: bool = True
) -> Attack:
    """Each of these `repeat` times, `concurrency` at once.

    Args:
        reads: the client reads its answers; else it goes away after the first bytes.
    """

    async def send(stack: Stack, outcome: Outcome, share: float) -> None:
        requests = await asyncio.to_thread(lambda: list(made()))
        if share < 1:
            random.Random(name).shuffle(requests)
            requests = requests[: max(MIN_REQUESTS, round(len(requests) * share))]
        times = max(1, round(repeat * share))
        sent = [one for _ in range(times) for one in requests]
        await send_posts(stack, outcome, sent, share=share, concurrency=concurrency, reads=reads)

    return Attack(name, send)


async def send_posts(
    stack: Stack, outcome: Outcome, requests: Sequence[Post], *, share: float, concurrency: int, reads: bool = True
) -> None:
    """All of these, from a client whose patience depends on the share."""
    limits = httpx.Limits(max_connections=concurrency)
    timeout_s = max(MIN_PATIENCE_S, PATIENCE_S * share)
    async with httpx.AsyncClient(base_url=stack.url, timeout=timeout_s, limits=limits) as http:
        await in_parallel(
            [partial(_post, http, one, outcome, reads=reads) for one in requests], concurrency=concurrency
        )


async def in_parallel(works: Sequence[Callable[[], Awaitable[None]]], *, concurrency: int) -> None:
    """Every one of these, `concurrency` at a time."""
    left = iter(works)

    async def work() -> None:
        for one in left:
            await one()

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(work())


async def _post(http: httpx.AsyncClient, one: Post, outcome: Outcome, *, reads: bool) -> None:
    headers = [("Content-Type", "application/json"), *one.headers]
    try:
        async with http.stream(one.method, one.path, content=one.content, headers=headers) as response:
            if not reads:
                await anext(aiter(response.aiter_raw()), b"")
                outcome.add("gone")
                return
            content = await response.aread()
    except httpx.ReadTimeout:
        outcome.add("given up")  # it is the attacker who waits
        return
    except httpx.HTTPError as error:
        outcome.add(f"wrong: {error!r} of {shown(one)}")
        return
    outcome.add(judged(response.status_code, response.headers, content, one))


def judged(status: int, headers: Any, content: bytes, one: Post) -> str:
    """The status; "wrong: ..." for what is neither a result nor a refusal."""
    is_refusal = 400 <= status < 500 or (status == 503 and "retry-after" in headers) or status in (501, 504)
    if status != 200 and not (is_refusal and is_error(content)):
        return f"wrong: {status} {content[:SHOWN_CHARS]!r} of {shown(one)}"
    return str(status)


def is_error(content: bytes) -> bool:
    """Whether an answer is an error object with a message."""
    try:
        return bool(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return False


def shown(one: Post) -> str:
    """The beginning of a request."""
    return f"{one.path} {one.content[:SHOWN_CHARS]!r}"
