"""Reads the messages of a worker's registration, and detects silence. Knows no group, no engine."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import TypeVar

from pagoda_common.errors import NotReady

TIMEOUT_S = 10.0
"""Seconds of silence after which a worker is lost. Workers send a heartbeat every second."""
IDLE_TIMEOUT_S = 3.0
"""The same for an idle worker: no step can be late there, and nothing delays its heartbeats."""
TICK_S = 0.25
MAX_TICK_S = 0.5
"""Maximum time that counts between two checks. This process may itself have been stopped or starved: then heartbeats
wait in its socket, and the worker is not to blame."""

Message = TypeVar("Message")


async def in_time(messages: AsyncIterator[Message], is_idle: Callable[[], bool]) -> AsyncGenerator[Message]:
    """Messages as they come, until the stream ends.

    Args:
        is_idle: returns whether the worker is idle.

    Raises:
        NotReady: no message came for too long.
    """
    while True:
        arriving = asyncio.ensure_future(_next(messages))
        try:
            silence_s, looked_s = 0.0, time.monotonic()
            while not (await asyncio.wait([arriving], timeout=TICK_S))[0]:
                now_s = time.monotonic()
                silence_s += min(now_s - looked_s, MAX_TICK_S)
                looked_s = now_s
                bound_s = min(IDLE_TIMEOUT_S, TIMEOUT_S) if is_idle() else TIMEOUT_S
                if silence_s > bound_s:
                    raise NotReady(f"no heartbeat for {bound_s:g} s: the worker hangs, or is cut off")
            message = arriving.result()
        finally:
            arriving.cancel()
        if message is None:
            return
        yield message


async def _next(messages: AsyncIterator[Message]) -> Message | None:
    return await anext(messages, None)
