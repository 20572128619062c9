"""Memory is given back after many events, at rest, and a few times only."""

import asyncio

import pytest

from pagoda_common.process import idle_memory
from pagoda_common.process.children import service_command, service_environment


async def releases(monkeypatch: pytest.MonkeyPatch, *, num_events: int, is_idle: bool) -> int:
    """How often memory was given back in 200 periods."""
    periods, compactions = 0, 0
    is_over = asyncio.Event()

    def idle() -> bool:
        nonlocal periods
        periods += 1
        if periods == 200:
            is_over.set()
        return is_idle

    def compact() -> None:
        nonlocal compactions
        compactions += 1

    monkeypatch.setattr(idle_memory, "PERIOD_S", 0)
    monkeypatch.setattr(idle_memory.gc, "collect", int)
    task = asyncio.create_task(
        idle_memory.release_memory_when_idle(count=lambda: num_events, is_idle=idle, compact=compact)
    )
    async with asyncio.timeout(240):
        await is_over.wait()
    task.cancel()
    return compactions


async def test_after_many_events_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = len(idle_memory.RELEASE_AFTER)
    assert await releases(monkeypatch, num_events=idle_memory.MIN_EVENTS, is_idle=True) == expected


async def test_once_after_a_few_events(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await releases(monkeypatch, num_events=idle_memory.MIN_EVENTS - 1, is_idle=True) == 1
    assert await releases(monkeypatch, num_events=0, is_idle=True) == 0


async def test_a_rest_without_a_new_event_gives_nothing_back_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something that is open for a while, and counts as no event, ends a rest."""
    rest = idle_memory.RELEASE_AFTER[-1] + 1
    story = [(5, True)] * rest + [(5, False)] + [(5, True)] * (rest + 2) + [(6, True)] * (rest + 2)
    periods = iter(story)
    num_periods, num_events, released = 0, 0, []
    is_over = asyncio.Event()

    def count() -> int:
        nonlocal num_periods, num_events, is_idle
        num_events, is_idle = next(periods, story[-1])
        num_periods += 1
        if num_periods > len(story):
            is_over.set()
        return num_events

    is_idle = True
    monkeypatch.setattr(idle_memory, "PERIOD_S", 0)
    monkeypatch.setattr(idle_memory.gc, "collect", int)
    release = idle_memory.release_memory_when_idle(
        count=count, is_idle=lambda: is_idle, compact=lambda: released.append(num_events)
    )
    task = asyncio.create_task(release)
    async with asyncio.timeout(240):
        await is_over.wait()
    task.cancel()
    assert released == [5, 6]


async def test_not_while_something_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await releases(monkeypatch, num_events=idle_memory.MIN_EVENTS, is_idle=False) == 0


async def test_free_pages_go_back_while_something_is_open_if_nothing_new_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    trims = []
    monkeypatch.setattr(idle_memory, "PERIOD_S", 0)
    monkeypatch.setattr(idle_memory, "trim_memory", lambda: trims.append(1))
    num_periods, is_over = 0, asyncio.Event()

    def is_idle() -> bool:
        nonlocal num_periods
        num_periods += 1
        if num_periods == 200:
            is_over.set()
        return False

    def compact() -> None:
        raise AssertionError("what is open may change")

    release = idle_memory.release_memory_when_idle(
        count=lambda: idle_memory.MIN_EVENTS, is_idle=is_idle, compact=compact, trims_while_open=True
    )
    task = asyncio.create_task(release)
    async with asyncio.timeout(240):
        await is_over.wait()
    task.cancel()
    assert len(trims) == len(idle_memory.RELEASE_AFTER)


def test_services_but_the_worker_run_on_glibcs_malloc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONMALLOC", raising=False)
    for module in ("pagoda_scheduler", "pagoda_frontend"):
        assert service_environment(service_command(module, []))["PYTHONMALLOC"] == "malloc"
    assert "PYTHONMALLOC" not in service_environment(service_command("pagoda_worker", []))
    monkeypatch.setenv("PYTHONMALLOC", "debug")
    assert service_environment(service_command("pagoda_scheduler", []))["PYTHONMALLOC"] == "debug"
