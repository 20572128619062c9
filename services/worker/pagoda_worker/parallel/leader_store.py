"""LeaderStore: what NCCL's ranks must know to find each other, over the connections of `peers`. Knows torch's Store."""

import struct
from datetime import timedelta

from torch._C._distributed_c10d import Store

from pagoda_worker.parallel.peers import Peers

KEY_SIZE = struct.Struct("<I")


class LeaderStore(Store):
    """What rank 0 sets before `finish`, every rank gets. The ranks do nothing else with `peers` until then.

    A process group sets its unique id here, which only ranks may know: it lets its holder join.
    """

    def __init__(self, peers: Peers, *, is_leader: bool) -> None:
        super().__init__()
        self._peers = peers
        self._is_leader = is_leader
        self._is_finished = False
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        """Rank 0 tells it the others; what others set stays with them."""
        self._values[key] = content = value.encode() if isinstance(value, str) else bytes(value)
        if self._is_leader and not self._is_finished:
            name = key.encode()
            self._peers.tell(KEY_SIZE.pack(len(name)) + name + content)

    def get(self, key: str) -> bytes:
        """A value, once rank 0 has set it.

        Raises:
            KeyError: rank 0 did not set it.
            OSError: rank 0 has gone.
        """
        while key not in self._values and not self._is_leader and not self._is_finished:
            self._hear()
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Until all of them are there."""
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        """Whether all of them are there."""
        return all(key in self._values for key in keys)

    def finish(self) -> None:
        """The process group is connected. What is set from now on stays here."""
        if self._is_leader:
            self._peers.tell(b"")
        while not self._is_finished and not self._is_leader:
            self._hear()
        self._is_finished = True

    def _hear(self) -> None:
        content = self._peers.hear()
        if not content:
            self._is_finished = True
            return
        (size,) = KEY_SIZE.unpack_from(content)
        begin = KEY_SIZE.size
        self._values[content[begin : begin + size].decode()] = content[begin + size :]
