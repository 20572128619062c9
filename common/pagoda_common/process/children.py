"""Child processes: finds free ports, spawns services, and ends them when their parent is killed."""

import contextlib
import os
import random
import resource
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

PARENT_POLL_S = 0.5
LOCAL_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST_PORT = 16384
"""Lowest port that is drawn: most servers' own ports are lower."""
PORT_DRAWS = 32
MAX_RESERVED_PORTS = 128
GRPC_ENVIRONMENT = {"GRPC_EXPERIMENTS": "-event_engine_client,-event_engine_listener"}
"""Sockets are read by the thread that waits for them, not handed on to a pool of threads that wake each other: a tenth
less CPU for a step's messages (benchmarks/step_overhead.py). gRPC reads it when it is imported."""


_reservations: deque[socket.socket] = deque(maxlen=MAX_RESERVED_PORTS)
"""Bound and not listening: the latest results of `free_port`."""


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that is free now. Only for ports that several processes must know; a lone server binds 0.

    Linux gives connections, and servers that bind 0, ports of `ip_local_port_range`. This one lies below it where it
    can. It is reserved for as long as this process lives and draws few others: no call of any process draws it again,
    while a server that sets SO_REUSEADDR, as all of ours do, can bind it, end, and bind it again.
    """
    probe = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        port = _bind_free_port(probe, host)
        # Only now: the bind itself fails where another socket has the port, whatever that one allows.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "SO_REUSEPORT"):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # for servers that set this one alone
    except BaseException:
        probe.close()
        raise
    _reservations.append(probe)
    return port


def _bind_free_port(probe: socket.socket, host: str) -> int:
    for _ in range(PORT_DRAWS):
        with contextlib.suppress(OSError, ValueError):  # taken; not Linux, or nothing lies below
            port = random.SystemRandom().randrange(LOWEST_PORT, int(LOCAL_PORT_RANGE.read_text().split()[0]))
            probe.bind((host, port))
            return port
    probe.bind((host, 0))
    return int(probe.getsockname()[1])


def raise_file_limit() -> None:
    """Let this process have as many open files as it may: each connection is one, and the usual limit is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # where the hard limit is more than the system allows
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def can_listen(host: str, port: int) -> bool:
    """Whether `port` can be bound on `host` now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def service_command(module: str, argv: Sequence[str]) -> list[str]:
    """The command line of ``python -m module argv`` as a child that does not outlive this process."""
    return [sys.executable, "-m", module, *argv, f"--die-with-parent={os.getpid()}"]


def service_environment(command: Sequence[str]) -> dict[str, str]:
    """The environment for `command`, which `service_command` has made.

    Scheduler and frontend run on glibc's malloc in place of Python's own allocator: it gives memory back page by page
    after a burst of requests, where a Python arena (1 MiB) stays for as long as one small object is left in it. The
    worker's memory is torch's, and its Python is in the way of every step. One arena for all threads, as those of gRPC
    would each keep one for the little that they hold. The same variables in our own environment go before.

    Python imports from the directory in which ``python -m`` is started; not where another user may have put something.
    """
    safe = {"PYTHONSAFEPATH": "1"} if _is_shared(Path()) else {}
    own = {} if "pagoda_worker" in command else {"PYTHONMALLOC": "malloc", "MALLOC_ARENA_MAX": "1"}
    return {**GRPC_ENVIRONMENT, **own, **safe, **os.environ, "PYTHONUNBUFFERED": "1"}


def _is_shared(directory: Path) -> bool:
    """Whether another user than this one and root may have put something there.

    A group of the same number as the user is this user's alone, by convention.
    """
    try:
        found = directory.stat()
    except OSError:
        return True
    is_own_group = found.st_gid == os.getegid() == os.geteuid()
    others = stat.S_IWOTH if is_own_group else stat.S_IWGRP | stat.S_IWOTH
    return found.st_uid not in (0, os.geteuid()) or bool(found.st_mode & others)


def spawn_service(
    module: str, argv: Sequence[str], *, env: Mapping[str, str] | None = None, stdout: int | None = None
) -> subprocess.Popen[bytes]:
    """Start ``python -m module argv --die-with-parent`` in a session of its own.

    The own session keeps the terminal's Ctrl-C away from it: the parent decides in which order its children end.

    Args:
        env: variables on top of this process's.
        stdout: where its stdout and stderr go (subprocess.PIPE, DEVNULL or a descriptor); None shares ours.
    """
    command = service_command(module, argv)
    return subprocess.Popen(
        command,
        env={**service_environment(command), **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.STDOUT if stdout is not None else None,
        start_new_session=True,
    )


def stop_process(process: subprocess.Popen[bytes], *, timeout_s: float) -> int:
    """SIGTERM, wait up to `timeout_s`, then SIGKILL; returns the exit code."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
    return process.wait()


def die_with_parent(parent_pid: int) -> None:
    """End this process by SIGKILL as soon as its parent has ended, however it ended. Called first thing in `__main__`.

    A thread waits for the parent. The kernel's own offer, prctl(PR_SET_PDEATHSIG), is not taken because it fires when
    the *thread* that spawned us ends: an LLM made on a short-lived thread would lose its engine.

    Args:
        parent_pid: who started us (the value of --die-with-parent); when it is gone already, we end at once.
    """
    threading.Thread(target=_watch_parent, args=(parent_pid,), name="parent-watch", daemon=True).start()


def _watch_parent(parent_pid: int) -> None:
    try:
        descriptor = os.pidfd_open(parent_pid)  # before the check, so that it cannot name a later process
    except (AttributeError, OSError):  # no pidfd on this system, or no such parent
        while os.getppid() == parent_pid:
            time.sleep(PARENT_POLL_S)
    else:
        if os.getppid() == parent_pid:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            poll.poll()
    os.kill(os.getpid(), signal.SIGKILL)
