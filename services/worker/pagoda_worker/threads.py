"""Threads that compute on a CPU: how many, and how they wait for each other. Reads the machine; knows no torch."""

import os
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path

SINGLE_THREAD_PARAMETERS = 50_000_000
"""Models below this size compute on one thread unless a number is given: their operations are too short to share, and
waiting for a second thread stalls a step whenever another process holds that core."""
ENCODER_PARAMETERS = 5_000_000
"""The same for models without a cache: each of their steps is some thousand tokens long."""
SPIN_COUNT = 3000
"""Turns that a thread of GNU's OpenMP looks for work before it sleeps: about 100 us. Between two operations of a step,
mostly below 30 us apart, it stays awake; between two steps it sleeps."""
FEW_ROWS = 4
"""Tokens up to which a step mostly waits for weights from memory."""
HELPED_ROWS = 16
"""Tokens up to which helpers are about as fast as threads that no one takes a core from."""


@dataclass(frozen=True, slots=True)
class ThreadCounts:
    """Threads of a step by the number of its tokens."""

    most: int
    few_rows: int
    """For FEW_ROWS at most."""

    def of(self, num_rows: int) -> int:
        """For a step of so many tokens."""
        return self.few_rows if num_rows <= FEW_ROWS else self.most

    def helpers_of(self, num_rows: int) -> int:
        """Helpers instead of the other threads, where a model has all its layers in one call."""
        return self.most - 1 if num_rows <= HELPED_ROWS else 0


def set_wait_policy(environment: MutableMapping[str, str]) -> None:
    """Have OpenMP's threads spin shortly, then sleep, unless the environment says something of it already.

    Has to happen before torch is imported. A thread that sleeps is 50 us late at every operation, hundreds of which
    make a step. One that spins for long takes the core from scheduler and frontend, and one that spins on a core of
    another process stalls for a time slice (8 ms): with more threads than cores no thread spins.
    """
    if "OMP_WAIT_POLICY" in environment:
        return
    environment["OMP_WAIT_POLICY"] = "PASSIVE"  # other runtimes than GNU's sleep at once
    environment.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))


def thread_counts(num_parameters: int, *, leaves_core: bool, only_pools: bool = False) -> ThreadCounts:
    """Threads for a model of this size: the cores that this process may use, one for a small model.

    Args:
        leaves_core: steps of few tokens leave one core to the other services of this machine. Memory gives most of its
            speed to one core less, and a thread that shares its core with another process is late at every operation,
            where the others wait for it.
        only_pools: the model is an encoder, whose steps have many tokens.
    """
    fewest = ENCODER_PARAMETERS if only_pools else SINGLE_THREAD_PARAMETERS
    most = 1 if num_parameters < fewest else num_usable_cores()
    return ThreadCounts(most, max(1, most - 1) if leaves_core else most)


def num_usable_cores(root: Path = Path("/sys")) -> int:
    """Physical cores among the CPUs of this process, no more than its control group's share of time; at least 1.

    Two threads on the two halves of one core are no faster than one: both wait for its vector units.

    Args:
        root: of the kernel's files.
    """
    cpus = os.sched_getaffinity(0)
    siblings = {_read(root / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in cpus}
    limit = _cpu_limit(root)
    return max(1, len(siblings) if limit is None else min(len(siblings), int(limit)))


def _cpu_limit(root: Path) -> float | None:
    """CPUs that the control group may keep busy; None is no limit."""
    quota, _, period = _read(root / "fs/cgroup/cpu.max").partition(" ")
    if not quota:
        quota, period = (_read(root / f"fs/cgroup/cpu/cpu.cfs_{name}_us") for name in ("quota", "period"))
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
