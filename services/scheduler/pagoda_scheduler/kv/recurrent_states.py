"""RecurrentStates: saves, loads and shares recurrent states of sequences. Knows requests and snapshots; no blocks."""

from collections.abc import Container, Mapping, Sequence

from pagoda_scheduler.core.request import Request
from pagoda_scheduler.kv.block_hashes import BlockHasher
from pagoda_scheduler.kv.block_pool import BlockHash
from pagoda_scheduler.kv.state_snapshots import StateSnapshots
from pagoda_scheduler.kv.transfers import Transfers


class RecurrentStates:
    """Snapshots of the states that a model's recurrent layers have in the worker's slots.

    A state cannot be rolled back, so it is kept only where another sequence may begin: at the end of a prompt's last
    full block, at every multiple of an interval, and where the blocks of other cache groups show that an earlier prompt
    differs from this one. Prompts are cut into chunks that end there. A snapshot is saved after a step and loaded
    before one, so it can be found from the next step; if its tokens are not known yet, once they are.

    A beam's state is saved in every step, because its forks, and the beam itself with another token, start from there.
    """

    def __init__(
        self, *, snapshots: StateSnapshots, hasher: BlockHasher, block_size: int, interval: int, is_named: bool
    ) -> None:
        """`interval`: in tokens; `is_named`: keep states that other sequences can find, not only those of beams."""
        self.snapshots = snapshots
        self._hasher = hasher
        self._block_size = block_size
        self._interval = -(-interval // block_size) * block_size
        self._is_named = is_named and snapshots.count > 0
        self._loads: dict[Request, int] = {}
        self._saves: list[tuple[int, int]] = []
        """(slot, snapshot) of the next step."""
        self._names: dict[BlockHash, int] = {}
        """Snapshots of the next step whose tokens are already known."""

    def cut(self, request: Request, start: int, num_new: int) -> int:
        """How many of `num_new` tokens from position `start` to compute, so that a state can be kept after them."""
        if not self._is_named or num_new <= 1:
            return num_new
        wanted = (self._last_boundary(request), start - start % self._interval + self._interval, request.branch_point)
        return min((stop - start for stop in wanted if start < stop < start + num_new), default=num_new)

    def admit(self, request: Request, name: BlockHash) -> None:
        """The request begins with a state that is loaded."""
        self._loads[request] = self.snapshots.load(name)

    def save_after(self, scheduled: Mapping[Request, int], ahead: Container[Request]) -> None:
        """Keep states after the step that computes `scheduled`; `ahead`: sequences with drafts."""
        if not self.snapshots.count:
            return
        for request, num_new in scheduled.items():
            end = request.num_computed_tokens + num_new
            if request.is_beam and end == request.num_tokens:
                request.held_state = self._save(request)
            elif self._is_wanted(request, end) and not request.num_lookahead and request not in ahead:
                self._save_at(request, end)

    def name_known(self, request: Request, hashes: Sequence[BlockHash], num_full: int) -> None:
        """The request's first `num_full` blocks are computed, and their tokens known."""
        kept = []
        for end, snapshot in request.unnamed_states:
            if end <= num_full * self._block_size:
                self.snapshots.name(snapshot, hashes[end // self._block_size - 1])
            else:
                kept.append((end, snapshot))
        request.unnamed_states = kept

    def can_begin_anew(self, request: Request) -> bool:
        """Whether the state after all computed tokens of the request is held."""
        return request.held_state >= 0

    def fork(self, parent: Request, child: Request) -> None:
        """`child` begins at the position of `parent`, whose state must be held."""
        child.held_state = parent.held_state
        self.snapshots.hold(child.held_state)

    def begin_anew(self, request: Request) -> None:
        """The request enters its slot with the next step, from the state that it holds."""
        self._loads[request] = request.held_state
        self.let_go(request)

    def let_go(self, request: Request) -> None:
        """The request no longer needs the state that it holds."""
        if request.held_state >= 0:
            self.snapshots.release(request.held_state)
            request.held_state = -1

    def free(self, request: Request) -> None:
        """The request leaves its slot."""
        self.let_go(request)
        for _, snapshot in request.unnamed_states:
            self.snapshots.release(snapshot)
        request.unnamed_states = []
        self._loads.pop(request, None)

    def forget(self, request: Request) -> None:
        """Drop the states that the request has kept: they are garbage, or must not be shared."""
        for block_hash in request.block_hashes:
            self.snapshots.forget(block_hash)

    def take(self, transfers: Transfers) -> None:
        """Add the transfers of the step that is being sent."""
        snapshots = self.snapshots
        transfers.states_to_load = [(snapshot, request.slot) for request, snapshot in self._loads.items()]
        transfers.states_to_save = self._saves
        transfers.states_to_swap_out = [(snapshot, host) for host, snapshot in snapshots.swap_out.items()]
        transfers.states_to_swap_in = snapshots.swap_in
        self._loads, self._saves = {}, []
        for name, snapshot in self._names.items():
            snapshots.name(snapshot, name)
        self._names.clear()
        snapshots.end_step()

    def _last_boundary(self, request: Request) -> int:
        """End of the last full block before the sequence's last token, which must run."""
        return (request.num_tokens - 1) // self._block_size * self._block_size

    def _is_wanted(self, request: Request, end: int) -> bool:
        if not self._is_named:
            return False
        return end % self._interval == 0 or end in (self._last_boundary(request), request.branch_point)

    def _save_at(self, request: Request, end: int) -> None:
        """Keep the state after the first `end` tokens, a number of full blocks."""
        index = end // self._block_size - 1
        if end > request.num_known_tokens:
            if (snapshot := self._save(request)) >= 0:
                request.unnamed_states.append((end, snapshot))
            return
        name = self._hasher.of(request, index + 1)[index]
        if name in self._names or self.snapshots.use(name):
            return
        if (snapshot := self._save(request)) >= 0:
            self._names[name] = snapshot

    def _save(self, request: Request) -> int:
        """Save the request's state after the step in a snapshot that it holds; -1 if none is free."""
        snapshot = self.snapshots.reserve()
        if snapshot is None:
            return -1
        self._saves.append((request.slot, snapshot))
        return snapshot
