"""Snapshots of recurrent state: which are free, held or named by content, here and in host memory. No requests."""

from collections import OrderedDict

from pagoda_scheduler.kv.block_pool import BlockHash
from pagoda_scheduler.kv.host_cache import HostCache


class StateSnapshots:
    """Numbered places for states, each of them free, held, or named.

    A state's name is the hash of the block that it stands after. Named ones are evicted, the least recently used first,
    to host memory where there is some. A held one belongs to sequences, which are counted, and is not evicted. What a
    step that is being decided loads is not evicted before that step is sent: moves from the host come before loads.
    Source: the states of hybrid models in the radix cache of SGLang.
    """

    def __init__(self, *, num_snapshots: int, num_host_snapshots: int = 0) -> None:
        self.count = num_snapshots
        self.host = HostCache(num_blocks=num_host_snapshots)
        self.swap_out: dict[int, int] = {}
        """Snapshot by host snapshot, of the next step."""
        self.swap_in: list[tuple[int, int]] = []
        """(host snapshot, snapshot) of the next step."""
        self._free = list(range(num_snapshots - 1, -1, -1))
        self._named: OrderedDict[BlockHash, int] = OrderedDict()
        self._holders: dict[int, int] = {}
        self._pinned: set[BlockHash] = set()

    @property
    def num_named(self) -> int:
        """Those that can be found, on the device."""
        return len(self._named)

    def __contains__(self, name: BlockHash) -> bool:
        """Whether the state can be loaded."""
        return name in self._named or (name in self.host and self._can_take())

    def load(self, name: BlockHash) -> int:
        """The snapshot of a state that can be loaded; it comes from the host first if need be."""
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
        """Whether there is such a state on the device; it counts as used now."""
        if name not in self._named:
            return False
        self._named.move_to_end(name)
        return True

    def reserve(self) -> int | None:
        """A place for a new state, held once; None when all are held or read."""
        snapshot = self._take()
        if snapshot is not None:
            self._holders[snapshot] = 1
        return snapshot

    def hold(self, snapshot: int) -> None:
        """One more sequence holds it."""
        self._holders[snapshot] += 1

    def release(self, snapshot: int) -> None:
        """One sequence less holds it; free after the last."""
        self._holders[snapshot] -= 1
        if self._holders[snapshot] == 0:
            del self._holders[snapshot]
            self._free.append(snapshot)

    def name(self, snapshot: int, name: BlockHash) -> None:
        """Its only holder gives it up, for all to find."""
        if self.use(name):
            self.release(snapshot)
            return
        assert self._holders.pop(snapshot) == 1, "it is held by more than one"
        self._named[name] = snapshot

    def forget(self, name: BlockHash) -> None:
        """Nothing finds the state any more, on the device or on the host."""
        if (snapshot := self._named.pop(name, None)) is not None:
            self._free.append(snapshot)
        self.host.discard(name)

    def clear(self) -> None:
        """Forget every named state."""
        self._free += self._named.values()
        self._named.clear()
        self.host.clear()

    def end_step(self) -> None:
        """The step is on its way, with all its moves."""
        self.swap_out, self.swap_in = {}, []
        self._pinned.clear()
        self.host.end_step()

    def compact(self) -> None:
        """Move the hashes together, as `BlockPool.compact` does."""
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
        """Assert that every place is in exactly one state (for tests)."""
        places = [*self._free, *self._named.values(), *self._holders]
        assert sorted(places) == list(range(self.count))
        assert all(count > 0 for count in self._holders.values())
