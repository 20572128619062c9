"""Prefixes by block: what groups, windows, states and host memory offer, and what a fork shares."""

from typing import Any

import pytest

from pagoda_scheduler.kv.block_tables import BlockTables
from pagoda_scheduler.kv.cache_group import NO_BLOCK, CacheGroup
from pagoda_scheduler.kv.prefix import Prefix, PrefixFinder
from pagoda_scheduler.kv.recurrent_states import RecurrentStates
from pagoda_scheduler.kv.transfers import Transfers
from tests.unit.scheduler.stories import make_request

HASHES = [b"a", b"b", b"c", b"d"]
FULL, WINDOW = CacheGroup("full"), CacheGroup("window", window=5)


class Pool(dict[bytes, int]):
    """Blocks by key."""

    def find(self, hashes: list[bytes]) -> list[int]:
        found = []
        for block_hash in hashes:
            if block_hash not in self:
                break
            found.append(self[block_hash])
        return found


def find(
    pool: dict[bytes, int],
    *,
    host: set[bytes] = frozenset(),  # type: ignore[assignment]  # nothing is added
    groups: tuple[CacheGroup, ...] = (FULL,),
    states: set[bytes] | None = None,
    uses_host: bool = True,
) -> Prefix:
    return finder_of(Pool(pool), host, groups, states).find(HASHES, uses_host=uses_host)


def finder_of(pool: Pool, host: Any, groups: tuple[CacheGroup, ...], states: Any) -> PrefixFinder:
    tables = BlockTables(groups=groups, block_size=4, max_step_tokens=64)
    return PrefixFinder(tables=tables, pool=pool, host=host, block_size=4, snapshots=states)  # type: ignore[arg-type]


def test_nothing_is_a_prefix_of_no_blocks() -> None:
    prefix = Prefix()
    assert (prefix.tables, prefix.device_blocks, prefix.num_tokens) == ([], [], 0)
    assert (prefix.forked_from, prefix.state, prefix.branch_point) == (None, None, 0)


def test_a_plain_prefix_is_on_the_device_then_on_the_host() -> None:
    pool = {b"a": 7, b"d": 9}
    assert find(pool, host={b"b", b"d"}) == Prefix([[7, b"b"]], [7], 8)
    assert find(pool, host={b"b", b"c"}) == Prefix([[7, b"b", b"c"]], [7], 12)
    assert find(pool, host={b"b"}, uses_host=False) == Prefix([[7]], [7], 4)
    assert find({}, host={b"b"}) == Prefix([[]], [], 0)


def key(name: bytes) -> bytes:
    """Of a window, the second group."""
    return name + b"\x01"


def test_a_window_needs_the_blocks_that_its_next_query_reads() -> None:
    """Query 12 sees tokens 8 to 12: block 2 alone. Query 16 sees blocks 3 and 4."""
    pool = {b"a": 1, b"b": 2, b"c": 3, key(b"c"): 13}
    prefix = find(pool, groups=(FULL, WINDOW))
    assert prefix == Prefix([[1, 2, 3], [NO_BLOCK, NO_BLOCK, 13]], [1, 2, 3, 13], 12)
    prefix = find({**pool, b"d": 4}, groups=(FULL, WINDOW))
    assert prefix.num_tokens == 12, "the window has not block 3"
    prefix = find({b"a": 1, b"b": 2, b"c": 3}, groups=(FULL, WINDOW))
    assert prefix == Prefix([[], []], [], 0)


def test_host_blocks_count_in_every_group() -> None:
    pool = {b"a": 1, b"b": 2, key(b"b"): 12}
    host = {b"c", key(b"c"), b"b"}
    prefix = find(pool, host=host, groups=(FULL, WINDOW))
    assert prefix == Prefix([[1, 2, b"c"], [NO_BLOCK, NO_BLOCK, key(b"c")]], [1, 2], 12)
    prefix = find(pool, host=host, groups=(FULL, WINDOW), uses_host=False)
    assert prefix == Prefix([[1, 2], [NO_BLOCK, 12]], [1, 2, 12], 8)


def test_every_full_group_offers_it() -> None:
    pool = {b"a": 1, b"b": 2, b"c": 3, key(b"a"): 11, key(b"b"): 12}
    assert find(pool, groups=(FULL, FULL)) == Prefix([[1, 2], [11, 12]], [1, 2, 11, 12], 8)
    pool = {b"a": 1, key(b"a"): 11, key(b"b"): 12}
    assert find(pool, groups=(FULL, FULL)) == Prefix([[1], [11]], [1, 11], 4)


