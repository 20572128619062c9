"""Clocks and limits of processes: heartbeats and a reader that was stopped itself, open files, memory after bursts."""

import asyncio
import gc
import logging
import os
import resource
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pagoda_common.process import children, heartbeat, idle_memory
from pagoda_common.process.heartbeat import ENVIRONMENT, HeartbeatReader, beat
from pagoda_common.process.logging import (
    ACCESS_LOGGER,
    GRPC_LOGGER,
    configure_logging,
    is_no_probe,
    is_not_caused_by_clients,
)


class Clock:
    """Time passes only where someone sleeps; each sleep takes the next of `ticks`, or what it asked for."""

    def __init__(self, ticks: list[float]) -> None:
        self.now = 0.0
        self.ticks = ticks
        self.num_sleeps = 0

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.num_sleeps += 1
        self.now += self.ticks.pop(0) if self.ticks else seconds
        await asyncio.wait({asyncio.ensure_future(_turn())})


async def _turn() -> None:
    """One round of the loop, in which readers are called."""


async def watch(
    monkeypatch: pytest.MonkeyPatch,
    *,
    ticks: list[float] | None = None,
    has_begun: bool = True,
    is_stopped: bool = False,
    bound_s: float = 6.0,
    stopped_after_s: float = 1.0,
) -> tuple[str, int]:
    """What a reader says of a silent child, and after how many looks."""
    clock = Clock(ticks or [])
    monkeypatch.setattr(heartbeat.time, "monotonic", clock.monotonic)
    monkeypatch.setattr(heartbeat.asyncio, "sleep", clock.sleep)
    monkeypatch.setattr(heartbeat, "is_stopped", lambda _: is_stopped)
    reader = HeartbeatReader()
    said: list[str] = []
    if has_begun:
        os.write(reader.write_end, b".")
        reader._read()
    watching = reader.watch(pid=1, silent_after_s=bound_s, stopped_after_s=stopped_after_s, on_silence=said.append)
    await watching
    reader.started()
    reader.close()
    assert len(said) == 1
    return said[0], clock.num_sleeps


async def test_silence_is_counted_from_the_last_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await watch(monkeypatch) == ("no heartbeat for 6 s", 12)


async def test_a_reader_that_was_stopped_itself_does_not_blame_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await watch(monkeypatch, ticks=[100.0]) == ("no heartbeat for 6 s", 11), "100 s count as one"


async def test_a_stopped_child_is_noticed_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await watch(monkeypatch, is_stopped=True) == ("stopped for 1 s", 2)
    assert await watch(monkeypatch, is_stopped=True, has_begun=False) == ("stopped for 1 s", 2)


async def test_a_child_that_never_beat_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock([])
    monkeypatch.setattr(heartbeat.time, "monotonic", clock.monotonic)
    monkeypatch.setattr(heartbeat, "is_stopped", lambda _: clock.num_sleeps > 500)
    monkeypatch.setattr(heartbeat.asyncio, "sleep", clock.sleep)
    reader, said = HeartbeatReader(), []
    await reader.watch(pid=1, silent_after_s=6.0, stopped_after_s=1.0, on_silence=said.append)
    reader.started()
    reader.close()
    assert said == ["stopped for 1 s"]
    assert clock.now > 200


