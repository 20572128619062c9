"""Number of CPU threads, and how they wait for each other. Reads the machine's properties; knows no torch."""

import os
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path

SINGLE_THREAD_PARAMETERS = 50_000_000
"""Parameters below which a model uses one thread unless a number is given: its operations are too short to divide, and
waiting for a second thread stalls a step whenever another process uses that core."""
ENCODER_PARAMETERS = 5_000_000
"""The same for models without a cache, whose steps have some thousand tokens."""
SPIN_COUNT = 3000
"""Turns that a thread of GNU's OpenMP looks for work before it sleeps: about 100 us. Between two operations of a step,
mostly below 30 us apart, it stays awake; between two steps it sleeps."""
FEW_ROWS = 4
"""Number of tokens up to which a step mostly waits for weights from memory."""
HELPED_ROWS = 16
"""Number of tokens up to which helpers are about as fast as threads with exclusive cores."""


@dataclass(frozen=True, slots=True)
class ThreadCounts:
    """Number of threads of a step by its number of tokens."""

    most: int
    few_rows: int
    """For at most FEW_ROWS tokens."""

    def of(self, num_rows: int) -> int:
        """The threads for a step of `num_tokens` tokens."""
        return self.few_rows if num_rows <= FEW_ROWS else self.most

    def helpers_of(self, num_rows: int) -> int:
        """Number of helpers that replace the other threads, if a model has all its layers in one call."""
        return self.most - 1 if num_rows <= HELPED_ROWS else 0


def set_wait_policy(environment: MutableMapping[str, str]) -> None:
    """Make OpenMP's threads spin shortly, then sleep, unless the environment already configures it.

    Call it before torch is imported. A sleeping thread is 50 us late at every operation, of which a step has hundreds.
    A thread that spins for long takes the core from scheduler and frontend, and one that spins on another process's
    core stalls for a time slice (8 ms): with more threads than cores no thread spins.
    """
    if "OMP_WAIT_POLICY" in environment:
        return
    environment["OMP_WAIT_POLICY"] = "PASSIVE"  # other runtimes than GNU's sleep at once
    environment.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))


def thread_counts(num_parameters: int, *, leaves_core: bool, only_pools: bool = False) -> ThreadCounts:
    """Threads for a model of this size: all cores that this process may use, or one for a small model.

    Args:
        leaves_core: steps of few tokens leave one core to the other services of this machine. One core less reaches
        nearly the same memory bandwidth, and a thread that shares its core with another process is late at every
        operation, for which the others wait. only_pools: the model is an encoder, whose steps have many tokens.
    """
    fewest = ENCODER_PARAMETERS if only_pools else SINGLE_THREAD_PARAMETERS
    most = 1 if num_parameters < fewest else num_usable_cores()
    return ThreadCounts(most, max(1, most - 1) if leaves_core else most)


def num_usable_cores(root: Path = Path("/sys")) -> int:
    """Physical cores among this process's CPUs, at most its control group's CPU quota; at least 1. Two threads on one
    core are no faster than one, because they share its vector units.

    Args:
        root: of the kernel's files.
    """
    cpus = os.sched_getaffinity(0)
    siblings = {_read(root / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in cpus}
    limit = _cpu_limit(root)
    return max(1, len(siblings) if limit is None else min(len(siblings), int(limit)))


def _cpu_limit(root: Path) -> float | None:
    """CPU quota of the control group; None: no limit."""
    quota, _, period = _read(root / "fs/cgroup/cpu.max").partition(" ")
    if not quota:
        quota, period = (_read(root / f"fs/cgroup/cpu/cpu.cfs_{name}_us") for name in ("quota", "period"))
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
