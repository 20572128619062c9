"""How things end: signals of `pagoda serve`, the last SIGKILL of a stop, what a supervisor leaves alone."""

import asyncio
import os
import signal
import subprocess
import sys
from typing import Any, cast

import pytest

from pagoda.commands.serve import stop_on_signals
from pagoda_common.process.children import stop_process
from pagoda_common.process.supervisor import BackOff, Child, RestartPolicy, Service
from pagoda_common.rpc.service import stop_signals


class FakeSupervisor:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def stop(self) -> None:
        self.calls.append("stop")

    def kill(self, exit_code: int) -> None:
        self.calls.append(exit_code)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_first_signal_ends_in_order_and_the_second_at_once(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    supervisor = FakeSupervisor()
    with stop_on_signals(cast("Any", supervisor)):
        for wanted in (["stop"], ["stop", 128 + number], ["stop", 128 + number, 128 + number]):
            os.kill(os.getpid(), number)
            async with asyncio.timeout(240):
                while len(supervisor.calls) < len(wanted):  # noqa: ASYNC110 (a signal sets no event)
                    await asyncio.sleep(0.001)
            assert supervisor.calls == wanted
    assert signal.getsignal(number) in (before, signal.SIG_DFL, signal.default_int_handler)


def test_a_service_drains_on_the_first_signal_and_ends_at_once_on_the_second() -> None:
    code = (
        "import asyncio, os, signal, sys\n"
        "from pagoda_common.rpc.service import stop_signals\n"
        "async def main():\n"
        "    with stop_signals() as stopping:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        await stopping.wait()\n"
        "        print('draining', flush=True)\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout == "draining\n"
    assert done.returncode == -signal.SIGTERM


async def test_both_signals_are_looked_for_and_neither_afterwards() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        with stop_signals() as stopping:
            os.kill(os.getpid(), number)
            await asyncio.wait_for(stopping.wait(), 240)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


def test_a_process_that_ignores_sigterm_is_killed_after_its_time() -> None:
    with subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert stop_process(process, timeout_s=0.05) == -signal.SIGKILL


def test_a_process_that_obeys_is_not_killed_and_one_that_ended_is_left_alone() -> None:
    code = (
        "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(3)); print('up', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert stop_process(process, timeout_s=240) == 3
        assert stop_process(process, timeout_s=240) == 3


class FakeProcess:
    """Takes signals; ends with the first that it obeys."""

    def __init__(self, *, obeys: signal.Signals) -> None:
        self.returncode: int | None = None
        self.signals: list[signal.Signals] = []
        self.obeys = obeys
        self.ended = asyncio.Event()

    def send_signal(self, number: signal.Signals) -> None:
        self.signals.append(number)
        if number == self.obeys:
            self.returncode = -number
            self.ended.set()


def child(process: FakeProcess, stop_timeout_s: float) -> Child:
    """A child whose keeper waits for `process`."""
    service = Service(name="a", command=("true",), stop_timeout_s=stop_timeout_s)
    made = Child(service, policy=RestartPolicy(), output=lambda *_: None)
    made.process = cast("Any", process)

    async def keep() -> None:
        await process.ended.wait()

    made._keeper = asyncio.create_task(keep())
    return made


async def test_a_child_gets_sigterm_and_then_sigkill() -> None:
    process = FakeProcess(obeys=signal.SIGKILL)
    await asyncio.wait_for(child(process, 0.01).stop(), 240)
    assert process.signals == [signal.SIGTERM, signal.SIGKILL]


async def test_a_child_that_obeys_gets_sigterm_alone() -> None:
    process = FakeProcess(obeys=signal.SIGTERM)
    stopping = child(process, 240)
    await asyncio.wait_for(stopping.stop(), 240)
    await stopping.stop()
    assert process.signals == [signal.SIGTERM], "one that has ended gets nothing"


async def test_killing_a_child_needs_no_sigterm() -> None:
    process = FakeProcess(obeys=signal.SIGKILL)
    child(process, 240).kill()
    assert process.signals == [signal.SIGKILL]


async def test_silence_kills_a_child_unless_it_is_being_stopped() -> None:
    process = FakeProcess(obeys=signal.SIGKILL)
    running = child(process, 240)
    running._kill_silent("no heartbeat")
    assert process.signals == [signal.SIGKILL]
    process = FakeProcess(obeys=signal.SIGKILL)
    stopping = child(process, 240)
    stopping._stopping.set()
    stopping._kill_silent("no heartbeat")
    assert process.signals == [], "`stop` has a bound of its own"
    process.ended.set()


def test_pauses_never_grow_beyond_their_bound() -> None:
    back_off = BackOff(RestartPolicy(max_failures=10**6))
    pauses = [back_off.next_delay_s(uptime_s=0.0) for _ in range(60)]
    assert pauses[:8] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0])
    assert set(pauses[7:]) == {10.0}


def test_health_begins_with_its_last_second() -> None:
    back_off = BackOff(RestartPolicy())
    assert back_off.next_delay_s(uptime_s=4.9) == 0.1
    assert back_off.next_delay_s(uptime_s=4.9) == 0.2
    assert back_off.next_delay_s(uptime_s=5.0) == 0.1
    assert Service(name="a", command=()).stop_timeout_s == 10.0
