"""LeaderStore: a torch Store over the connections of `peers`, by which NCCL's ranks find each other."""

import struct
from datetime import timedelta

from torch._C._distributed_c10d import Store

from pagoda_worker.parallel.peers import Peers

KEY_SIZE = struct.Struct("<I")


class LeaderStore(Store):
    """Every rank gets what rank 0 sets before `finish`; until then the ranks must not use `peers` otherwise.

    A process group sets its unique id here, which only ranks may know, because it allows joining.
    """

    def __init__(self, peers: Peers, *, is_leader: bool) -> None:
        super().__init__()
        self._peers = peers
        self._is_leader = is_leader
        self._is_finished = False
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        """Set a value; rank 0 sends it to the others, those of other ranks stay local."""
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
        """Wait until all keys are set."""
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are set."""
        return all(key in self._values for key in keys)

    def finish(self) -> None:
        """The process group is connected: values set later stay local."""
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
