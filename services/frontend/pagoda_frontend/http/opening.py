"""When a stream says that it has begun: with its first news, or when these are long in coming. No engine, no HTTP."""

import asyncio
from collections.abc import AsyncGenerator
from typing import TypeVar

Item = TypeVar("Item")


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
