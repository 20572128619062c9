"""Waits until the machine has nothing to do: work that one process leaves behind is not measured with the next."""

import os
import time
from pathlib import Path

LOOK_S = 0.5
"""For how long no one may have computed."""
IDLE_SHARE = 0.04
"""Share of one processor that other programs may still use."""


def busy_s() -> float:
    """Seconds of processor time that the machine has spent, all processors together."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def wait_until_idle(*, timeout_s: float) -> bool:
    """Whether the machine came to rest in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        before = busy_s()
        time.sleep(LOOK_S)
        if busy_s() - before <= IDLE_SHARE * LOOK_S:
            return True
    return False
