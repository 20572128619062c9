"""A child process of the comparison: an engine's driver or its server, alone on the machine while it is measured."""

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
STOP_TIMEOUT_S = 20.0


class EngineFailure(Exception):
    """An engine failed; the message contains its output."""


class EngineGone(EngineFailure):
    """It has ended, or has to be: it did not answer in time."""


@contextmanager
def child(
    command: Sequence[str], *, log: Path, env: Mapping[str, str], stdout_to_log: bool = False
) -> Iterator[subprocess.Popen[bytes]]:
    """Start `command` in a session of its own; at the end its whole session is ended. stderr goes to `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=file if stdout_to_log else subprocess.PIPE,
            stderr=file,
            env={**env, "PYTHONUNBUFFERED": "1"},  # what it said last stands last in the log
            start_new_session=True,
            cwd=ROOT,
        )
        try:
            yield process
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGCONT)  # it may be stopped
    for number, timeout in ((signal.SIGTERM, STOP_TIMEOUT_S), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout)
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # what the engine had started and not ended


class Driver:
    """An engine's library in its own process (see engines/driver.py)."""

    def __init__(self, process: subprocess.Popen[bytes], *, log: Path) -> None:
        self._process = process
        self._log = log
        self._rest = b""

    def ready(self, timeout_s: float) -> dict[str, Any]:
        """Wait until the model is loaded; versions and load_s.

        Raises:
            EngineFailure: it ended or took longer.
        """
        return self._reply(timeout_s)

    def run(
        self,
        prompts: list[list[int]],
        *,
        num_outputs: int,
        concurrency: int,
        is_stream: bool,
        max_len: int,
        timeout_s: float,
    ) -> dict[str, float]:
        """One measurement; its figures in seconds.

        Args:
            max_len: tokens of the longest sequence that the engine gets ready for.

        Raises:
            EngineFailure: it failed, ended, took longer, or gave another number of tokens.
        """
        command = {
            "prompts": prompts,
            "num_outputs": num_outputs,
            "concurrency": concurrency,
            "is_stream": is_stream,
            "max_len": max_len,
        }
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        reply = self._reply(timeout_s)
        if "error" in reply:
            raise EngineFailure(f"{reply['error']} (see {self._log})")
        expected, num_tokens = len(prompts) * num_outputs, reply.pop("num_tokens")
        if num_tokens != expected:
            raise EngineFailure(f"generated {num_tokens} tokens, {expected} were asked for")
        return reply

    def _reply(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            if not select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise EngineGone(f"took longer than {timeout_s:.0f} s (see {self._log})")
            piece = os.read(self._process.stdout.fileno(), 65536)
            if not piece:
                raise self._ended()
            self._rest += piece
        line, self._rest = self._rest.split(b"\n", 1)
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _ended(self) -> EngineGone:
        return EngineGone(f"the process ended (see {self._log}): {last_line(self._log)}")


def last_line(log: Path) -> str:
    """The last line that says something."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"
