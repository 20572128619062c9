"""Service tokens that `pagoda serve` generates, stored where only programs of the same user can find them.

A token lies in a file that only its user may read, named after the machine and the scheduler's port. Its owner holds a
lock on it, so that a file that was left behind counts for nothing. Knows no gRPC.
"""

import contextlib
import fcntl
import os
import secrets
import socket
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from pagoda_common.config.security_config import SecurityConfig, host_of, is_loopback
from pagoda_common.rpc.local_socket import is_local_socket

TOKEN_BYTES = 32


def new_token() -> str:
    """A token that no one can guess."""
    return secrets.token_hex(TOKEN_BYTES)


@contextlib.contextmanager
def left_token(port: int, token: str) -> Iterator[bool]:
    """Let programs of this user find `token` as that of the scheduler on loopback's `port`; whether they can.

    They cannot where no directory is this user's alone: they are given the token by --service-token-file then.
    """
    path = _path(port)
    try:
        descriptor = _create(path, token)
    except OSError:
        yield False
        return
    try:
        yield True
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
        os.close(descriptor)


def find_token_file(port: int) -> str | None:
    """The file of the token of the scheduler on loopback's `port`; None where no living process has left one."""
    path = _path(port)
    try:
        if not _is_private(path.parent):
            return None
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            return None
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return str(path)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return None  # its owner is gone


def with_found_token(security: SecurityConfig, address: str) -> SecurityConfig:
    """`security` with the token that a `pagoda serve` of this user has left for the scheduler at `address`.

    Unchanged where there is none, and where a token or TLS is configured.
    """
    port = address.rpartition(":")[2]
    if security.is_guarded or is_local_socket(address) or not is_loopback(host_of(address)) or not port.isdecimal():
        return security
    found = find_token_file(int(port))
    return security if found is None else replace(security, service_token_file=found)


def _path(port: int) -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(cache) / "pagoda" / "tokens" / f"{socket.gethostname()}-{port}"


def _create(path: Path, token: str) -> int:
    """Write `token` into a new file at `path`, in place of another one; a descriptor that holds its lock.

    Raises:
        OSError: that cannot be done where only this user reads it.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_private(path.parent):
        raise PermissionError(f"{path.parent} is not this user's alone")
    new = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    descriptor = os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
    try:
        os.write(descriptor, f"{token}\n".encode())
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.replace(new, path)
    except OSError:
        os.close(descriptor)
        with contextlib.suppress(OSError):
            new.unlink()
        raise
    return descriptor


def _is_private(directory: Path) -> bool:
    """Whether `directory` is one, this user's, and closed to all others."""
    found = os.lstat(directory)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
