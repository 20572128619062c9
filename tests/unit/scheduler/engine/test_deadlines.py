"""Deadlines: each name expires once, in time order, unless it was cancelled; what was cancelled is forgotten."""

import asyncio
import random

from pagoda_scheduler.engine.deadlines import Deadlines


async def test_what_is_not_cancelled_expires_once_in_order() -> None:
    expired: list[tuple[str, float]] = []
    deadlines = Deadlines(expire=lambda name, timeout_s: expired.append((name, timeout_s)))
    numbers = random.Random(1)
    timeouts = {str(number): numbers.uniform(0.01, 0.2) for number in range(500)}
    for name, timeout_s in timeouts.items():
        deadlines.set(name, timeout_s)
    for number in range(0, 500, 2):
        deadlines.cancel(str(number))
    deadlines.cancel("never set")
    async with asyncio.timeout(240):
        while len(deadlines):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert sorted(expired) == sorted((name, timeouts[name]) for name in timeouts if int(name) % 2)


async def test_a_new_time_replaces_the_old_one() -> None:
    expired: list[tuple[str, float]] = []
    deadlines = Deadlines(expire=lambda name, timeout_s: expired.append((name, timeout_s)))
    deadlines.set("a", 0.01)
    deadlines.set("a", 0.05)
    async with asyncio.timeout(240):
        while len(deadlines):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert expired == [("a", 0.05)]


async def test_cancelled_names_take_no_room() -> None:
    deadlines = Deadlines(expire=lambda name, timeout_s: None)
    for number in range(10_000):
        deadlines.set(str(number), 3600.0)
        deadlines.cancel(str(number))
    assert len(deadlines) == 0
    assert len(deadlines._heap) <= 65