def test_a_prefix_ends_where_a_state_is() -> None:
    pool = {b"a": 1, b"b": 2, b"c": 3}
    groups = (FULL, CacheGroup("recurrent"))
    assert find(pool, groups=groups, states={b"b"}) == Prefix([[1, 2]], [1, 2], 8, state=b"b", branch_point=12)
    assert find(pool, groups=groups, states={b"c"}) == Prefix([[1, 2, 3]], [1, 2, 3], 12, state=b"c")
    assert find(pool, groups=groups, states={b"a", b"d"}) == Prefix([[1]], [1], 4, state=b"a", branch_point=12)
    assert find(pool, groups=groups, states={b"d"}) == Prefix([[]], [], 0, branch_point=12)


def test_a_state_is_good_only_with_its_window() -> None:
    pool = {b"a": 1, b"b": 2, b"c": 3, key(b"c"): 13, key(b"a"): 11}
    groups = (FULL, WINDOW, CacheGroup("recurrent"))
    prefix = find(pool, groups=groups, states={b"a", b"b"})
    assert prefix == Prefix([[1], [11]], [1, 11], 4, state=b"a", branch_point=12)
    assert find(pool, groups=groups, states={b"b"}) == Prefix([[], []], [], 0, branch_point=12)


@pytest.mark.parametrize(("num_prompt", "shared", "tokens"), [(8, [1], 7), (9, [1, 2], 8), (10, [1, 2], 9), (1, [], 0)])
def test_a_fork_shares_all_but_the_last_token(num_prompt: int, shared: list[int], tokens: int) -> None:
    finder = finder_of(Pool(), set(), (FULL,), None)
    leader, sibling = make_request("leader", num_prompt), make_request("sibling", num_prompt)
    leader.block_ids = [1, 2, 3]
    assert finder.fork(sibling, leader) == Prefix([shared], shared, tokens, leader)


def test_a_fork_of_a_window_needs_what_it_reads() -> None:
    finder = finder_of(Pool(), set(), (FULL, WINDOW), None)
    leader, sibling = make_request("leader", 13), make_request("sibling", 13)
    leader.block_ids, leader.group_block_ids = [1, 2, 3], [[NO_BLOCK, NO_BLOCK, 13]]
    leader.first_blocks = [0, 2]
    expected = Prefix([[1, 2, 3], [NO_BLOCK, NO_BLOCK, 13]], [1, 2, 3, 13], 12, leader)
    assert finder.fork(sibling, leader) == expected
    leader.first_blocks = [0, 3]
    assert finder.fork(sibling, leader) is None
    assert finder_of(Pool(), set(), (FULL,), set()).fork(sibling, leader) is None, "a state is further on"


class Snapshots:
    """Snapshots that are numbered as they come."""

    def __init__(self, count: int = 3) -> None:
        self.count = count
        self.calls: list[tuple[Any, ...]] = []
        self.known: set[bytes] = set()
        self.swap_out = {50: 5}
        self.swap_in = [(60, 6)]
        self._next = 0

    def reserve(self) -> int | None:
        self._next += 1
        return self._next - 1 if self._next <= self.count else None

    def use(self, name: bytes) -> bool:
        return name in self.known

    def load(self, name: bytes) -> int:
        self.calls.append(("load", name))
        return 40

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.calls.append((name, *args))


class Hasher:
    """The hash of a block is its number."""

    def of(self, request: object, count: int) -> list[bytes]:
        return [bytes((number,)) for number in range(count)]


def states_of(snapshots: Snapshots, *, interval: int = 10, is_named: bool = True) -> RecurrentStates:
    return RecurrentStates(
        snapshots=snapshots,  # type: ignore[arg-type]  # numbers them
        hasher=Hasher(),  # type: ignore[arg-type]  # numbers them
        block_size=4,
        interval=interval,
        is_named=is_named,
    )


@pytest.mark.parametrize(
    ("start", "num_new", "branch", "cut"),
    [
        (0, 30, 0, 12),  # an interval of 10 tokens is one of 3 blocks
        (0, 13, 0, 12),
        (0, 12, 0, 12),
        (0, 11, 0, 11),
        (12, 18, 0, 12),
        (11, 18, 0, 1),
        (24, 6, 0, 4),  # the last full block of 30 tokens ends at 28
        (28, 2, 0, 2),
        (0, 30, 8, 8),
        (8, 22, 8, 4),
        (0, 1, 0, 1),
        (11, 1, 0, 1),
        (11, 2, 0, 1),
    ],
)
def test_a_chunk_ends_where_a_state_is_kept(start: int, num_new: int, branch: int, cut: int) -> None:
    request = make_request("r", 30)
    request.branch_point = branch
    assert states_of(Snapshots()).cut(request, start, num_new) == cut
    assert states_of(Snapshots(), is_named=False).cut(request, start, num_new) == num_new
    assert states_of(Snapshots(count=0)).cut(request, start, num_new) == num_new


