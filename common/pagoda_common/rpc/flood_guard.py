"""FloodGuard: ends connections that send endless header blocks. Knows sockets; no calls.

One thread of gRPC's library reads all connections of a process, and parses such a block for as long as it comes. At the
connection's end it hands over a call with all fields of the block: the event loop then makes objects of half a million
fields, for seconds. What the thread has not read yet is in the socket's queue, where the guard looks at it. It needs
Linux and plaintext.
"""

import asyncio
import contextlib
import fcntl
import ipaddress
import logging
import os
import re
import select
import socket
import stat
import struct
import termios
import time
from collections.abc import Callable
from typing import TypeAlias
from urllib.parse import unquote

from pagoda_common.rpc.header_blocks import MAX_BLOCK_FRAMES, SEEN_BYTES, can_be_messages, has_endless_block

logger = logging.getLogger(__name__)

REST_S = 0.025
"""Time between two looks."""
MAX_SHARE = 0.25
"""Of a core, at most."""
MIN_CPU_S = 0.005
"""No look before the process has computed for so long: who reads a flood does."""
MIN_QUEUED_BYTES = 9 * MAX_BLOCK_FRAMES
"""A shorter queue is read soon."""
NEW_CALL_S = 0.25
"""Time that a connection has, whose block could also be the messages of a new call: the event loop learns of a call
later than the thread that reads it."""
NUM_LOOKS = 5
"""Looks in a row that such a connection has as well: after a pause of the process, the time alone proves nothing."""
_STATUS = "/proc/self/status"
_NUM_SLOTS = re.compile(rb"^FDSize:\s*(\d+)$", re.MULTILINE)
_STATUS_BYTES = 4096
_DROPPED_BYTES = 64 * 1024 * 1024

Address: TypeAlias = tuple[str, int]
"""Host and port of a peer."""


class FloodGuard:
    """Looks at the connections of one server of this process."""

    def __init__(self, port: int, receiving: Callable[[], set[str]]) -> None:
        """
        Args:
            port: on which the server listens.
            receiving: peers with calls that have a message to come, as gRPC's library calls them.
        """
        self._port = port
        self._receiving = receiving
        self._poll = select.poll()
        self._num_slots = 0
        self._found: dict[Address, tuple[int, float]] = {}
        self._cpu_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.num_ended = 0
        """Counter: connections ended."""

    def start(self) -> None:
        """Look from time to time, on this event loop."""
        self._timer = asyncio.get_running_loop().call_later(REST_S, self._on_time)

    def stop(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _on_time(self) -> None:
        started_s, cpu_s = time.thread_time(), time.process_time()
        if cpu_s - self._cpu_s >= MIN_CPU_S:
            self._cpu_s = cpu_s
            self.look()
        rest_s = max(REST_S, (time.thread_time() - started_s) / MAX_SHARE)
        self._timer = asyncio.get_running_loop().call_later(rest_s, self._on_time)

    def look(self) -> None:
        """Look at every connection once."""
        found: dict[Address, tuple[int, float]] = {}
        for fd in self._readable():
            with contextlib.suppress(OSError):  # it is closed meanwhile
                # Files are left alone: to close a copy of a descriptor gives up the process's locks on its file.
                if stat.S_ISSOCK(os.fstat(fd).st_mode) and _num_queued_bytes(fd) >= MIN_QUEUED_BYTES:
                    with socket.socket(fileno=os.dup(fd)) as connection:
                        self._look_at(connection, found)
        self._found = found

    def _readable(self) -> list[int]:
        """Descriptors of this process that something can be read from."""
        found = _NUM_SLOTS.search(_status())
        num_slots = int(found[1]) if found else 0
        for fd in range(self._num_slots, num_slots):
            self._poll.register(fd, select.POLLIN)
        self._num_slots = max(num_slots, self._num_slots)
        return [fd for fd, events in self._poll.poll(0) if events & select.POLLIN]

    def _look_at(self, connection: socket.socket, found: dict[Address, tuple[int, float]]) -> None:
        if connection.family not in {socket.AF_INET, socket.AF_INET6} or connection.getsockname()[1] != self._port:
            return
        piece = connection.recv(SEEN_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        if not has_endless_block(piece):
            return
        host, port = connection.getpeername()[:2]
        peer, can_be_legal = _address(host, port), can_be_messages(piece)
        if can_be_legal and peer in map(peer_address, self._receiving()):
            return
        now_s = time.monotonic()
        num_before, since_s = self._found.get(peer, (0, now_s))
        found[peer] = num_before + 1, since_s
        if not can_be_legal or (num_before + 1 >= NUM_LOOKS and now_s - since_s >= NEW_CALL_S):
            self.num_ended += 1
            logger.warning("ended the gRPC connection of %s:%d: it sends a header block without end", *peer)
            _end(connection)


def peer_address(peer: str) -> Address | None:
    """What gRPC's library calls a peer; None where that is not an address and port."""
    host, _, port = unquote(peer).rpartition(":")
    scheme, _, host = host.partition(":")
    return _address(host.strip("[]"), int(port)) if scheme in {"ipv4", "ipv6"} and port.isdecimal() else None


def _address(host: str, port: int) -> Address:
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address), port


def _status() -> bytes:
    fd = os.open(_STATUS, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, _STATUS_BYTES)
    finally:
        os.close(fd)


def _num_queued_bytes(fd: int) -> int:
    answer = fcntl.ioctl(fd, termios.FIONREAD, bytes(4))
    return int(struct.unpack("i", answer)[0])


def _end(connection: socket.socket) -> None:
    """End it for all descriptors, and drop what is queued: the library would read that before it sees the end."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, once it is closed
    connection.shutdown(socket.SHUT_RDWR)
    while connection.recv(_DROPPED_BYTES, socket.MSG_TRUNC | socket.MSG_DONTWAIT):
        pass