async def test_a_pipe_without_a_child_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It can be read forever: the parent would do nothing else."""
    reader, num_reads = HeartbeatReader(), 0
    read = reader._read

    def count() -> None:
        nonlocal num_reads
        num_reads += 1
        read()

    monkeypatch.setattr(reader, "_read", count)
    watching = asyncio.create_task(
        reader.watch(pid=os.getpid(), silent_after_s=1000.0, stopped_after_s=1000.0, on_silence=lambda reason: None)
    )
    await asyncio.sleep(0)
    os.write(reader.write_end, b".")
    reader.started()
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert num_reads == 2, "what the child wrote, and its end"
    watching.cancel()
    await asyncio.wait([watching])
    reader.close()


async def test_a_child_beats_into_the_pipe_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = HeartbeatReader()
    (name, number), *others = reader.environment().items()
    assert (name, int(number), others) == (ENVIRONMENT, reader.write_end, [])
    monkeypatch.setenv(name, number)
    task = asyncio.create_task(beat())
    await asyncio.sleep(0)
    assert os.read(reader._read_end, 16) == b"."
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    reader.started()
    reader.close()
    for end in (reader._read_end, reader.write_end):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(end)
    monkeypatch.delenv(name)
    await asyncio.wait_for(beat(), 240)


def test_as_many_files_may_be_open_as_the_system_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, tuple[int, int]]] = []
    monkeypatch.setattr(children.resource, "getrlimit", lambda _: (1024, 4096))
    monkeypatch.setattr(children.resource, "setrlimit", lambda which, limits: told.append((which, limits)))
    children.raise_file_limit()
    assert told == [(resource.RLIMIT_NOFILE, (4096, 4096))]
    monkeypatch.setattr(children.resource, "getrlimit", lambda _: (4096, 4096))
    children.raise_file_limit()
    assert len(told) == 1


class Process:
    """What `release_memory_when_idle` sees, second for second; it ends when the script does."""

    def __init__(self, script: list[tuple[int, bool]]) -> None:
        self.script = iter(script)
        self.now = (0, True)
        self.num_periods = 0
        self.released_at: list[int] = []

    async def sleep(self, seconds: float) -> None:
        assert seconds == idle_memory.PERIOD_S == 0.5
        self.num_periods += 1
        try:
            self.now = next(self.script)
        except StopIteration:
            raise asyncio.CancelledError from None

    async def run(
        self,
        monkeypatch: pytest.MonkeyPatch,
        forget: Callable[[], bool] | None = None,
        *,
        trims_while_open: bool = False,
    ) -> list[int]:
        monkeypatch.setattr(idle_memory.asyncio, "sleep", self.sleep)
        monkeypatch.setattr(idle_memory, "trim_memory", lambda: self.released_at.append(self.num_periods))
        monkeypatch.setattr(idle_memory.gc, "collect", lambda: 0)
        with pytest.raises(asyncio.CancelledError):
            await idle_memory.release_memory_when_idle(
                count=lambda: self.now[0],
                is_idle=lambda: self.now[1],
                forget=forget,
                trims_while_open=trims_while_open,
            )
        return self.released_at


async def test_memory_is_given_back_after_many_events_and_some_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    rest = [(1000, True)] * 40
    # The first period sees new events; rest is counted from the next.
    assert await Process([(1000, True), *rest]).run(monkeypatch) == [2, 4, 8, 16, 32]
    assert await Process([(999, True)] * 80).run(monkeypatch) == [32], "few events: after the longest rest, and once"
    assert await Process([(0, True)] * 80).run(monkeypatch) == []
    assert await Process([(1000, False)] * 40).run(monkeypatch) == []


async def test_memory_of_what_is_forgotten_at_rest_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    process, asked_at = Process([(0, True)] * 22 + [(1, True)] + [(1, False)] * 50), []

    def forget() -> bool:
        asked_at.append(process.num_periods)
        return len(asked_at) == 2  # the first time another process still needs it

    assert await process.run(monkeypatch, forget) == [21]
    assert asked_at == [20, 21, 22], "not before a long rest, nor while something is open"


@pytest.mark.parametrize("num_open", [5, 31, 32, 50])
@pytest.mark.parametrize("trims_while_open", [False, True])
async def test_rest_begins_when_the_last_request_ends(
    monkeypatch: pytest.MonkeyPatch, num_open: int, trims_while_open: bool
) -> None:
    process = Process([(1, False)] * num_open + [(1, True)] * 80)
    # The first period after the end sees that it has ended.
    assert await process.run(monkeypatch, trims_while_open=trims_while_open) == [num_open + 32]


async def test_new_events_interrupt_the_rest_and_few_of_them_are_not_worth_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = [(1000, True), (1000, True), *[(1000 + i, True) for i in range(1, 20)], *[(1019, True)] * 3]
    assert await Process(script).run(monkeypatch) == [2, 22, 24], "the rest starts again"
    again = [(1000, True)] * 40 + [(10, True)] * 5 + [(1010, True)] * 3
    assert await Process(again).run(monkeypatch) == [2, 4, 8, 16, 32, 47], "a count that is reset counts from zero"


def test_what_exists_is_left_out_of_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    monkeypatch.setattr(idle_memory.gc, "collect", lambda: done.append("collect"))
    monkeypatch.setattr(idle_memory.gc, "freeze", lambda: done.append("freeze"))
    monkeypatch.setattr(idle_memory.gc, "set_threshold", done.append)
    idle_memory.exempt_what_exists()
    assert done == ["collect", "freeze", 20_000]
    done.clear()
    idle_memory.exempt_what_exists(collects=False)
    assert done == ["freeze", 20_000]
    assert gc.isenabled()


def test_imports_are_left_out_of_collections_meanwhile_and_later(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(idle_memory.gc, "freeze", lambda: seen.append(gc.isenabled()))
    with idle_memory.without_collections():
        seen.append(gc.isenabled())
    assert seen == [False, False], "frozen before a collection can come"
    assert gc.isenabled()
    with pytest.raises(ImportError), idle_memory.without_collections():
        raise ImportError
    assert gc.isenabled()


@pytest.fixture
def plain_logging() -> Iterator[None]:
    """Puts back what `configure_logging` changes."""
    root, filtered = logging.getLogger(), [logging.getLogger(name) for name in (ACCESS_LOGGER, GRPC_LOGGER)]
    before = root.handlers[:], root.level, [logger.filters[:] for logger in filtered]
    for logger in filtered:
        logger.filters[:] = []
    yield
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    for logger, filters in zip(filtered, before[2], strict=True):
        logger.filters[:] = filters


@pytest.mark.usefixtures("plain_logging")
@pytest.mark.parametrize(
    ("level", "wanted", "is_filtered"),
    [("debug", 10, False), ("info", 20, True), ("WARNING", 30, True), ("error", 40, True), ("loud", 20, True)],
)
def test_probes_are_logged_at_level_debug_alone(level: str, wanted: int, is_filtered: bool) -> None:
    configure_logging("test", level)
    assert logging.getLogger().level == wanted
    assert (is_no_probe in logging.getLogger(ACCESS_LOGGER).filters) is is_filtered
    assert (is_not_caused_by_clients in logging.getLogger(GRPC_LOGGER).filters) is is_filtered
    assert logging.getLogger("httpx").level == logging.WARNING


async def test_a_heartbeat_ends_the_silence_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock([])
    monkeypatch.setattr(heartbeat.time, "monotonic", clock.monotonic)
    monkeypatch.setattr(heartbeat, "is_stopped", lambda _: False)
    reader, said = HeartbeatReader(), list[str]()

    async def sleep(seconds: float) -> None:
        if clock.num_sleeps in (0, 5, 10, 15):
            os.write(reader.write_end, b".")
            reader._read()
        await clock.sleep(seconds)

    monkeypatch.setattr(heartbeat.asyncio, "sleep", sleep)
    await reader.watch(pid=1, silent_after_s=3.0, stopped_after_s=1.0, on_silence=said.append)
    reader.started()
    reader.close()
    assert said == ["no heartbeat for 3 s"]
    assert clock.num_sleeps == 15 + 6, "counted from the last one"


@pytest.mark.parametrize("has_pidfd", [True, False])
@pytest.mark.parametrize("lives", [True, False])
def test_a_process_ends_with_its_parent(has_pidfd: bool, lives: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """However the parent ended, and also before anyone looked."""
    done: list[Any] = []
    parents = [77] * 3 + [1] if lives else [1]
    gone, still = os.pipe()

    def pidfd_open(pid: int) -> int:
        if not has_pidfd:
            raise OSError("no such call")
        done.append(("watched", pid))
        return gone

    class Poll:
        def register(self, descriptor: int, events: int) -> None:
            done.append(("registered", descriptor == gone, events == children.select.POLLIN))

        def poll(self) -> None:
            done.append("waited")

    monkeypatch.setattr(children.os, "pidfd_open", pidfd_open, raising=False)
    monkeypatch.setattr(children.os, "getppid", lambda: parents.pop(0) if len(parents) > 1 else parents[0])
    monkeypatch.setattr(children.os, "kill", lambda pid, number: done.append((pid == os.getpid(), number)))
    monkeypatch.setattr(children.select, "poll", Poll)
    monkeypatch.setattr(children.time, "sleep", lambda seconds: done.append(seconds))
    children._watch_parent(77)
    if has_pidfd:
        waits: list[Any] = [("watched", 77), *([("registered", True, True), "waited"] if lives else [])]
    else:
        waits = [0.5] * 3 if lives else []
    assert done == [*waits, (True, signal.SIGKILL)]
    for end in (gone, still):
        os.close(end)