@pytest.mark.parametrize(
    ("num_computed", "num_new", "branch", "name"),
    [
        (0, 12, 0, b"\x02"),
        (0, 24, 0, b"\x05"),
        (24, 4, 0, b"\x06"),
        (0, 8, 0, None),
        (0, 8, 8, b"\x01"),
        (0, 13, 0, None),
        (24, 6, 0, None),
    ],
)
def test_a_state_is_named_at_the_end_of_its_step(
    num_computed: int, num_new: int, branch: int, name: bytes | None
) -> None:
    snapshots = Snapshots()
    states, request = states_of(snapshots), make_request("r", 30)
    request.num_computed_tokens, request.branch_point, request.slot = num_computed, branch, 7
    states.save_after({request: num_new}, ())
    transfers = Transfers()
    states.take(transfers)
    assert transfers.states_to_save == ([] if name is None else [(7, 0)])
    assert snapshots.calls == ([] if name is None else [("name", 0, name)]) + [("end_step",)]
    assert transfers.states_to_swap_out == [(5, 50)]
    assert transfers.states_to_swap_in == [(60, 6)]
    assert transfers.states_to_load == []


def test_a_state_that_is_there_is_not_kept_twice() -> None:
    snapshots = Snapshots()
    states, requests = states_of(snapshots), [make_request(name, 30) for name in "ab"]
    states.save_after(dict.fromkeys(requests, 12), ())
    transfers = Transfers()
    states.take(transfers)
    assert len(transfers.states_to_save) == 1, "of two in one step"
    snapshots.known.add(b"\x02")
    states.save_after(dict.fromkeys(requests, 12), ())
    states.take(transfers)
    assert transfers.states_to_save == []


def test_guesses_have_no_state() -> None:
    states, request = states_of(Snapshots()), make_request("r", 30)
    states.save_after({request: 12}, {request})
    request.num_lookahead = 1
    states.save_after({request: 12}, ())
    transfers = Transfers()
    states.take(transfers)
    assert transfers.states_to_save == []


def test_a_state_of_unknown_tokens_is_named_when_they_are_known() -> None:
    snapshots = Snapshots()
    states, request = states_of(snapshots), make_request("r", 11)
    request.num_tokens, request.num_pending, request.num_computed_tokens = 12, 1, 11
    states.save_after({request: 1}, ())
    assert request.unnamed_states == [(12, 0)]
    request.unnamed_states.append((16, 1))
    states.name_known(request, HASHES, 2)
    assert request.unnamed_states == [(12, 0), (16, 1)]
    states.name_known(request, HASHES, 3)
    assert snapshots.calls == [("name", 0, b"c")]
    assert request.unnamed_states == [(16, 1)]
    states.free(request)
    assert snapshots.calls[1:] == [("release", 1)]
    assert request.unnamed_states == []


def test_a_request_begins_with_the_state_that_is_loaded() -> None:
    snapshots = Snapshots()
    states, first, second = states_of(snapshots), make_request("a", 9), make_request("b", 9)
    first.slot, second.slot = 3, 4
    states.admit(first, b"x")
    states.admit(second, b"y")
    states.free(second)
    transfers = Transfers()
    states.take(transfers)
    assert transfers.states_to_load == [(40, 3)]
    states.take(transfers)
    assert transfers.states_to_load == []
    assert snapshots.calls == [("load", b"x"), ("load", b"y"), ("end_step",), ("end_step",)]


def test_a_beam_holds_its_state_until_it_lets_go() -> None:
    snapshots = Snapshots()
    states, beam, child = states_of(snapshots, is_named=False), make_request("a", 9), make_request("b", 9)
    beam.slot = 2
    beam.held_state = 0
    assert states.can_begin_anew(beam)
    assert not states.can_begin_anew(child)
    states.fork(beam, child)
    assert (child.held_state, snapshots.calls) == (0, [("hold", 0)])
    states.begin_anew(beam)
    assert (beam.held_state, snapshots.calls[1:]) == (-1, [("release", 0)])
    transfers = Transfers()
    states.take(transfers)
    assert transfers.states_to_load == [(0, 2)]
    states.let_go(beam)
    assert snapshots.calls[2:] == [("end_step",)], "it holds none"
