"""Decides when a stream sends its status: with its first item, or earlier when that takes long. No engine."""

import asyncio
from collections.abc import AsyncGenerator
from typing import TypeVar

Item = TypeVar("Item")

PATIENCE_S = 1.0
"""Seconds that a stream's status waits for the first event, so that a refused request gets its own status, not 200."""
MAX_TIMEOUT_PATIENCE_S = 10.0
"""Maximum seconds that it also waits for the request's own time limit."""


def patience_of(timeout_s: float) -> float:
    """Seconds that a stream waits for its first item; `timeout_s`: the request's time limit, 0 for none."""
    return PATIENCE_S + min(timeout_s, MAX_TIMEOUT_PATIENCE_S)


async def announced(stream: AsyncGenerator[Item, None], *, patience_s: float) -> AsyncGenerator[Item | None, None]:
    """`stream`, with a None before the first item when that takes longer than `patience_s`. Closing it closes both."""
    first = asyncio.ensure_future(anext(stream))
    try:
        await asyncio.wait({first}, timeout=patience_s)
        if not first.done():
            yield None
        try:
            yield await first
        except StopAsyncIteration:
            return
        async for item in stream:
            yield item
    finally:
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await stream.aclose()
