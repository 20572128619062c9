"""Gives memory back to the machine after a burst of requests."""

import asyncio
import gc

from pagoda_common.memory import trim_memory
from pagoda_scheduler.engine import Engine

PERIOD_S = 0.5
YOUNG_OBJECTS = 20_000
"""New objects after which garbage is looked for: a step makes hundreds that live as long as their request."""
MIN_REQUESTS = 1000
"""Requests since the last time, below which it is not worth the few tens of milliseconds."""


def exempt_what_exists() -> None:
    """Keep what exists now out of garbage collection: it lives as long as the process, and looking through it in the
    middle of a step would cost milliseconds."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)


async def release_memory_when_idle(engine: Engine) -> None:
    """For ever: after many requests, and once none has been open for a whole period, collect garbage and let the
    allocator return its free pages."""
    num_released, last_seen, was_idle = 0, 0, False
    while True:
        await asyncio.sleep(PERIOD_S)
        num_submitted = engine.num_submitted
        is_idle = not engine.requests and num_submitted == last_seen
        if is_idle and was_idle and num_submitted - num_released >= MIN_REQUESTS:
            gc.collect()
            trim_memory()
            num_released = num_submitted
        was_idle, last_seen = is_idle, num_submitted
