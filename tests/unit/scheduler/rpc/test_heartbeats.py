"""Silence of workers: counted in this process's own time, so that a pause of it blames no one."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from pagoda_common.errors import NotReady
from pagoda_scheduler.rpc import heartbeats


class Clock:
    """Time that moves by `tick_s` with every look."""

    def __init__(self, tick_s: float) -> None:
        self.tick_s = tick_s
        self.now_s = 0.0

    def monotonic(self) -> float:
        self.now_s += self.tick_s
        return self.now_s


async def silent() -> AsyncIterator[int]:
    yield 1
    await asyncio.Event().wait()


async def looks_until_lost(monkeypatch: pytest.MonkeyPatch, *, tick_s: float, is_idle: bool) -> int:
    """How often a silent worker is looked at before it is lost."""
    clock = Clock(tick_s)
    monkeypatch.setattr(heartbeats, "time", clock)
    monkeypatch.setattr(heartbeats, "TICK_S", 0.0)
    messages = heartbeats.in_time(silent(), lambda: is_idle)
    assert await anext(messages) == 1
    clock.now_s = 0.0
    with pytest.raises(NotReady, match=f"no heartbeat for {3 if is_idle else 10} s"):
        await anext(messages)
    return round(clock.now_s / tick_s) - 1


@pytest.mark.parametrize(("is_idle", "bound_s"), [(True, 3.0), (False, 10.0)])
async def test_a_silent_worker_is_lost_after_its_bound(
    monkeypatch: pytest.MonkeyPatch, is_idle: bool, bound_s: float
) -> None:
    looks = await looks_until_lost(monkeypatch, tick_s=0.25, is_idle=is_idle)
    assert looks == bound_s / 0.25 + 1


@pytest.mark.parametrize("is_idle", [True, False])
async def test_a_pause_of_20_s_counts_as_half_a_second(monkeypatch: pytest.MonkeyPatch, is_idle: bool) -> None:
    looks = await looks_until_lost(monkeypatch, tick_s=20.0, is_idle=is_idle)
    assert looks == (3.0 if is_idle else 10.0) / 0.5 + 1


async def test_messages_pass_in_order_to_their_end() -> None:
    async def messages() -> AsyncIterator[int]:
        for number in range(3):
            yield number

    assert [number async for number in heartbeats.in_time(messages(), lambda: True)] == [0, 1, 2]
