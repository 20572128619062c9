"""Addresses of abstract unix sockets, over which gRPC costs processes of one machine less than over TCP.

Such a socket has a name and no file. It belongs to a network namespace, like loopback: exactly those processes reach it
that reach a port on loopback, containers of one pod included, whose file systems are apart. It goes with its process.
Only Linux has them (unix(7)). Knows no gRPC.
"""

import re
import secrets
import socket

SCHEME = "unix-abstract:"
"""Scheme of gRPC addresses."""
_ADDRESS = re.compile(re.escape(SCHEME) + r"[A-Za-z0-9._-]{1,100}")
"""sun_path has 107 bytes for the name; these characters mean themselves in the URIs that gRPC takes addresses for."""
_RANDOM_BYTES = 12


def new_local_address(service: str) -> str | None:
    """An address for a server of this process or of a child, which no one can guess and take before.

    None where the system has no such sockets, or forbids them.
    """
    name = f"pagoda-{service}-{secrets.token_hex(_RANDOM_BYTES)}"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(f"\0{name}")
            listener.listen()
            return f"{SCHEME}{name}" if has_listener(f"{SCHEME}{name}") else None
    except (AttributeError, OSError, ValueError):
        return None


def is_local_socket(address: str) -> bool:
    """Whether `address` is that of an abstract socket: ``unix-abstract:`` and up to 100 letters, digits and ``._-``."""
    return _ADDRESS.fullmatch(address) is not None


def has_listener(address: str) -> bool:
    """Whether a process within reach listens at `address`: none in another network namespace is. Does not block."""
    if not is_local_socket(address):
        return False
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            probe.connect("\0" + address.removeprefix(SCHEME))
    except (AttributeError, OSError, ValueError):  # no such sockets at all, no one there, or forbidden
        return False
    return True
