"""The process that compiles the C++ kernels. It and its compilers end with this process, or on demand."""

import contextlib
import os
import signal
import subprocess
import sys
import threading

_ERROR_CHARACTERS = 2000
"""How much of the end of a compiler's output is shown."""


class Compilation:
    """Runs a command in a session of its own, one at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self.is_stopped = False
        """`stop` was called: nothing runs any more."""

    def run(self, command: list[str]) -> None:
        """Run `command`, whose stdin stays open for as long as this process lives (see `end_with_stdin`).

        Raises:
            RuntimeError: it failed, with the end of what it said, or was stopped.
        """
        with self._lock:
            if self.is_stopped:
                raise RuntimeError("stopped")
            process = self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        assert process.stderr is not None
        assert process.stdin is not None
        with process.stdin, process.stderr:
            said = process.stderr.read()
            code = process.wait()
        if code:
            raise RuntimeError("stopped" if self.is_stopped else said.strip()[-_ERROR_CHARACTERS:])

    def stop(self) -> None:
        """Kill what runs, with all that it has started; `run` raises from now on."""
        with self._lock:
            self.is_stopped = True
            if self._process is not None and self._process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)


def end_with_stdin() -> None:
    """Kill this process's group, compilers included, as soon as its stdin is closed: when its parent has ended."""

    def watch() -> None:
        sys.stdin.read()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
