"""Peers of one process: sums, copies and gathers of three ranks, in chunks; and who is let in."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from pagoda_common.errors import ConfigError, StaleEpoch
from pagoda_worker.parallel import peers as module
from pagoda_worker.parallel.handshake import Listener, dial, new_secret
from pagoda_worker.parallel.peers import MAX_DIRECT_BYTES, Peers
from pagoda_worker.parallel.tensor_parallel import ALONE, TensorParallel

WORLD_SIZE = 3


def on_each(ranks: list[Peers], run: Callable[[Peers, int], Any]) -> list[Any]:
    """What each rank's thread gives."""
    results: list[Any] = [None] * len(ranks)

    def one(rank: int) -> None:
        results[rank] = run(ranks[rank], rank)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    return results


def make_ranks(world_size: int = WORLD_SIZE) -> tuple[list[Peers], tuple[str, int]]:
    """Ranks that have not met, and where rank 0 listens."""
    secret = new_secret()
    ranks, places = [], []
    for rank in range(world_size):
        listener = Listener(host="127.0.0.1", secret=secret, rank=rank, world_size=world_size)
        places.append((listener.host, listener.port))
        ranks.append(
            Peers(rank=rank, world_size=world_size, secret=secret, listener=listener, check=lambda absent: None)
        )
    return ranks, places[0]


@pytest.fixture
def ranks() -> Iterator[list[Peers]]:
    ranks, place = make_ranks()
    on_each(ranks, lambda peers, rank: peers.connect(place, meet_timeout_s=60, timeout_s=60))
    yield ranks
    for peers in ranks:
        peers.close()


def test_a_sum_is_over_all_ranks_in_chunks_of_any_size(ranks: list[Peers], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 16)
    for size in (1, 4, 5, 9):
        given = [torch.arange(size, dtype=torch.float32) * 10**rank for rank in range(WORLD_SIZE)]
        on_each(ranks, lambda peers, rank, given=given: peers.all_reduce(given[rank]))
        assert [each.tolist() for each in given] == [[111.0 * place for place in range(size)]] * WORLD_SIZE


