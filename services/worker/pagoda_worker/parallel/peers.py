"""Peers: one TCP connection between any two ranks, for tensors on the host. Knows tensors and sockets; no model.

A sum of [1, 192] floats of two ranks takes 33 us this way and 1.8 ms with gloo (two processes on two cores, beside a
matrix product): gloo hands every message through three threads. For what is large its ring moves fewer bytes.
"""

import contextlib
import hmac
import secrets
import socket
import time
from itertools import pairwise

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

CHUNK_BYTES = 64 * 1024
"""Sent before as much is received: two of them fit into a connection's buffers, so two ranks that both send go on."""
BUFFER_BYTES = 4 * CHUNK_BYTES
TOKEN_BYTES = 16
RANK_BYTES = 4


class Peers:
    """The other ranks. One caller at a time, but for `close`."""

    def __init__(self, *, rank: int, world_size: int, host: str, store: Store, timeout_s: float) -> None:
        """Listen, and tell the others where.

        Args:
            host: name or address of an interface of this machine.
            store: where the ranks tell each other their addresses.
            timeout_s: for every operation.
        """
        self._rank = rank
        self._world_size = world_size
        self._store = store
        self._timeout_s = timeout_s
        self._sockets: dict[int, socket.socket] = {}
        family, _, _, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        self._listener.bind(place)
        self._listener.listen(world_size)
        if rank == 0:
            store.set("token", secrets.token_hex(TOKEN_BYTES))
        store.set(f"peer-{rank}", f"{host}:{self._listener.getsockname()[1]}")

    def absent(self) -> list[int]:
        """Ranks that have not come."""
        return [rank for rank in range(self._world_size) if not self._store.check([f"peer-{rank}"])]

    def connect(self, *, timeout_s: float) -> None:
        """Connect to all ranks, which have all come.

        Raises:
            OSError: one of them has gone.
        """
        token = bytes.fromhex(self._store.get("token").decode())
        for rank in range(self._rank):
            host, _, port = self._store.get(f"peer-{rank}").decode().rpartition(":")
            peer = socket.create_connection((host, int(port)), timeout=timeout_s)
            peer.sendall(token + self._rank.to_bytes(RANK_BYTES, "little"))
            self._sockets[rank] = peer
        deadline = time.monotonic() + timeout_s
        while len(self._sockets) < self._world_size - 1:
            self._listener.settimeout(max(0.001, deadline - time.monotonic()))
            peer, _ = self._listener.accept()
            peer.settimeout(timeout_s)
            greeting = bytearray(TOKEN_BYTES + RANK_BYTES)
            _receive(peer, memoryview(greeting))
            if not hmac.compare_digest(bytes(greeting[:TOKEN_BYTES]), token):
                peer.close()  # whatever rank that was
                continue
            self._sockets[int.from_bytes(greeting[TOKEN_BYTES:], "little")] = peer
        self._listener.close()
        for peer in self._sockets.values():
            peer.settimeout(self._timeout_s)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)

    def close(self) -> None:
        """From any thread: end the connections; an operation that waits fails, here and there."""
        self._listener.close()
        for peer in list(self._sockets.values()):
            with contextlib.suppress(OSError):  # the other side was first
                peer.shutdown(socket.SHUT_RDWR)

    def all_reduce(self, x: Tensor) -> None:
        """The sum over all ranks, in place. All add in the order of ranks, so all get the same bits.

        Raises:
            OSError: a rank has gone, or did not come in time; so of the other operations.
        """
        parts = {rank: x if rank == self._rank else torch.empty_like(x) for rank in range(self._world_size)}
        mine = _bytes(x)
        others = {rank: _bytes(part) for rank, part in parts.items() if rank != self._rank}
        for begin, end in pairwise([*range(0, len(mine), CHUNK_BYTES), len(mine)]):
            for peer in self._sockets.values():
                peer.sendall(mine[begin:end])
            for rank, part in others.items():
                _receive(self._sockets[rank], part[begin:end])
        total = parts[0].float() if len(parts) > 2 else parts[0]
        for rank in range(1, self._world_size):
            total = total + parts[rank]
        x.copy_(total)

    def broadcast(self, x: Tensor) -> None:
        """Rank 0's tensor on every rank, in place."""
        if self._rank == 0:
            for peer in self._sockets.values():
                peer.sendall(_bytes(x))
        else:
            _receive(self._sockets[0], _bytes(x))

    def gather(self, x: Tensor) -> list[Tensor]:
        """On rank 0 every rank's tensor, of the same shape, in order; nothing on the others."""
        if self._rank:
            self._sockets[0].sendall(_bytes(x))
            return []
        parts = [x, *(torch.empty_like(x) for _ in range(self._world_size - 1))]
        for rank in range(1, self._world_size):
            _receive(self._sockets[rank], _bytes(parts[rank]))
        return parts


def _bytes(x: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return x.view(-1).view(torch.uint8).numpy().data


def _receive(peer: socket.socket, target: memoryview) -> None:
    while len(target):
        count = peer.recv_into(target)
        if not count:
            raise ConnectionResetError("another rank has ended the connection")
        target = target[count:]
