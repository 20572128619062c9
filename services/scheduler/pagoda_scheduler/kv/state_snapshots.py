"""StateSnapshots: free, held and named snapshots of recurrent state, on the device and in host memory. No requests."""

from collections import OrderedDict

from pagoda_scheduler.kv.block_pool import BlockHash
from pagoda_scheduler.kv.host_cache import HostCache


class StateSnapshots:
    """Numbered snapshots, each of them free, held, or named.

    A state's name is the hash of the block that precedes it. Named snapshots are evicted, least recently used first, to
    host memory if there is some. A held snapshot belongs to sequences, which are counted, and is not evicted. Snapshots
    that a step loads are not evicted before that step is sent, because moves from the host come before loads. Source:
    the states of hybrid models in the radix cache of SGLang.
    """

    def __init__(self, *, num_snapshots: int, num_host_snapshots: int = 0) -> None:
        self.count = num_snapshots
        self.host = HostCache(num_blocks=num_host_snapshots)
        self.swap_out: dict[int, int] = {}
        """Swap-outs of the next step: snapshot by host snapshot."""
        self.swap_in: list[tuple[int, int]] = []
        """Swap-ins of the next step: (host snapshot, snapshot)."""
        self._free = list(range(num_snapshots - 1, -1, -1))
        self._named: OrderedDict[BlockHash, int] = OrderedDict()
        self._holders: dict[int, int] = {}
        self._pinned: set[BlockHash] = set()

    @property
    def num_named(self) -> int:
        """Named snapshots on the device."""
        return len(self._named)

    def __contains__(self, name: BlockHash) -> bool:
        """Whether the state can be loaded."""
        return name in self._named or (name in self.host and self._can_take())

    def load(self, name: BlockHash) -> int:
        """The snapshot of a state that can be loaded; it is swapped in if needed."""
        if name not in self._named:
            host_snapshot = self.host.find(name)
            snapshot = self._take()
            assert snapshot is not None, "`in` has said yes"
            self.swap_in.append((host_snapshot, snapshot))
            self._named[name] = snapshot
        self._named.move_to_end(name)
        self._pinned.add(name)
        return self._named[name]

    def use(self, name: BlockHash) -> bool:
        """Whether the state is on the device; marks it as used now."""
        if name not in self._named:
            return False
        self._named.move_to_end(name)
        return True

    def reserve(self) -> int | None:
        """A snapshot for a new state, held once; None if all are held or read."""
        snapshot = self._take()
        if snapshot is not None:
            self._holders[snapshot] = 1
        return snapshot

    def hold(self, snapshot: int) -> None:
        """One more sequence holds the snapshot."""
        self._holders[snapshot] += 1

    def release(self, snapshot: int) -> None:
        """One sequence less holds the snapshot; it is free after the last."""
        self._holders[snapshot] -= 1
        if self._holders[snapshot] == 0:
            del self._holders[snapshot]
            self._free.append(snapshot)

    def name(self, snapshot: int, name: BlockHash) -> None:
        """Its only holder gives the snapshot a name, under which all sequences can find it."""
        if self.use(name):
            self.release(snapshot)
            return
        assert self._holders.pop(snapshot) == 1, "it is held by more than one"
        self._named[name] = snapshot

    def forget(self, name: BlockHash) -> None:
        """Remove the state's name, on the device and on the host."""
        if (snapshot := self._named.pop(name, None)) is not None:
            self._free.append(snapshot)
        self.host.discard(name)

    def clear(self) -> None:
        """Drop every named state."""
        self._free += self._named.values()
        self._named.clear()
        self.host.clear()

    def end_step(self) -> None:
        """The step is sent, with all its transfers."""
        self.swap_out, self.swap_in = {}, []
        self._pinned.clear()
        self.host.end_step()

    def compact(self) -> None:
        """Copy the hashes into new memory, as `BlockPool.compact` does."""
        self._named = OrderedDict((bytes(memoryview(name)), snapshot) for name, snapshot in self._named.items())
        self.host.compact()

    def _can_take(self) -> bool:
        return bool(self._free) or any(name not in self._pinned for name in self._named)

    def _take(self) -> int | None:
        if self._free:
            return self._free.pop()
        for name, snapshot in self._named.items():
            if name not in self._pinned:
                del self._named[name]
                if (host_snapshot := self.host.save(name)) is not None:
                    self.swap_out[host_snapshot] = snapshot
                return snapshot
        return None

    def check_invariants(self) -> None:
        """Assert that every snapshot is in exactly one state (for tests)."""
        places = [*self._free, *self._named.values(), *self._holders]
        assert sorted(places) == list(range(self.count))
        assert all(count > 0 for count in self._holders.values())
