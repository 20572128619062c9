"""Peers: a TCP connection between each two ranks, for tensors on the host. Knows tensors and sockets; no model.

A sum of [1, 192] floats of two ranks takes 33 us this way and 1.8 ms with gloo (two processes on two cores, during a
matrix product), because gloo passes every message through three threads.
"""

import socket
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import torch
from torch import Tensor

from pagoda_worker.parallel.handshake import Listener, close_quietly, dial, receive_exactly, receive_into

CHUNK_BYTES = 64 * 1024
"""Bytes sent before as many are received: they fit the sender's buffer, so two sending ranks do not block.
"""
BUFFER_BYTES = 4 * CHUNK_BYTES
MAX_DIRECT_BYTES = 1024 * 1024
"""Maximum bytes that a rank sends to sum a whole tensor; above, each rank sums a part, which moves fewer bytes."""
MAX_TOLD_BYTES = 64 * 1024
SIZE = struct.Struct("<I")
DIAL_TIMEOUT_S = 5.0
RETRY_S = 0.01
ACCEPT_S = 0.01


class Peers:
    """The other ranks. One caller at a time, except for `close`."""

    def __init__(
        self, *, rank: int, world_size: int, secret: bytes, listener: Listener, check: Callable[[str], None]
    ) -> None:
        """
        Args:
            secret: of the group.
            listener: accepts the ranks above this one.
            check: called repeatedly with the operation that waits; raises an OSError to give up.
        """
        self._rank = rank
        self._world_size = world_size
        self._secret = secret
        self._listener = listener
        self._check = check
        self._sockets: dict[int, socket.socket] = {}
        self._senders: ThreadPoolExecutor | None = None

    def connect(self, leader: tuple[str, int], *, meet_timeout_s: float, timeout_s: float) -> None:
        """Connect to all ranks: they connect to rank 0, which sends them the addresses of the others.

        Args:
            leader: host and port of rank 0's listener.
            meet_timeout_s: for connected ranks to send their addresses.
            timeout_s: for every later operation.

        Raises:
            OSError: a rank did not connect, or has disconnected.
        """
        if self._rank == 0:
            self._await(range(1, self._world_size), meet_timeout_s)
            places = [self._hear_from(rank).decode() for rank in range(1, self._world_size)]
            self.tell("\n".join(places).encode())
        else:
            self._dial(0, *leader, timeout_s=meet_timeout_s)
            self._tell_to(0, f"{self._listener.host}:{self._listener.port}".encode())
            places = self.hear().decode().split("\n")
            for rank in range(1, self._rank):
                host, _, port = places[rank - 1].rpartition(":")
                self._dial(rank, host, int(port), timeout_s=meet_timeout_s)
            self._await(range(self._rank + 1, self._world_size), meet_timeout_s)
        self._listener.close()
        for peer in self._sockets.values():
            peer.settimeout(timeout_s)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)

    def _dial(self, rank: int, host: str, port: int, *, timeout_s: float) -> None:
        while rank not in self._sockets:
            try:
                peer = dial(host, port, secret=self._secret, rank=self._rank, to_rank=rank, timeout_s=DIAL_TIMEOUT_S)
            except OSError as error:
                self._check(f"rank {rank} ({error})")
                time.sleep(RETRY_S)
                continue
            peer.settimeout(timeout_s)
            self._sockets[rank] = peer
            self._check(f"rank {rank}")  # `close` may have come before

    def _await(self, ranks: range, timeout_s: float) -> None:
        while absent := [rank for rank in ranks if rank not in self._sockets]:
            for rank, peer in self._listener.accept(ACCEPT_S).items():
                if rank in self._sockets:
                    self._sockets[rank].close()  # it did not hear that it was let in, and came again
                peer.settimeout(timeout_s)
                self._sockets[rank] = peer
            self._check(", ".join(f"rank {rank}" for rank in absent))

    def close(self) -> None:
        """End the connections, from any thread; waiting operations fail on both sides."""
        for peer in list(self._sockets.values()):
            close_quietly(peer)

    def tell(self, content: bytes) -> None:
        """Send bytes from rank 0 to every other rank, which must call `hear`."""
        for rank in self._sockets:
            self._tell_to(rank, content)

    def hear(self) -> bytes:
        """The bytes that rank 0 sends."""
        return self._hear_from(0)

    def _tell_to(self, rank: int, content: bytes) -> None:
        self._sockets[rank].sendall(SIZE.pack(len(content)) + content)

    def _hear_from(self, rank: int) -> bytes:
        (size,) = SIZE.unpack(receive_exactly(self._sockets[rank], SIZE.size))
        if size > MAX_TOLD_BYTES:
            raise ConnectionError(f"rank {rank} sends {size} bytes, must be at most {MAX_TOLD_BYTES}")
        return receive_exactly(self._sockets[rank], size)

    def all_reduce(self, x: Tensor) -> None:
        """The sum over all ranks of a contiguous tensor, in place. All get the same bits.

        Raises:
            OSError: a rank has disconnected, or was too late; the other operations raise the same.
        """
        if x.nbytes * (self._world_size - 1) <= MAX_DIRECT_BYTES:
            self._add_whole(x)
        else:
            self._add_parts(x)

    def _add_whole(self, x: Tensor) -> None:
        """Every rank gets all tensors, and sums them in the order of ranks."""
        parts = {rank: x if rank == self._rank else torch.empty_like(x) for rank in range(self._world_size)}
        mine = _bytes(x)
        self._exchange(
            dict.fromkeys(self._sockets, mine), {rank: _bytes(parts[rank]) for rank in self._sockets}, len(mine)
        )
        x.copy_(_sum(parts))

    def _add_parts(self, x: Tensor) -> None:
        """Every rank sums its part of the elements, and sends it to the others."""
        flat = x.view(-1)
        size = -(-len(flat) // self._world_size)
        own = {rank: flat[rank * size : (rank + 1) * size] for rank in range(self._world_size)}
        parts = {rank: own[rank] if rank == self._rank else torch.empty_like(own[self._rank]) for rank in own}
        outgoing = {rank: _bytes(own[rank]) for rank in self._sockets}
        self._exchange_much(outgoing, {rank: _bytes(parts[rank]) for rank in self._sockets})
        own[self._rank].copy_(_sum(parts))
        self._exchange_much(dict.fromkeys(self._sockets, _bytes(own[self._rank])), outgoing)

    def _exchange_much(self, outgoing: dict[int, memoryview], incoming: dict[int, memoryview]) -> None:
        """Send on threads while receiving here, which waits less often than sending by chunks, for large tensors."""
        if self._senders is None:
            self._senders = ThreadPoolExecutor(self._world_size - 1, thread_name_prefix="send")
        sending = [self._senders.submit(peer.sendall, outgoing[rank]) for rank, peer in self._sockets.items()]
        for rank, peer in self._sockets.items():
            receive_into(peer, incoming[rank])
        for each in sending:
            each.result()

    def _exchange(self, outgoing: dict[int, memoryview], incoming: dict[int, memoryview], num_bytes: int) -> None:
        """Send and receive at most `num_bytes` to and from each rank, in the same chunks on all ranks."""
        for begin, end in pairwise([*range(0, num_bytes, CHUNK_BYTES), num_bytes]):
            for rank, peer in self._sockets.items():
                if chunk := outgoing[rank][begin:end]:
                    peer.sendall(chunk)
            for rank, peer in self._sockets.items():
                receive_into(peer, incoming[rank][begin:end])

    def broadcast(self, x: Tensor) -> None:
        """Rank 0's tensor on every rank, in place."""
        if self._rank == 0:
            for peer in self._sockets.values():
                peer.sendall(_bytes(x))
        else:
            receive_into(self._sockets[0], _bytes(x))

    def gather(self, x: Tensor) -> list[Tensor]:
        """On rank 0 every rank's tensor, of the same shape, in order; None on the others."""
        if self._rank:
            self._sockets[0].sendall(_bytes(x))
            return []
        parts = [x, *(torch.empty_like(x) for _ in range(self._world_size - 1))]
        for rank in range(1, self._world_size):
            receive_into(self._sockets[rank], _bytes(parts[rank]))
        return parts


def _bytes(x: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return x.view(-1).view(torch.uint8).numpy().data


def _sum(parts: dict[int, Tensor]) -> Tensor:
    """The sum of all ranks' tensors in order; 16-bit ones are rounded once."""
    total = parts[0].float() if len(parts) > 2 else parts[0]
    for rank in range(1, len(parts)):
        total = total + parts[rank]
    return total
