"""Heartbeats of a child process to its supervisor, through an inherited pipe.

A process that is stopped, or whose event loop is stuck, looks alive to the operating system but serves no requests.
Source: the watchdog of systemd's sd_notify; a pipe needs no name in the file system.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

ENVIRONMENT = "PAGODA_HEARTBEAT_FD"
PERIOD_S = 0.5
MAX_TICK_S = 1.0
"""Time that counts between two looks of the reader: it may have been stopped itself."""


async def beat() -> None:
    """Tell the parent twice a second that this event loop turns, until cancelled; at once over when no one listens."""
    descriptor = int(os.environ.get(ENVIRONMENT, "-1"))
    if descriptor < 0:
        return
    os.set_blocking(descriptor, False)
    with contextlib.suppress(BrokenPipeError, OSError):
        while True:
            with contextlib.suppress(BlockingIOError):
                os.write(descriptor, b".")
            await asyncio.sleep(PERIOD_S)


def is_stopped(pid: int) -> bool:
    """Whether the process was stopped by a signal: a fact, where a missing heartbeat may be a busy machine.

    False where the system does not tell (no /proc). A debugger's tracing stop is another state.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False


class HeartbeatReader:
    """The parent's end of one child's pipe."""

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe()
        """`write_end`: to be inherited by the child, and closed here with `started`."""
        self._has_begun = False
        self._silence_s = 0.0

    def environment(self) -> dict[str, str]:
        """Environment of the child."""
        return {ENVIRONMENT: str(self.write_end)}

    def started(self) -> None:
        """The child has its end."""
        os.close(self.write_end)

    async def watch(
        self, *, pid: int, silent_after_s: float, stopped_after_s: float, on_silence: Callable[[str], None]
    ) -> None:
        """Call `on_silence` once, with the reason: process `pid` was stopped for `stopped_after_s`, or its heartbeats,
        after they have begun, are missing for `silent_after_s`."""
        loop = asyncio.get_running_loop()
        os.set_blocking(self._read_end, False)
        loop.add_reader(self._read_end, self._read)
        try:
            looked_s, stopped_s = time.monotonic(), 0.0
            while self._silence_s < silent_after_s and stopped_s < stopped_after_s:
                await asyncio.sleep(PERIOD_S)
                now_s = time.monotonic()
                tick_s = min(now_s - looked_s, MAX_TICK_S)
                if self._has_begun:
                    self._silence_s += tick_s
                stopped_s = stopped_s + tick_s if is_stopped(pid) else 0.0
                looked_s = now_s
            is_silent = self._silence_s >= silent_after_s
            on_silence(f"no heartbeat for {silent_after_s:g} s" if is_silent else f"stopped for {stopped_after_s:g} s")
        finally:
            loop.remove_reader(self._read_end)

    def close(self) -> None:
        """No one watches any more."""
        os.close(self._read_end)

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            if os.read(self._read_end, 4096):
                self._has_begun, self._silence_s = True, 0.0
            else:  # the child has ended
                asyncio.get_running_loop().remove_reader(self._read_end)
