"""What a pretend worker keeps of its sequences: blocks by cache group, and recurrent states. Checks every step."""

from collections.abc import Sequence

from pagoda_scheduler.core.step import NewRequestData, SchedulerOutput
from pagoda_scheduler.kv.cache_group import NO_BLOCK, CacheGroup

Content = tuple[int, tuple[int, ...]]
"""Of a block: the group that wrote it, and the sequence's tokens up to and in it, as far as they were written."""


class PretendBlocks:
    """The tables of every slot, one a group with blocks, over one pool of blocks."""

    def __init__(self, *, groups: Sequence[CacheGroup], block_size: int) -> None:
        self.windows = [group.window for group in groups if group.has_blocks]
        self.block_size = block_size
        self.content: dict[int, Content] = {}
        self.host_content: dict[int, Content] = {}
        self.tables: dict[int, list[list[int]]] = {}

    def move(self, output: SchedulerOutput) -> None:
        """What comes before the new sequences of a step."""
        for moves in (output.blocks_to_swap_out, output.blocks_to_swap_in, output.blocks_to_copy):
            assert len({target for _, target in moves}) == len(moves), "two moves at once to one block"
        for block, host_block in output.blocks_to_swap_out:
            self.host_content[host_block] = self.content[block]
        for host_block, block in output.blocks_to_swap_in:
            self.content[block] = self.host_content[host_block]
        for source, target in output.blocks_to_copy:
            self.content[target] = self.content[source]

    def start(self, new: NewRequestData) -> None:
        """A sequence enters a slot."""
        tables = [list(table) for table in (new.block_ids, *new.group_block_ids)]
        assert len({len(table) for table in tables}) == 1, "tables that are not aligned"
        self.tables[new.slot] = tables[: len(self.windows)]
        for window, table in zip(self.windows, self.tables[new.slot], strict=True):
            missing = table.count(NO_BLOCK)
            assert table[:missing] == [NO_BLOCK] * missing, "a hole in a table"
            assert window or not missing, "full attention reads every block"

    def append(self, output: SchedulerOutput) -> None:
        """Blocks for running sequences."""
        groups = output.appended_groups or [0] * len(output.appended_slots)
        for slot, block_id, group in zip(output.appended_slots, output.appended_block_ids, groups, strict=True):
            self.tables[slot][group].append(block_id)

    def capacity(self, slot: int) -> int:
        """Tokens that there are blocks for."""
        return min((len(table) * self.block_size for table in self.tables[slot]), default=1 << 30)

    def store(self, slot: int, log: Sequence[int], start: int, stop: int, *, checks: bool = True) -> None:
        """Write the tokens of `log` at positions [start, stop), after a look at what stands before them."""
        for group, (window, table) in enumerate(zip(self.windows, self.tables[slot], strict=True)):
            if start % self.block_size and checks and window != 1:
                owner, content = self.content[table[start // self.block_size]]
                assert (owner, content[:start]) == (group, tuple(log[:start])), "foreign tokens before those written"
            for position in range(start, stop):
                block = table[position // self.block_size]
                assert block != NO_BLOCK, "a token without a block"
                self.content[block] = (group, tuple(log[: position + 1]))

    def check(self, slot: int, log: Sequence[int], start: int, stop: int) -> None:
        """Assert that queries at positions [start, stop) find exactly the slot's log, as far as their windows go."""
        size = self.block_size
        for group, (window, table) in enumerate(zip(self.windows, self.tables[slot], strict=True)):
            first = max(0, start - window + 1) if window else 0
            for position in (*range(first // size * size + size - 1, stop, size), stop - 1):
                owner, content = self.content[table[position // size]]
                assert owner == group, "another group's block"
                assert content[: position + 1] == tuple(log[: position + 1]), "foreign tokens in a block"
                assert (len(content) - 1) // size == position // size, "another block's tokens"


State = tuple[int, ...]
"""Of recurrent layers: the tokens that it has seen."""


class PretendStates:
    """The recurrent states of slots, and snapshots of them."""

    def __init__(self) -> None:
        self.slots: dict[int, State] = {}
        self.snapshots: dict[int, State] = {}
        self.host_snapshots: dict[int, State] = {}
        self.num_loaded = self.num_saved = 0

    def move(self, output: SchedulerOutput) -> None:
        """What comes before the new sequences of a step."""
        for moves in (output.states_to_swap_out, output.states_to_swap_in):
            assert len({target for _, target in moves}) == len(moves), "two moves at once to one snapshot"
        for snapshot, host_snapshot in output.states_to_swap_out:
            self.host_snapshots[host_snapshot] = self.snapshots[snapshot]
        for host_snapshot, snapshot in output.states_to_swap_in:
            self.snapshots[snapshot] = self.host_snapshots[host_snapshot]

    def start(self, output: SchedulerOutput) -> None:
        """The states of the sequences that enter slots."""
        entering = {new.slot for new in output.new_requests}
        self.slots.update(dict.fromkeys(entering, ()))
        assert len({slot for _, slot in output.states_to_load}) == len(output.states_to_load)
        for snapshot, slot in output.states_to_load:
            assert slot in entering, "a state for a sequence that has one"
            self.slots[slot] = self.snapshots[snapshot]
            self.num_loaded += 1

    def advance(self, slot: int, log: Sequence[int], start: int, stop: int) -> None:
        """Tokens [start, stop) of the slot's log are computed."""
        assert self.slots[slot] == tuple(log[:start]), "another sequence's state"
        self.slots[slot] = tuple(log[:stop])

    def save(self, output: SchedulerOutput) -> None:
        """What comes after the forward pass."""
        assert len({snapshot for _, snapshot in output.states_to_save}) == len(output.states_to_save)
        for slot, snapshot in output.states_to_save:
            assert slot in output.slots, "the state of a sequence that is not in the step"
            self.snapshots[snapshot] = self.slots[slot]
            self.num_saved += 1