def test_more_than_two_ranks_add_up_in_float32_in_their_order(ranks: list[Peers]) -> None:
    given = [torch.tensor([value], dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    on_each(ranks, lambda peers, rank: peers.all_reduce(given[rank]))
    assert [float(each) for each in given] == [258.0] * WORLD_SIZE, "rounded once"


def test_rank_0_s_tensor_goes_to_all_and_all_go_to_rank_0(ranks: list[Peers]) -> None:
    given = [torch.full((2, 2), float(rank + 5)) for rank in range(WORLD_SIZE)]
    on_each(ranks, lambda peers, rank: peers.broadcast(given[rank]))
    assert [each.tolist() for each in given] == [[[5.0, 5.0], [5.0, 5.0]]] * WORLD_SIZE
    own = [torch.full((2,), rank) for rank in range(WORLD_SIZE)]
    gathered = on_each(ranks, lambda peers, rank: peers.gather(own[rank]))
    assert [each.tolist() for each in gathered[0]] == [[0, 0], [1, 1], [2, 2]]
    assert gathered[1:] == [[], []]


def test_a_rank_that_has_gone_is_an_error(ranks: list[Peers]) -> None:
    ranks[0].close()
    with pytest.raises(ConnectionResetError, match="another rank has ended the connection"):
        ranks[2].broadcast(torch.zeros(4))


def test_a_sum_in_parts_is_the_same_on_all_ranks(ranks: list[Peers], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_DIRECT_BYTES", 0)
    monkeypatch.setattr(module, "CHUNK_BYTES", 16)
    for size in (1, 2, 3, 4, 7, 100):
        given = [torch.arange(size, dtype=torch.float32) * 10**rank for rank in range(WORLD_SIZE)]
        on_each(ranks, lambda peers, rank, given=given: peers.all_reduce(given[rank]))
        assert [each.tolist() for each in given] == [[111.0 * place for place in range(size)]] * WORLD_SIZE
    rounded = [torch.tensor([value] * 5, dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    on_each(ranks, lambda peers, rank: peers.all_reduce(rounded[rank]))
    assert [each.tolist() for each in rounded] == [[258.0] * 5] * WORLD_SIZE, "rounded once"


def test_rank_0_tells_the_others_and_not_without_bound(ranks: list[Peers], monkeypatch: pytest.MonkeyPatch) -> None:
    ranks[0].tell(b"")
    ranks[0].tell(b"found")
    for rank in ranks[1:]:
        assert (rank.hear(), rank.hear()) == (b"", b"found")
    monkeypatch.setattr(module, "MAX_TOLD_BYTES", 4)
    ranks[0].tell(b"12345")
    with pytest.raises(ConnectionError, match="sends 5 bytes, must be at most 4"):
        ranks[1].hear()


def test_a_stranger_at_the_door_does_not_keep_the_ranks_apart() -> None:
    ranks, place = make_ranks(2)
    with socket.create_connection(place, timeout=60) as silent, socket.create_connection(place, timeout=60) as loud:
        loud.sendall(bytes(1000))
        on_each(ranks, lambda peers, rank: peers.connect(place, meet_timeout_s=60, timeout_s=60))
        for stranger in (silent, loud):
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
    given = [torch.ones(2), torch.ones(2)]
    on_each(ranks, lambda peers, rank: peers.all_reduce(given[rank]))
    assert given[0].tolist() == [2, 2]
    for peers in ranks:
        peers.close()


def test_while_ranks_meet_a_connection_waits_as_long_as_the_meeting_does() -> None:
    """Longer than a handshake: rank 0 speaks when all ranks are there."""
    ranks, place = make_ranks(2)

    def meet(peers: Peers, rank: int) -> float | None:
        if rank:
            peers._dial(0, *place, timeout_s=77.0)
        else:
            peers._await(range(1, 2), 77.0)
        return peers._sockets[1 - rank].gettimeout()

    assert on_each(ranks, meet) == [77.0, 77.0]
    for peers in ranks:
        peers.close()


def test_a_rank_that_comes_again_replaces_itself() -> None:
    """Its first connection was let in, and it did not hear so."""
    ranks, place = make_ranks(2)
    secret = ranks[0]._secret

    def both(peers: Peers, rank: int) -> None:
        if rank:
            dial(*place, secret=secret, rank=1, to_rank=0, timeout_s=60)
        peers.connect(place, meet_timeout_s=60, timeout_s=60)

    accept = ranks[0]._listener.accept
    seen: list[int] = []

    def accept_twice(timeout_s: float) -> dict[int, socket.socket]:
        found = accept(timeout_s)
        seen.extend(found)
        return found if len(seen) > 1 else {}

    ranks[0]._listener.accept = accept_twice  # type: ignore[method-assign]  # the first welcome is forgotten
    on_each(ranks, both)
    given = [torch.ones(2), torch.ones(2)]
    on_each(ranks, lambda peers, rank: peers.all_reduce(given[rank]))
    assert (given[1].tolist(), seen) == ([2, 2], [1, 1])
    for peers in ranks:
        peers.close()


# TensorParallel.


@pytest.mark.parametrize(
    ("total", "world_size", "parts"),
    [
        (8, 2, [range(0, 4), range(4, 8)]),
        (11, 4, [range(0, 3), range(3, 6), range(6, 9), range(9, 11)]),
        (5, 4, [range(0, 2), range(2, 4), range(4, 5), range(5, 5)]),
        (7, 1, [range(0, 7)]),
    ],
)
def test_parts_are_equal_but_for_the_last(total: int, world_size: int, parts: list[range]) -> None:
    assert [TensorParallel(rank=rank, world_size=world_size).part(total) for rank in range(world_size)] == parts


def test_one_rank_needs_no_other() -> None:
    x = torch.tensor([[1.0, 2.0]])
    assert ALONE.all_reduce(x) is x
    assert ALONE.gather_columns(x, 2) is x
    assert ALONE.broadcast(x) is x
    ALONE.connect(torch.device("cpu"))
    assert (ALONE.address, ALONE.is_leader, TensorParallel(rank=1, world_size=2).is_leader) == ("", True, False)


@pytest.mark.parametrize("rank", [-1, 2, 3])
def test_a_rank_that_is_not_there_is_refused(rank: int) -> None:
    with pytest.raises(ConfigError, match=f"rank is {rank}, must be below world_size, 2") as caught:
        TensorParallel(rank=rank, world_size=2)
    assert caught.value.field == "rank"


class Noted:
    """Stands for connections; notes what goes which way."""

    def __init__(self) -> None:
        self.sums: list[int] = []
        self.gathered: list[Tensor] = []

    def all_reduce(self, x: Tensor) -> None:
        self.sums.append(x.nbytes)

    def allreduce(self, tensors: list[Tensor]) -> Any:
        self.sums.append(tensors[0].nbytes)
        return self

    def wait(self) -> None:
        pass

    def gather(self, x: Tensor) -> list[Tensor]:
        self.gathered.append(x)
        return [x, x + 10]


def test_what_is_small_is_added_up_whole_and_what_is_large_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    (peers, *_), _ = make_ranks()
    sums: list[tuple[str, int]] = []
    monkeypatch.setattr(peers, "_add_whole", lambda x: sums.append(("whole", x.nbytes)))
    monkeypatch.setattr(peers, "_add_parts", lambda x: sums.append(("parts", x.nbytes)))
    assert MAX_DIRECT_BYTES == 1 << 20
    half = MAX_DIRECT_BYTES // 2
    for count in (half, half + 1):
        peers.all_reduce(torch.zeros(count, dtype=torch.uint8))
    assert sums == [("whole", half), ("parts", half + 1)]


def test_what_is_not_contiguous_is_summed_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    class Doubled:
        """Adds each tensor to itself."""

        def all_reduce(self, x: Tensor) -> None:
            assert x.is_contiguous()
            x.mul_(2)

    parallel = TensorParallel(rank=0, world_size=3)
    monkeypatch.setattr(parallel, "_peers", Doubled())
    x = torch.arange(6.0).view(2, 3)
    assert parallel.all_reduce(x.t()).tolist() == [[0, 6], [2, 8], [4, 10]]
    assert x.tolist() == [[0, 2, 4], [6, 8, 10]]


def test_columns_of_the_last_rank_may_be_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    parallel, noted = TensorParallel(rank=1, world_size=2), Noted()
    monkeypatch.setattr(parallel, "_peers", noted)
    found = parallel.gather_columns(torch.tensor([[1.0]]), 3)
    assert [each.tolist() for each in noted.gathered] == [[[1.0, 0.0]]]
    assert found.tolist() == [[1.0, 0.0, 11.0]]


def test_without_connections_nothing_is_summed() -> None:
    parallel = TensorParallel(rank=1, world_size=2)
    for call in (
        lambda: parallel.all_reduce(torch.zeros(1)),
        lambda: parallel.broadcast(torch.zeros(1)),
        lambda: parallel.gather_columns(torch.zeros(1, 1), 2),
    ):
        with pytest.raises(StaleEpoch, match="the ranks are not connected"):
            call()
    with pytest.raises(StaleEpoch, match="rank 0's address is not known"):
        parallel.connect(torch.device("cpu"))
    parallel.invite("host:12#00ff")
    assert (parallel._address, parallel._secret, parallel.address) == (("host", 12), b"\x00\xff", "")
    parallel.close()
    assert parallel._address is None
