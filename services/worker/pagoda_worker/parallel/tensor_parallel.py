"""TensorParallel: sums and copies between the ranks that hold one model together.

Knows tensors and torch's process groups; no model, no messages. NCCL moves tensors of CUDA devices, `peers` those of
the host.
"""

import logging
import threading
import time
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from pagoda_common.errors import ConfigError, NotReady, StaleEpoch
from pagoda_worker.parallel.handshake import Listener, new_secret
from pagoda_worker.parallel.leader_store import LeaderStore
from pagoda_worker.parallel.peers import Peers

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 60.0
"""Seconds for all ranks to connect to rank 0."""
OPERATION_TIMEOUT_S = 300.0
"""Seconds for a rank to join a sum: another rank may compile kernels in its first step."""

Connection = TypeVar("Connection")


class TensorParallel:
    """One rank and its connections to the others, which are made for every start of the group.

    Every rank must call the same operations in the same order. One caller at a time, except for `abandon`.
    """

    def __init__(self, *, rank: int = 0, world_size: int = 1, host: str = "127.0.0.1") -> None:
        """`host`: name or address of this machine's interface at which other ranks reach it.

        Raises:
            ConfigError: the rank is not below the world size.
        """
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank is {rank}, must be below world_size, {world_size}", field="rank")
        self.rank = rank
        self.world_size = world_size
        self._host = host
        self._address: tuple[str, int] | None = None
        """Rank 0's listener."""
        self._secret = b""
        """Secret of this start of the group."""
        self._listener: Listener | None = None
        self._peers: Peers | None = None
        self._is_connected = False
        self._nccl: Any = None
        """Process group; None without CUDA."""
        self._store: LeaderStore | None = None
        """Kept as long as the process group, because torch calls its methods."""
        self._is_abandoned = threading.Event()

    @property
    def address(self) -> str:
        """Rank 0's address for the other ranks, and the secret that identifies them: host:port#secret. Empty on other
        ranks, and for a single rank. Only for calls between services, which need a service token or a certificate."""
        if not self.is_leader or self._address is None:
            return ""
        return "{}:{}#{}".format(*self._address, self._secret.hex())

    @property
    def is_leader(self) -> bool:
        """Whether this rank samples for all."""
        return self.rank == 0

    def part(self, total: int) -> range:
        """This rank's part of `total` columns or rows; all parts are equal except the last."""
        size = -(-total // self.world_size)
        return range(min(self.rank * size, total), min((self.rank + 1) * size, total))

    def open(self) -> None:
        """The leader's side: close earlier connections and listen at a new `address`, with a new secret.

        Raises:
            ConfigError: `host` is not an address of this machine.
        """
        self.close()
        self._is_abandoned.clear()
        self._secret = new_secret()
        self._listener = self._listen()
        self._address = self._host, self._listener.port

    def invite(self, address: str) -> None:
        """The other ranks' side: close earlier connections; `connect` will use this host:port#secret."""
        self.close()
        self._is_abandoned.clear()
        place, _, secret = address.partition("#")
        host, _, port = place.rpartition(":")
        self._address, self._secret = (host, int(port)), bytes.fromhex(secret)

    def _listen(self) -> Listener:
        try:
            return Listener(host=self._host, secret=self._secret, rank=self.rank, world_size=self.world_size)
        except OSError as error:
            raise ConfigError(
                f"ranks of a group must reach each other: {self._host!r} is not an address of this machine "
                f"({error}); set --advertise-address",
                field="advertise_address",
            ) from error

    def connect(self, device: torch.device) -> None:
        """Connect to the other ranks; returns when all are connected. No-op for a single rank, or if already connected.

        Raises:
            NotReady: a rank did not connect, or `abandon` was called.
            StaleEpoch: rank 0's address is not known.
        """
        if self.world_size == 1 or self._is_connected:
            return
        if self._address is None:
            raise StaleEpoch("rank 0's address is not known: call InitDevice first")
        if not self._secret:
            raise NotReady(f"rank 0 gave rank {self.rank} no secret: all ranks of a group must have the same version")
        try:
            self._meet(self._address, device)
        except (RuntimeError, OSError) as error:  # dist.DistError is a RuntimeError
            self.close()
            reason = str(error).partition("\n")[0]
            raise NotReady(f"rank {self.rank} could not meet the other ranks of its group: {reason}") from error
        logger.info("rank %d of %d is connected at %s:%d", self.rank, self.world_size, *self._address)

    def _meet(self, address: tuple[str, int], device: torch.device) -> None:
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        if self._listener is None:
            self._listener = self._listen()
        self._peers = peers = Peers(
            rank=self.rank,
            world_size=self.world_size,
            secret=self._secret,
            listener=self._listener,
            check=lambda absent: self._check(absent, deadline),
        )
        peers.connect(address, meet_timeout_s=CONNECT_TIMEOUT_S, timeout_s=OPERATION_TIMEOUT_S)
        if device.type == "cuda":
            self._join_devices(peers, device)
        self._is_connected = True

    def _join_devices(self, peers: Peers, device: torch.device) -> None:
        nccl: Any = dist.ProcessGroupNCCL  # its stubs know no options
        options = nccl.Options()
        options._timeout = timedelta(seconds=OPERATION_TIMEOUT_S)
        self._store = LeaderStore(peers, is_leader=self.is_leader)
        self._nccl = nccl(self._store, self.rank, self.world_size, options)
        self._nccl.allreduce([torch.zeros(1, device=device)]).wait()  # connects, while the peers carry nothing else
        self._store.finish()

    def _check(self, absent: str, deadline: float) -> None:
        if self._is_abandoned.is_set() or time.monotonic() > deadline:
            raise TimeoutError(f"{absent} did not come")

    def abandon(self) -> None:
        """Make a waiting `connect` or sum fail soon, from any thread."""
        self._is_abandoned.set()
        if self._peers is not None:
            self._peers.close()

    def close(self) -> None:
        """Disconnect from the other ranks: their waiting operations fail."""
        if self._nccl is not None:
            self._nccl.abort()
        if self._peers is not None:
            self._peers.close()
        if self._listener is not None:
            self._listener.close()
        self._nccl = self._store = self._peers = self._listener = self._address = None
        self._is_connected, self._secret = False, b""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in place; the same bits on each. `x` itself for one rank."""
        if self.world_size == 1:
            return x
        if x.is_cuda:
            self._connected(self._nccl).allreduce([x]).wait()
        elif x.is_contiguous():
            self._connected(self._peers).all_reduce(x)
        else:
            whole = x.contiguous()
            self._connected(self._peers).all_reduce(whole)
            x.copy_(whole)
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


ALONE = TensorParallel()
"""One rank that holds the whole model."""
