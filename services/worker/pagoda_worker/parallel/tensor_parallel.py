"""TensorParallel: the ranks that hold one model together, and the sums and copies that go between them.

Knows tensors and torch's process groups; no model, no messages. NCCL moves what is on a CUDA device, `peers` what is on
the host, and gloo what is large there.
"""

import logging
import socket
import threading
import time
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from pagoda_common.errors import ConfigError, NotReady, StaleEpoch
from pagoda_worker.parallel.peers import Peers

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 60.0
"""For all ranks to come to the meeting place."""
OPERATION_TIMEOUT_S = 300.0
"""For a rank to come to a sum: another one's kernels may be compiled in its first step."""
STORE_TIMEOUT_S = 5.0
"""For one question to the meeting place, which listens."""
POLL_S = 0.01
MAX_DIRECT_BYTES = 1024 * 1024
"""A rank sends so much at most to add a host tensor up directly; above, gloo's ring moves fewer bytes."""

Connection = TypeVar("Connection")


class TensorParallel:
    """One rank and its connections to the others, which are made anew for every bring-up of the group.

    Every rank must call the same operations in the same order. One caller at a time, but for `abandon`.
    """

    def __init__(self, *, rank: int = 0, world_size: int = 1, host: str = "127.0.0.1") -> None:
        """`host`: where the other ranks reach this one; a name or address of an interface of this machine.

        Raises:
            ConfigError: there is no such rank.
        """
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank is {rank}, must be below world_size, {world_size}", field="rank")
        self.rank = rank
        self.world_size = world_size
        self._host = host
        self._store: TCPStore | None = None
        self._address: tuple[str, int] | None = None
        """Meeting place of the ranks."""
        self._peers: Peers | None = None
        self._gloo: Any = None
        self._nccl: Any = None
        """Process group; None where there is no CUDA."""
        self._is_abandoned = threading.Event()

    @property
    def address(self) -> str:
        """Where the other ranks meet rank 0; empty of other ranks, and without any."""
        return "{}:{}".format(*self._address) if self.is_leader and self._address is not None else ""

    @property
    def is_leader(self) -> bool:
        """Whether this rank samples for all."""
        return self.rank == 0

    def part(self, total: int) -> range:
        """This rank's part of `total` columns or rows: equal ones, but for the last."""
        size = -(-total // self.world_size)
        return range(min(self.rank * size, total), min((self.rank + 1) * size, total))

    def open(self) -> None:
        """The leader's side: let go of earlier connections and make a new meeting place, `address`.

        Raises:
            ConfigError: `host` is no address of this machine.
        """
        self.close()
        self._is_abandoned.clear()
        try:
            family, _, _, _, place = socket.getaddrinfo(self._host, 0, type=socket.SOCK_STREAM)[0]
            listener = socket.socket(family, socket.SOCK_STREAM)
            listener.bind(place)
            listener.listen(self.world_size)
        except OSError as error:
            raise ConfigError(
                f"ranks of a group must reach each other: {self._host!r} is no address of this machine ({error}); set "
                "--advertise-address",
                field="advertise_address",
            ) from error
        port = listener.getsockname()[1]
        # The store would listen on every interface: it gets a socket that listens on this one only.
        self._store = TCPStore(
            self._host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self._address = self._host, port

    def invite(self, address: str) -> None:
        """The other ranks' side: let go of earlier connections; `connect` goes to this host:port."""
        self.close()
        self._is_abandoned.clear()
        host, _, port = address.rpartition(":")
        self._address = host, int(port)

    def connect(self, device: torch.device) -> None:
        """Meet the other ranks; returns when all are there. Nothing for one rank, or when they are there already.

        Raises:
            NotReady: one of them did not come, or `abandon` was called.
            StaleEpoch: there is no meeting place.
        """
        if self.world_size == 1 or self._gloo is not None:
            return
        if self._address is None:
            raise StaleEpoch("the ranks have no meeting place: call InitDevice first")
        try:
            self._meet(*self._address, device)
        except (RuntimeError, OSError) as error:  # dist.DistError is a RuntimeError
            self.close()
            reason = str(error).partition("\n")[0]
            raise NotReady(f"rank {self.rank} could not meet the other ranks of its group: {reason}") from error

    def _meet(self, host: str, port: int, device: torch.device) -> None:
        # Waited for in small steps, which `abandon` can end: the constructors of stores and process groups may block
        # for minutes, and cannot be interrupted.
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        while self._store is None:
            if _listens(host, port):
                timeout = timedelta(seconds=STORE_TIMEOUT_S)
                self._store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
            else:
                self._pause("rank 0", deadline)
        self._peers = Peers(
            rank=self.rank,
            world_size=self.world_size,
            host=self._host,
            store=self._store,
            timeout_s=OPERATION_TIMEOUT_S,
        )
        while absent := self._peers.absent():
            self._pause(", ".join(f"rank {rank}" for rank in absent), deadline)
        self._peers.connect(timeout_s=CONNECT_TIMEOUT_S)
        gloo: Any = dist.ProcessGroupGloo  # its stubs know no options
        options = gloo._Options()
        options._timeout = timedelta(seconds=OPERATION_TIMEOUT_S)
        options._devices = [gloo.create_device(hostname=self._host)]
        self._gloo = gloo(PrefixStore("host", self._store), self.rank, self.world_size, options)
        if device.type == "cuda":
            nccl: Any = dist.ProcessGroupNCCL
            options = nccl.Options()
            options._timeout = timedelta(seconds=OPERATION_TIMEOUT_S)
            self._nccl = nccl(PrefixStore("device", self._store), self.rank, self.world_size, options)
        logger.info("rank %d of %d is connected at %s:%d", self.rank, self.world_size, host, port)

    def _pause(self, absent: str, deadline: float) -> None:
        if self._is_abandoned.is_set() or time.monotonic() > deadline:
            raise RuntimeError(f"{absent} did not come")
        time.sleep(POLL_S)

    def abandon(self) -> None:
        """From any thread: let a `connect` or a sum that waits fail soon."""
        self._is_abandoned.set()
        if self._peers is not None:
            self._peers.close()

    def close(self) -> None:
        """Let go of the other ranks: what they wait for from this one fails."""
        if self._nccl is not None:
            self._nccl.abort()
        if self._peers is not None:
            self._peers.close()
        self._nccl = self._gloo = self._peers = self._store = self._address = None

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in place; the same bits on each. `x` itself for one rank."""
        if self.world_size == 1:
            return x
        if x.is_cuda:
            self._connected(self._nccl).allreduce([x]).wait()
        elif x.nbytes * (self.world_size - 1) <= MAX_DIRECT_BYTES and x.is_contiguous():
            self._connected(self._peers).all_reduce(x)
        else:
            self._connected(self._gloo).allreduce([x]).wait()
        return x

    def gather_columns(self, x: Tensor, total: int) -> Tensor:
        """The leader gets [n, total] of every rank's [n, len(part(total))]; the others keep theirs."""
        if self.world_size == 1:
            return x
        width = -(-total // self.world_size)
        x = F.pad(x, (0, width - x.shape[1])).contiguous()
        if x.is_cuda:
            options = dist.GatherOptions()
            options.rootRank = 0
            parts = [torch.empty_like(x) for _ in range(self.world_size)] if self.is_leader else []
            self._connected(self._nccl).gather([parts] if parts else [], [x], options).wait()
        else:
            parts = self._connected(self._peers).gather(x)
        return torch.cat(parts, dim=1)[:, :total] if parts else x

    def broadcast(self, x: Tensor) -> Tensor:
        """The leader's host tensor on every rank, in place; shapes and dtypes must agree."""
        if self.world_size > 1:
            self._connected(self._peers).broadcast(x)
        return x

    def _connected(self, connection: Connection | None) -> Connection:
        if connection is None:
            raise StaleEpoch("the ranks are not connected: call InitDevice and LoadModel first")
        return connection


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1.0).close()
    except OSError:
        return False
    return True


ALONE = TensorParallel()
"""One rank that holds the whole model."""
