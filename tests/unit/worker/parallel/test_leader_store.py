"""What rank 0 sets reaches the others, through torch's own interface of stores."""

from datetime import timedelta
from typing import Any

import pytest
from torch._C._distributed_c10d import PrefixStore

from pagoda_worker.parallel.leader_store import LeaderStore


class Line:
    """Carries what rank 0 tells to one other rank, in order."""

    def __init__(self) -> None:
        self.told: list[bytes] = []

    def tell(self, content: bytes) -> None:
        self.told.append(content)

    def hear(self) -> bytes:
        return self.told.pop(0)


@pytest.fixture
def stores() -> tuple[LeaderStore, LeaderStore]:
    line: Any = Line()
    return LeaderStore(line, is_leader=True), LeaderStore(line, is_leader=False)


def test_values_of_rank_0_arrive_in_any_order(stores: tuple[LeaderStore, LeaderStore]) -> None:
    leader, other = stores
    leader.set("a", b"\x00\xff")
    leader.set("b", "text")
    assert (leader.get("a"), leader.check(["a", "b"]), leader.check(["a", "c"])) == (b"\x00\xff", True, False)
    assert (other.get("b"), other.get("a")) == (b"text", b"\x00\xff")
    other.wait(["a", "b"], timedelta(seconds=1))
    assert other.check(["a", "b"])


def test_torch_calls_it_as_it_calls_its_own(stores: tuple[LeaderStore, LeaderStore]) -> None:
    leader, other = (PrefixStore("group", store) for store in stores)
    leader.set("0", bytes(range(128)).hex())
    assert bytes(other.get("0")) == bytes(range(128)).hex().encode()
    assert other.check(["0"])
    assert not other.check(["1"])


def test_nothing_is_told_once_the_ranks_are_connected(stores: tuple[LeaderStore, LeaderStore]) -> None:
    leader, other = stores
    leader.set("a", b"1")
    leader.set("unread", b"2")
    assert other.get("a") == b"1"
    leader.finish()
    other.finish()
    leader.set("late", b"3")
    other.set("own", b"4")
    assert (leader.get("late"), other.get("own"), other.get("unread")) == (b"3", b"4", b"2")
    for store in stores:
        with pytest.raises(KeyError):
            store.get("nothing")
