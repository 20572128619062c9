"""Children end when their parent ends, and only then."""

import socket
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from pagoda_common.process.children import can_listen, free_port, spawn_service, stop_process
from tests.process.stack import has_ended, poll_until

ROOT = str(Path(__file__).parents[3])
MODULE = "tests.fakes.idle_service"
PARENT = f"""
import time
from pagoda_common.process.children import spawn_service
spawn_service({MODULE!r}, [])
time.sleep(600)
"""


def read_pid(process: subprocess.Popen[bytes]) -> int:
    assert process.stdout is not None
    return int(process.stdout.readline())


def test_a_child_ends_when_its_parent_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, cwd=ROOT)
    try:
        child = psutil.Process(read_pid(parent))
    finally:
        parent.kill()
        parent.wait()
    poll_until(lambda: has_ended(child), what="the child is gone")


def test_a_child_outlives_the_thread_that_spawned_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    spawned: list[subprocess.Popen[bytes]] = []
    thread = threading.Thread(target=lambda: spawned.append(spawn_service(MODULE, [], stdout=subprocess.PIPE)))
    thread.start()
    thread.join()
    process = spawned[0]
    try:
        read_pid(process)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
    finally:
        assert stop_process(process, timeout_s=240) == -15


def test_a_child_whose_parent_is_gone_already_ends() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    child = subprocess.Popen([sys.executable, "-m", MODULE, f"--die-with-parent={gone.pid}"], cwd=ROOT)
    assert child.wait(240) == -9


def test_a_port_in_use_is_not_free() -> None:
    port = free_port()
    assert can_listen("127.0.0.1", port)
    with socket.create_server(("127.0.0.1", port)):
        assert not can_listen("127.0.0.1", port)
