"""Real processes for the tests of this folder: a `pagoda serve` to start, watch, kill and end."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from pagoda_common.process.children import free_port
from pagoda_common.rpc.local_token import find_token_file

WAIT_S = 600.0
"""How long a poll may take on a slow machine; only a broken build waits so long."""
MODULES = {"frontend": "pagoda_frontend", "scheduler": "pagoda_scheduler", "worker": "pagoda_worker"}


def poll_until(
    is_true: Callable[[], Any], *, what: str, log: Callable[[], str] = str, timeout_s: float = WAIT_S
) -> Any:
    """The first true value of `is_true`; fails with `what` and the end of the log."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        value = is_true()
        if value:
            return value
        time.sleep(0.1)
    raise AssertionError(f"waited {timeout_s:g} s in vain: {what}\n{log()[-6000:]}")


def get_status(url: str) -> int:
    """HTTP status of a GET; 0 when no one answers."""
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def ask(url: str, *, max_tokens: int = 16, seed: int | None = None) -> str:
    """A greedy chat answer."""
    body: dict[str, Any] = {
        "model": "pagoda-tiny",
        "messages": [{"role": "user", "content": "Tell me a story about a dog."}],
        "temperature": 0,
        "max_tokens": max_tokens,
    }
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=240) as response:
        return str(json.load(response)["choices"][0]["message"]["content"])


def shown_token(scheduler_port: int) -> tuple[tuple[str, str], ...]:
    """Metadata that shows the token of the `pagoda serve` whose scheduler listens there, as its user finds it."""
    file = poll_until(lambda: find_token_file(scheduler_port), what="a token is left")
    return (("authorization", f"Bearer {Path(file).read_text().strip()}"),)


def has_ended(process: psutil.Process) -> bool:
    """Whether it is gone or only waits to be reaped."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class Process:
    """A child process and its log."""

    def __init__(self, *argv: str, cwd: str | None = None) -> None:
        self._log = tempfile.NamedTemporaryFile(prefix="pagoda-test-", suffix=".log")  # noqa: SIM115, closed in end()
        # A session of its own: what a test sends to the group reaches no one else.
        self.popen = subprocess.Popen(
            [sys.executable, *argv],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=cwd,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )

    @property
    def log(self) -> str:
        """All output so far."""
        return Path(self._log.name).read_text(errors="replace")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to this process alone."""
        self.popen.send_signal(number)

    def wait(self) -> int:
        """Its exit code."""
        poll_until(lambda: self.popen.poll() is not None, what="the process ends", log=lambda: self.log)
        return self.popen.wait()

    def end(self) -> None:
        """Kill it if it still runs."""
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait()
        self._log.close()


class Stack(Process):
    """`pagoda serve` on free ports."""

    def __init__(self, *flags: str) -> None:
        self.port, self.grpc_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        ports = [f"--port={self.port}", f"--grpc-port={self.grpc_port}"]
        super().__init__("-m", "pagoda", "serve", *ports, *flags)

    def is_ready(self) -> bool:
        """Whether /ready says so."""
        return get_status(f"{self.url}/ready") == 200

    def wait_ready(self) -> None:
        """Until requests are served; fails at once when the stack has ended."""

        def ready_or_ended() -> bool:
            assert self.popen.poll() is None, f"pagoda serve ended with {self.popen.returncode}\n{self.log[-6000:]}"
            return self.is_ready()

        poll_until(ready_or_ended, what="/ready answers 200", log=lambda: self.log)

    def children(self) -> list[psutil.Process]:
        """Processes of the stack below `pagoda serve`, those of now."""
        return psutil.Process(self.popen.pid).children(recursive=True)

    def service(self, name: str) -> psutil.Process:
        """The process of frontend, scheduler or worker; waits for it during a restart."""

        def find() -> psutil.Process | None:
            for process in self.children():
                try:
                    if MODULES[name] in process.cmdline():
                        return process
                except psutil.Error:
                    continue
            return None

        found: psutil.Process = poll_until(find, what=f"a {name} process", log=lambda: self.log)
        return found

    def end(self) -> None:
        """Kill what is left of it."""
        children = [] if self.popen.poll() is not None else self.children()
        for process in children:
            process.kill()
        super().end()
