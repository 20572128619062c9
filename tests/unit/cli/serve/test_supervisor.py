"""The supervisor over small children of its own making."""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from pagoda_common.process.heartbeat import HeartbeatReader
from pagoda_common.process.supervisor import BackOff, Child, RestartPolicy, Service, Supervisor, describe_exit

QUICK = RestartPolicy(first_delay_s=0.01, max_delay_s=0.02, max_failures=4)
OBEDIENT = "import time; print('up', flush=True); time.sleep(60)"
STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


class Output:
    """Collects children's lines, and waits for one."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self._changed = asyncio.Event()

    def __call__(self, service: str, line: str) -> None:
        self.lines.append((service, line))
        self._changed.set()

    async def wait_for(self, line: tuple[str, str], *, times: int = 1) -> None:
        while self.lines.count(line) < times:
            self._changed.clear()
            await asyncio.wait_for(self._changed.wait(), 240)


def service(name: str, code: str, *, stop_timeout_s: float = 30.0) -> Service:
    return Service(name=name, command=(sys.executable, "-c", code), stop_timeout_s=stop_timeout_s)


def test_the_pause_doubles_up_to_its_bound_and_ends_in_giving_up() -> None:
    back_off = BackOff(RestartPolicy(first_delay_s=0.1, max_delay_s=0.5, max_failures=5))
    assert [back_off.next_delay_s(uptime_s=1) for _ in range(5)] == [0.1, 0.2, 0.4, 0.5, None]


def test_a_minute_of_health_forgets_the_failures() -> None:
    back_off = BackOff(RestartPolicy(max_failures=3))
    assert [back_off.next_delay_s(uptime_s=uptime) for uptime in (0, 0, 60, 0, 0)] == [0.1, 0.2, 0.1, 0.2, None]


def test_exits_are_described_in_words() -> None:
    assert describe_exit(1) == "ended with exit code 1"
    assert describe_exit(-9) == "was killed by SIGKILL"
    assert describe_exit(-99) == "was killed by signal 99"


async def test_stop_ends_every_child_in_order_and_returns_0() -> None:
    ends = (
        "import signal, sys, time\nsignal.signal(15, lambda *_: (print('end', flush=True), sys.exit(0)))\n" + OBEDIENT
    )
    output = Output()
    supervisor = Supervisor(services=[service("a", ends), service("b", ends)], output=output, policy=QUICK)
    running = asyncio.create_task(supervisor.run())
    await output.wait_for(("a", "up"))
    await output.wait_for(("b", "up"))
    supervisor.stop()
    assert await running == 0
    assert output.lines[-2:] == [("a", "end"), ("b", "end")]


async def test_a_killed_child_is_started_again() -> None:
    output = Output()
    supervisor = Supervisor(services=[service("a", OBEDIENT)], output=output, policy=QUICK)
    running = asyncio.create_task(supervisor.run())
    await output.wait_for(("a", "up"))
    process = supervisor.children[0].process
    assert process is not None
    process.kill()
    await output.wait_for(("a", "up"), times=2)
    supervisor.stop()
    assert await running == 0


async def test_a_child_that_keeps_failing_is_given_up_with_code_1(caplog: pytest.LogCaptureFixture) -> None:
    output = Output()
    services = [service("good", OBEDIENT), service("bad", "print('oh', flush=True); raise SystemExit(7)")]
    supervisor = Supervisor(services=services, output=output, policy=QUICK)
    assert await supervisor.run() == 1
    assert output.lines.count(("bad", "oh")) == 4
    assert "bad failed 4 times in a row; the last time it ended with exit code 7" in caplog.text


async def test_a_refused_configuration_ends_everything_at_once_with_code_2(caplog: pytest.LogCaptureFixture) -> None:
    output = Output()
    services = [service("good", OBEDIENT), service("bad", "print('wrong flag', flush=True); raise SystemExit(2)")]
    assert await Supervisor(services=services, output=output).run() == 2
    assert output.lines.count(("bad", "wrong flag")) == 1
    assert "bad refused its configuration" in caplog.text


async def test_a_child_that_ignores_sigterm_is_killed() -> None:
    output = Output()
    supervisor = Supervisor(services=[service("a", STUBBORN, stop_timeout_s=0.1)], output=output)
    running = asyncio.create_task(supervisor.run())
    await output.wait_for(("a", "up"))
    supervisor.stop()
    assert await running == 0


async def test_kill_ends_stubborn_children_at_once_with_its_code() -> None:
    output = Output()
    supervisor = Supervisor(services=[service("a", STUBBORN), service("b", STUBBORN)], output=output)
    running = asyncio.create_task(supervisor.run())
    await output.wait_for(("a", "up"))
    await output.wait_for(("b", "up"))
    supervisor.stop()
    await asyncio.sleep(0)
    supervisor.kill(130)
    assert await running == 130


async def test_stop_during_the_pause_before_a_restart_ends_it() -> None:
    output = Output()
    policy = RestartPolicy(first_delay_s=600, max_delay_s=600)
    supervisor = Supervisor(services=[service("a", "print('oh')")], output=output, policy=policy)
    running = asyncio.create_task(supervisor.run())
    await output.wait_for(("a", "oh"))
    supervisor.stop()
    assert await asyncio.wait_for(running, 240) == 0


async def test_a_child_with_an_endless_line_goes_on() -> None:
    output = Output()
    code = "import sys; sys.stdout.write('x' * 3_000_000 + '\\n'); print('after')"
    policy = RestartPolicy(max_failures=1)
    assert await Supervisor(services=[service("a", code)], output=output, policy=policy).run() == 1
    assert ("a", "after") in output.lines


async def test_a_line_that_is_no_utf_8_is_shown_as_far_as_it_can_be() -> None:
    read_end, write_end = os.pipe()
    os.write(write_end, b"\xff text\nafter\n")
    os.close(write_end)
    output = Output()
    await Child(service("a", ""), policy=QUICK, output=output)._pump(read_end)
    assert output.lines == [("a", "\ufffd text"), ("a", "after")]


async def test_a_grandchild_that_holds_the_pipe_does_not_hide_the_childs_end(tmp_path: Path) -> None:
    release = tmp_path / "release"
    waiting = f"import os, time\nwhile not os.path.exists({str(release)!r}): time.sleep(0.1)"
    code = (
        "import subprocess, sys\n"
        f"subprocess.Popen([sys.executable, '-c', {waiting!r}], start_new_session=True)\n"
        "raise SystemExit(2)"
    )
    try:
        assert await asyncio.wait_for(Supervisor(services=[service("a", code)], output=Output()).run(), 240) == 2
    finally:
        release.touch()


@pytest.mark.parametrize("hang", ["os.kill(os.getpid(), signal.SIGSTOP)", "time.sleep(60)"], ids=["stop", "busy"])
async def test_a_child_that_hangs_is_killed_and_started_again(hang: str, caplog: pytest.LogCaptureFixture) -> None:
    code = (
        "import asyncio, os, signal, sys, time\n"
        "from pagoda_common.process.heartbeat import beat\n"
        "async def main():\n"
        "    beating = asyncio.create_task(beat())\n"
        "    await asyncio.sleep(0.1)\n"
        "    print('up', flush=True)\n"
        "    await asyncio.sleep(0.1)\n"
        f"    {hang}\n"
        "asyncio.run(main())\n"
    )
    output = Output()
    silent_after_s = 1.0 if hang.startswith("time") else 3600.0
    policy = RestartPolicy(first_delay_s=0.01, max_delay_s=0.02, silent_after_s=silent_after_s, stopped_after_s=0.5)
    supervisor = Supervisor(services=[service("a", code)], output=output, policy=policy)
    running = asyncio.create_task(supervisor.run())
    await output.wait_for(("a", "up"), times=2)
    supervisor.kill(0)
    assert await running == 0
    assert ("no heartbeat" if hang.startswith("time") else "stopped for") in caplog.text


async def test_a_child_without_heartbeats_is_left_alone() -> None:
    output = Output()
    policy = RestartPolicy(silent_after_s=0.2)
    supervisor = Supervisor(services=[service("a", OBEDIENT)], output=output, policy=policy)
    running = asyncio.create_task(supervisor.run())
    await output.wait_for(("a", "up"))
    await asyncio.sleep(1.5)
    supervisor.stop()
    assert await running == 0
    assert output.lines.count(("a", "up")) == 1


async def test_a_child_that_is_stopped_while_it_starts_gets_sigterm(monkeypatch: pytest.MonkeyPatch) -> None:
    start, is_starting, may_start = asyncio.create_subprocess_exec, asyncio.Event(), asyncio.Event()

    async def slowly(*args: Any, **options: Any) -> asyncio.subprocess.Process:
        is_starting.set()
        await may_start.wait()
        return await start(*args, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", slowly)
    child = Child(service("a", OBEDIENT, stop_timeout_s=60.0), policy=QUICK, output=Output())
    child.start()
    await is_starting.wait()
    stopping = asyncio.create_task(child.stop())
    await asyncio.sleep(0)
    may_start.set()
    await stopping
    assert child.process is not None
    assert child.process.returncode == -signal.SIGTERM


async def test_heartbeats_are_closed_when_no_one_reads_them_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    order = []

    class Reader(HeartbeatReader):
        async def watch(self, **options: Any) -> None:
            try:
                await super().watch(**options)
            finally:
                order.append("watch")

        def close(self) -> None:
            order.append("close")
            super().close()

    monkeypatch.setattr("pagoda_common.process.supervisor.HeartbeatReader", Reader)
    assert await Supervisor(services=[service("a", "raise SystemExit(2)")], output=Output()).run() == 2
    assert order == ["watch", "close"]


async def test_a_child_that_ended_leaves_no_descriptor_open() -> None:
    supervisor = Supervisor(services=[service("a", "raise SystemExit(2)")], output=Output())
    before = set(os.listdir("/proc/self/fd"))
    assert await supervisor.run() == 2
    assert set(os.listdir("/proc/self/fd")) == before
