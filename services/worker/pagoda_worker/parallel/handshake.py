"""Connections between ranks, on which both sides have proved that they know the group's secret.

Knows sockets; no tensors. Rank 0 makes the secret, and the others get it with the address in InitDevice, so callers
with access to workers decide who is a rank.
"""

import contextlib
import hmac
import secrets
import selectors
import socket
import time
from dataclasses import dataclass, field

SECRET_BYTES = 32
NONCE_BYTES = 32
PROOF_BYTES = 32
RANK_BYTES = 4
MAGIC = b"pagoda-1"
HELLO_BYTES = len(MAGIC) + NONCE_BYTES + RANK_BYTES
WELCOME = b"\x01"
HANDSHAKE_TIMEOUT_S = 5.0
"""Seconds before a connection without a proof is closed."""
MAX_UNPROVED = 64
"""Maximum number of open connections without a proof; the oldest is closed for a newer one."""


def new_secret() -> bytes:
    """A secret for one start of one group."""
    return secrets.token_bytes(SECRET_BYTES)


def _proof(secret: bytes, *, side: bytes, nonces: bytes, caller: int, listener: int) -> bytes:
    ranks = caller.to_bytes(RANK_BYTES, "little") + listener.to_bytes(RANK_BYTES, "little")
    return hmac.digest(secret, MAGIC + side + nonces + ranks, "sha256")


def dial(host: str, port: int, *, secret: bytes, rank: int, to_rank: int, timeout_s: float) -> socket.socket:
    """An accepted connection from `rank` to `to_rank`, with the timeout `timeout_s`.

    Raises:
        OSError: nothing or another program listens there, or the other side does not know the secret.
    """
    connection = socket.create_connection((host, port), timeout=timeout_s)
    try:
        nonce = secrets.token_bytes(NONCE_BYTES)
        connection.sendall(MAGIC + nonce + rank.to_bytes(RANK_BYTES, "little"))
        answer = receive_exactly(connection, NONCE_BYTES + PROOF_BYTES)
        nonces = nonce + answer[:NONCE_BYTES]
        expected = _proof(secret, side=b"listener", nonces=nonces, caller=rank, listener=to_rank)
        if not hmac.compare_digest(answer[NONCE_BYTES:], expected):
            raise PermissionError(f"{host}:{port} does not know the secret of this group")
        connection.sendall(_proof(secret, side=b"caller", nonces=nonces, caller=rank, listener=to_rank))
        receive_exactly(connection, len(WELCOME))
    except BaseException:
        connection.close()
        raise
    return connection


def receive_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    """The next bytes of a connection.

    Raises:
        OSError: the connection ended, or its timeout has passed.
    """
    content = bytearray(num_bytes)
    receive_into(connection, memoryview(content))
    return bytes(content)


def receive_into(connection: socket.socket, target: memoryview) -> None:
    """As `receive_exactly`, filling `target`."""
    while len(target):
        count = connection.recv_into(target)
        if not count:
            raise ConnectionResetError("another rank has ended the connection")
        target = target[count:]


@dataclass(slots=True)
class _Unproved:
    """A connection that has not proved itself."""

    connection: socket.socket
    deadline_s: float
    received: bytearray = field(default_factory=bytearray)
    nonces: bytes = b""
    """Empty until its hello has arrived."""
    rank: int = -1


class Listener:
    """Accepts other ranks. Strangers get one of MAX_UNPROVED places for some seconds, and block nothing. One caller."""

    def __init__(self, *, host: str, secret: bytes, rank: int, world_size: int) -> None:
        """Listen on an interface of this machine, at a free port.

        Raises:
            OSError: `host` is not an address of this machine.
        """
        self._secret = secret
        self._rank = rank
        self._world_size = world_size
        self._unproved: list[_Unproved] = []
        family, _, _, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.bind(place)
            self._socket.listen(MAX_UNPROVED + world_size)
            self._socket.setblocking(False)
        except OSError:
            self._socket.close()
            raise
        self.host = host
        self.port: int = self._socket.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ, None)

    def accept(self, timeout_s: float) -> dict[int, socket.socket]:
        """Ranks that have connected within `timeout_s`; their connections are blocking."""
        come: dict[int, socket.socket] = {}
        for key, _ in self._selector.select(timeout_s):
            if key.data is None:
                self._admit()
            elif key.data in self._unproved and (rank := self._read(key.data)) is not None:
                come[rank] = key.data.connection
        now_s = time.monotonic()
        for each in [one for one in self._unproved if one.deadline_s < now_s]:
            self._drop(each)
        return come

    def close(self) -> None:
        """Accept no more connections."""
        for each in list(self._unproved):
            self._drop(each)
        self._selector.close()
        self._socket.close()

    def _admit(self) -> None:
        for _ in range(MAX_UNPROVED // 2):  # a flood does not push those out that have just come
            try:
                connection, _ = self._socket.accept()
            except OSError:  # no more, or it has gone again
                return
            connection.setblocking(False)
            each = _Unproved(connection, time.monotonic() + HANDSHAKE_TIMEOUT_S)
            if len(self._unproved) >= MAX_UNPROVED:
                self._drop(self._unproved[0])
            self._unproved.append(each)
            self._selector.register(connection, selectors.EVENT_READ, each)

    def _forget(self, each: _Unproved) -> None:
        self._unproved.remove(each)
        self._selector.unregister(each.connection)

    def _drop(self, each: _Unproved) -> None:
        self._forget(each)
        each.connection.close()

    def _read(self, each: _Unproved) -> int | None:
        """The rank of a connection that has just proved itself."""
        try:
            whole = HELLO_BYTES if not each.nonces else PROOF_BYTES
            content = each.connection.recv(whole - len(each.received))
            each.received += content
            if content and len(each.received) < whole:
                return None
            if content and not each.nonces and self._greet(each):
                return None
            if content and each.nonces and hmac.compare_digest(bytes(each.received), self._caller_proof(each)):
                self._forget(each)
                each.connection.setblocking(True)
                each.connection.sendall(WELCOME)
                return each.rank
        except BlockingIOError:
            return None
        except OSError:
            pass
        if each in self._unproved:
            self._drop(each)
        return None

    def _greet(self, each: _Unproved) -> bool:
        """Answer a hello; False if it is not one."""
        hello = bytes(each.received)
        rank = int.from_bytes(hello[-RANK_BYTES:], "little")
        if not hello.startswith(MAGIC) or not 0 <= rank < self._world_size or rank == self._rank:
            return False
        own = secrets.token_bytes(NONCE_BYTES)
        each.rank, each.nonces = rank, hello[len(MAGIC) : -RANK_BYTES] + own
        each.received.clear()
        proof = _proof(self._secret, side=b"listener", nonces=each.nonces, caller=rank, listener=self._rank)
        each.connection.sendall(own + proof)  # far less than a socket's buffer
        return True

    def _caller_proof(self, each: _Unproved) -> bytes:
        return _proof(self._secret, side=b"caller", nonces=each.nonces, caller=each.rank, listener=self._rank)


def close_quietly(connection: socket.socket) -> None:
    """End a connection, from any thread; operations that wait for it fail."""
    with contextlib.suppress(OSError):  # the other side was first
        connection.shutdown(socket.SHUT_RDWR)
