"""Returns memory to the operating system after a burst of requests."""

import asyncio
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pagoda_common.process.memory import trim_memory

PERIOD_S = 0.5
YOUNG_OBJECTS = 20_000
"""New objects after which garbage is looked for: a step makes hundreds that live as long as their request."""
MIN_EVENTS = 1000
"""Requests or steps since the last time, below which only the last of RELEASE_AFTER is worth the few tens of
milliseconds."""
RELEASE_AFTER = (1, 3, 7, 15, 31)
"""Periods of rest after which memory is given back: what others have still to read is free only later."""
FORGET_AFTER = 20
"""Periods of rest after which what is kept for the next request alone is dropped."""


def exempt_what_exists(*, collects: bool = True) -> None:
    """Keep what exists now out of garbage collection: it lives as long as the process, and looking through it in the
    middle of a step would cost milliseconds (100, where torch and transformers are imported).

    Args:
        collects: look for garbage first; no: that was just done.
    """
    if collects:
        gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)


@contextmanager
def without_collections() -> Iterator[None]:
    """Within are a service's imports. What they make lives as long as the process: no collection looks for garbage in
    it, neither meanwhile (a tenth of the time that imports take) nor later."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


async def release_memory_when_idle(
    *,
    count: Callable[[], int],
    is_idle: Callable[[], bool],
    compact: Callable[[], None] | None = None,
    forget: Callable[[], bool] | None = None,
    trims_while_open: bool = False,
) -> None:
    """Forever: after many events, and once the process is idle, collect garbage, move together what stays, and let the
    allocator return its free pages; a few times, at growing distances. After few events, once, after the longest rest.

    Args:
        count: events so far (requests, steps); may be reset.
        is_idle: whether nothing is open now.
        trims_while_open: give back free pages, and no more, also while something is open but nothing new comes.
        forget: drops what is kept for the next request alone; whether there was anything. Called in each period from
            FORGET_AFTER on.
        compact: copies long-lived objects that a burst has scattered, because one small object keeps a page.
    """
    num_armed, last_seen, num_idle, num_left, num_given_back = 0, 0, 0, 0, 0
    was_open = False
    while True:
        await asyncio.sleep(PERIOD_S)
        num_events = count()
        num_armed = min(num_armed, num_events)
        if num_events - num_armed >= MIN_EVENTS:
            num_armed, num_left = num_events, len(RELEASE_AFTER)
        is_open = not is_idle()
        # Requests that were open for long are no rest: only their end frees what they hold.
        is_quiet = num_events == last_seen and is_open == was_open and (trims_while_open or not is_open)
        was_open = is_open
        num_idle = num_idle + 1 if is_quiet else 0
        last_seen = num_events
        is_due = num_left > 0 and num_idle in RELEASE_AFTER
        if is_open:
            if is_due:
                trim_memory()
            continue
        has_forgotten = forget is not None and num_idle >= FORGET_AFTER and forget()
        is_last = num_idle == RELEASE_AFTER[-1]
        if is_due or has_forgotten or (is_last and num_events != num_given_back):
            num_left -= is_due
            num_given_back = num_events if is_last else num_given_back
            gc.collect()
            if compact is not None:
                compact()
            trim_memory()
