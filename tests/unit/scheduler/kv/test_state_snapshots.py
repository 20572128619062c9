"""Places for snapshots of recurrent state: who is evicted, who is not, and what moves."""

from pagoda_scheduler.kv.state_snapshots import StateSnapshots


def named(snapshots: StateSnapshots, name: bytes) -> int | None:
    place = snapshots.reserve()
    if place is not None:
        snapshots.name(place, name)
    return place


def test_the_least_recently_used_name_is_evicted() -> None:
    snapshots = StateSnapshots(num_snapshots=3)
    a, b, c = (named(snapshots, name) for name in (b"a", b"b", b"c"))
    assert [a, b, c] == [0, 1, 2]
    assert snapshots.load(b"a") == a
    snapshots.end_step()
    assert snapshots.use(b"b")
    assert named(snapshots, b"d") == c
    assert [name in snapshots for name in (b"a", b"b", b"c", b"d")] == [True, True, False, True]
    assert named(snapshots, b"e") == a, "b was used later"
    snapshots.check_invariants()


def test_what_is_held_or_read_in_this_step_stays() -> None:
    snapshots = StateSnapshots(num_snapshots=2)
    place = named(snapshots, b"a")
    held = snapshots.reserve()
    assert held is not None
    assert snapshots.load(b"a") == place
    assert snapshots.reserve() is None
    snapshots.hold(held)
    snapshots.release(held)
    assert snapshots.reserve() is None, "it was held twice"
    snapshots.end_step()
    assert snapshots.reserve() == place
    snapshots.release(held)
    assert snapshots.reserve() == held
    snapshots.check_invariants()


def test_a_second_state_of_the_same_name_is_given_back() -> None:
    snapshots = StateSnapshots(num_snapshots=2)
    first, second = snapshots.reserve(), snapshots.reserve()
    assert first is not None
    assert second is not None
    snapshots.name(first, b"a")
    snapshots.name(second, b"a")
    assert (snapshots.load(b"a"), snapshots.reserve(), snapshots.num_named) == (first, second, 1)
    snapshots.check_invariants()


def test_evicted_states_go_to_the_host_and_come_back() -> None:
    snapshots = StateSnapshots(num_snapshots=1, num_host_snapshots=2)
    named(snapshots, b"a")
    named(snapshots, b"b")
    assert (snapshots.swap_out, snapshots.swap_in) == ({0: 0}, [])
    snapshots.end_step()
    assert b"a" in snapshots
    assert not snapshots.use(b"a"), "it is not on the device"
    assert snapshots.load(b"a") == 0
    assert (snapshots.swap_out, snapshots.swap_in) == ({1: 0}, [(0, 0)])
    assert b"b" not in snapshots, "there is no place for it before the step is sent"
    snapshots.end_step()
    assert b"b" in snapshots
    snapshots.forget(b"a")
    snapshots.forget(b"b")
    assert (b"a" in snapshots, b"b" in snapshots) == (False, False)
    named(snapshots, b"c")
    snapshots.clear()
    assert (b"c" in snapshots, snapshots.num_named) == (False, 0)
    snapshots.check_invariants()


def test_without_places_nothing_is_kept() -> None:
    snapshots = StateSnapshots(num_snapshots=0, num_host_snapshots=4)
    assert (snapshots.reserve(), b"a" in snapshots) == (None, False)
