"""Connections of ranks: how long each waits, what a stranger may try, and what NCCL is given on a GPU."""

import contextlib
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pagoda_common.errors import NotReady
from pagoda_worker.parallel import handshake, tensor_parallel
from pagoda_worker.parallel import peers as peers_module
from pagoda_worker.parallel.handshake import (
    HELLO_BYTES,
    MAGIC,
    NONCE_BYTES,
    PROOF_BYTES,
    Listener,
    dial,
    new_secret,
    receive_exactly,
)
from pagoda_worker.parallel.peers import BUFFER_BYTES, CHUNK_BYTES, Peers
from pagoda_worker.parallel.tensor_parallel import TensorParallel

HOST = "127.0.0.1"
CPU = torch.device("cpu")


def together(*calls: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as threads:
        return [future.result(timeout=240) for future in [threads.submit(call) for call in calls]]


# The handshake.


@pytest.mark.parametrize("is_echo", [True, False])
def test_what_the_listener_proves_with_is_no_proof_of_the_caller(is_echo: bool) -> None:
    """A stranger who sends it back, or a proof of its own over the same nonces, is turned away."""
    listener = Listener(host=HOST, secret=new_secret(), rank=0, world_size=2)
    is_over = threading.Event()

    def serve() -> list[int]:
        come: list[int] = []
        while not is_over.is_set():
            come += listener.accept(0.01)
        return come

    with ThreadPoolExecutor(1) as threads, socket.create_connection((HOST, listener.port), timeout=240) as stranger:
        serving = threads.submit(serve)
        stranger.sendall(MAGIC + bytes(NONCE_BYTES) + (1).to_bytes(4, "little"))
        answer = receive_exactly(stranger, NONCE_BYTES + PROOF_BYTES)
        proof = answer[NONCE_BYTES:] if is_echo else handshake._proof(
            b"", side=b"caller", nonces=bytes(NONCE_BYTES) + answer[:NONCE_BYTES], caller=1, listener=0
        )  # fmt: skip
        stranger.sendall(proof)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            answer = stranger.recv(1)
        is_over.set()
        assert (answer, serving.result(timeout=240)) == (b"", [])
    listener.close()


def test_every_call_has_a_nonce_of_its_own_and_is_closed_where_it_fails() -> None:
    """Else a listener could be pretended with what another one has answered before."""
    hellos: list[bytes] = []
    server = socket.create_server((HOST, 0))
    port = server.getsockname()[1]

    def pretend() -> None:
        connection, _ = server.accept()
        hellos.append(receive_exactly(connection, HELLO_BYTES))
        connection.sendall(bytes(NONCE_BYTES + PROOF_BYTES))
        assert connection.recv(1) == b"", "the caller has left"
        connection.close()

    def call() -> None:
        with pytest.raises(PermissionError, match=f"^{HOST}:{port} does not know the secret of this group$"):
            dial(HOST, port, secret=new_secret(), rank=3, to_rank=0, timeout_s=240)

    for _ in range(2):
        together(pretend, call)
    server.close()
    first, second = hellos
    assert (first.startswith(MAGIC), first[-4:]) == (True, (3).to_bytes(4, "little"))
    assert first[len(MAGIC) : -4] != second[len(MAGIC) : -4]


def test_a_caller_waits_no_longer_than_its_timeout() -> None:
    with socket.create_server((HOST, 0)) as silent, pytest.raises(TimeoutError):
        dial(HOST, silent.getsockname()[1], secret=new_secret(), rank=1, to_rank=0, timeout_s=0.01)


def test_a_connection_that_is_let_in_waits_for_what_it_reads() -> None:
    secret = new_secret()
    listener = Listener(host=HOST, secret=secret, rank=0, world_size=2)

    def accept() -> socket.socket:
        while not (come := listener.accept(0.01)):
            pass
        return come[1]

    let_in, calling = together(
        accept, lambda: dial(HOST, listener.port, secret=secret, rank=1, to_rank=0, timeout_s=77.0)
    )
    assert (let_in.gettimeout(), calling.gettimeout()) == (None, 77.0)
    assert listener._unproved == []
    for one in (let_in, calling, listener):
        one.close()


@pytest.mark.parametrize(("passed_s", "is_kept"), [(4.9, True), (5.1, False)])
def test_who_proves_nothing_has_five_seconds(passed_s: float, is_kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    listener = Listener(host=HOST, secret=new_secret(), rank=0, world_size=2)
    monkeypatch.setattr(handshake.time, "monotonic", lambda: 100.0)
    with socket.create_connection((HOST, listener.port), timeout=240):
        while not listener._unproved:
            listener.accept(0.01)
        monkeypatch.setattr(handshake.time, "monotonic", lambda: 100.0 + passed_s)
        listener.accept(0)
        assert bool(listener._unproved) is is_kept
    listener.close()


# Peers.


def met(world_size: int, *, meet_timeout_s: float = 60.0, timeout_s: float = 77.0) -> list[Peers]:
    secret = new_secret()
    listeners = [Listener(host=HOST, secret=secret, rank=rank, world_size=world_size) for rank in range(world_size)]
    ranks = [
        Peers(rank=rank, world_size=world_size, secret=secret, listener=listener, check=lambda absent: None)
        for rank, listener in enumerate(listeners)
    ]
    place = HOST, listeners[0].port
    together(*(partial(one.connect, place, meet_timeout_s=meet_timeout_s, timeout_s=timeout_s) for one in ranks))
    return ranks


def test_connected_ranks_wait_as_long_as_an_operation_may_take_and_send_at_once() -> None:
    ranks = met(3)
    for rank, peers in enumerate(ranks):
        assert sorted(peers._sockets) == [other for other in range(3) if other != rank]
        for connection in peers._sockets.values():
            assert connection.gettimeout() == 77.0
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) >= BUFFER_BYTES
        assert peers._listener._socket.fileno() == -1, "no one else comes"
        peers.close()
    assert BUFFER_BYTES == 4 * CHUNK_BYTES


def test_a_rank_that_is_called_off_while_it_dials_says_whom_it_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []

    def check(absent: str) -> None:
        waited.append(absent)
        if len(waited) == 2:
            raise TimeoutError(absent)

    listener = Listener(host=HOST, secret=b"", rank=1, world_size=2)
    peers = Peers(rank=1, world_size=2, secret=b"", listener=listener, check=check)
    asked: list[Any] = []

    def refuse(host: str, port: int, **given: Any) -> socket.socket:
        asked.append((host, port, given))
        raise ConnectionRefusedError("no one")

    monkeypatch.setattr(peers_module, "dial", refuse)
    with pytest.raises(TimeoutError):
        peers.connect(("there", 5), meet_timeout_s=60, timeout_s=60)
    assert waited == ["rank 0 (no one)"] * 2
    assert asked == [("there", 5, {"secret": b"", "rank": 1, "to_rank": 0, "timeout_s": 5.0})] * 2
    listener.close()


def test_rank_0_names_all_that_are_absent() -> None:
    def check(absent: str) -> None:
        raise TimeoutError(absent)

    listener = Listener(host=HOST, secret=b"", rank=0, world_size=3)
    peers = Peers(rank=0, world_size=3, secret=b"", listener=listener, check=check)
    with pytest.raises(TimeoutError, match=r"^rank 1, rank 2$"):
        peers.connect((HOST, 0), meet_timeout_s=60, timeout_s=60)
    listener.close()


def test_what_is_let_in_while_the_meeting_is_called_off_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(absent: str) -> None:
        raise TimeoutError(absent)

    listener = Listener(host=HOST, secret=b"", rank=1, world_size=2)
    peers = Peers(rank=1, world_size=2, secret=b"", listener=listener, check=check)
    here, there = socket.socketpair()
    monkeypatch.setattr(peers_module, "dial", lambda *_, **__: here)
    with pytest.raises(TimeoutError, match=r"^rank 0$"):
        peers._dial(0, HOST, 1, timeout_s=60)
    peers.close()
    assert there.recv(1) == b"", "it is known, and so it is closed"
    for one in (here, there, listener):
        one.close()


# TensorParallel.


def group(num: int = 2) -> list[TensorParallel]:
    leader, *others = ranks = [TensorParallel(rank=rank, world_size=num) for rank in range(num)]
    leader.open()
    for rank in others:
        rank.invite(leader.address)
    together(*(partial(rank.connect, CPU) for rank in ranks))
    return ranks


def test_a_sum_may_wait_for_minutes() -> None:
    for rank in group():
        assert rank._peers is not None
        assert [one.gettimeout() for one in rank._peers._sockets.values()] == [300.0]
        listener = rank._listener
        assert listener is not None
        rank.connect(CPU)
        assert rank._listener is listener, "it is connected already"
        rank.close()
        assert (rank._peers, rank._listener, rank._secret, rank._is_connected) == (None, None, b"", False)


@pytest.mark.parametrize(("passed_s", "is_over"), [(59.0, False), (61.0, True)])
def test_ranks_meet_within_a_minute(passed_s: float, is_over: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    class Meeting:
        def __init__(self, **more: Any) -> None:
            given.update(more)

        def connect(self, leader: Any, **more: Any) -> None:
            given.update(leader=leader, **more)
            monkeypatch.setattr(tensor_parallel.time, "monotonic", lambda: 100.0 + passed_s)
            given["check"]("rank 1")

        def close(self) -> None:
            given["is_closed"] = True

    monkeypatch.setattr(tensor_parallel, "Peers", Meeting)
    monkeypatch.setattr(tensor_parallel.time, "monotonic", lambda: 100.0)
    rank = TensorParallel(rank=0, world_size=2)
    rank.open()
    secret, place = rank._secret, rank._address
    if is_over:
        with pytest.raises(NotReady, match=r"could not meet the other ranks of its group: rank 1 did not come$"):
            rank.connect(CPU)
        assert given["is_closed"]
        assert rank.address == ""
    else:
        rank.connect(CPU)
        rank.close()
    assert (given["leader"], given["meet_timeout_s"], given["timeout_s"]) == (place, 60.0, 300.0)
    assert (given["rank"], given["world_size"], given["secret"]) == (0, 2, secret)


class Nccl:
    """A process group; notes what it is asked."""

    made: "list[Nccl]" = []  # noqa: RUF012 (emptied by each test)

    class Options:
        _timeout = timedelta(0)

    def __init__(self, store: Any, rank: int, world_size: int, options: Any) -> None:
        self.store, self.place, self.timeout = store, (rank, world_size), options._timeout
        self.calls: list[Any] = []
        Nccl.made.append(self)

    def allreduce(self, tensors: list[Tensor]) -> Any:
        self.calls.append(("allreduce", [tensor.tolist() for tensor in tensors], self.store._is_finished))
        return SimpleNamespace(wait=lambda: self.calls.append("wait"))

    def abort(self) -> None:
        self.calls.append("abort")


def test_devices_join_over_the_connections_of_their_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bytes] = []
    Nccl.made = []
    monkeypatch.setattr(tensor_parallel.dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(
        tensor_parallel,
        "Peers",
        lambda **_: SimpleNamespace(connect=lambda *_, **__: None, close=lambda: None, tell=told.append),
    )
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda size, device: zeros(size))
    rank = TensorParallel(rank=0, world_size=2)
    rank.open()
    rank.connect(torch.device("cuda"))
    (made,) = Nccl.made
    assert (made.place, made.timeout) == ((0, 2), timedelta(seconds=300))
    assert made.calls == [("allreduce", [[0.0]], False), "wait"]
    assert (told, made.store._is_finished) == ([b""], True), "only then the hosts' connections are free"
    assert rank._store is made.store, "torch calls it"
    rank.close()
    assert made.calls[2:] == ["abort"]
    assert (rank._nccl, rank._store) == (None, None)


def test_a_cpu_needs_no_nccl() -> None:
    for rank in group():
        assert rank._nccl is None
        rank.close()


class OnDevice:
    """A tensor of a GPU."""

    is_cuda = True


def test_tensors_of_a_gpu_are_summed_there(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def allreduce(tensors: list[Any]) -> Any:
        calls.append(tensors)
        return SimpleNamespace(wait=lambda: calls.append("wait"))

    rank = TensorParallel(rank=1, world_size=2)
    x: Any = OnDevice()
    monkeypatch.setattr(rank, "_nccl", SimpleNamespace(allreduce=allreduce))
    assert rank.all_reduce(x) is x
    assert calls == [[x], "wait"]
