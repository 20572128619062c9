"""Limits of a helper process: a job that exceeds one ends only that process."""

import contextlib
import resource
import signal
from collections.abc import Iterator


def limit_memory(max_bytes: int) -> None:
    """Let this process have so much more than it has now, and write no core file."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        size = int(statm.read().split()[0]) * resource.getpagesize()
    limit = size + max_bytes
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard < 0 else min(limit, hard), hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


@contextlib.contextmanager
def limit_cpu(seconds: float) -> Iterator[None]:
    """End this process when what is done within takes more processor time, of all its threads together.

    The time of others on a busy machine does not count. The kernel ends the process (SIGPROF), in the middle of a
    library's call, too.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
