"""Who is let in as a rank: those who know the secret, also while others crowd the door."""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from pagoda_worker.parallel import handshake
from pagoda_worker.parallel.handshake import (
    HELLO_BYTES,
    MAGIC,
    MAX_UNPROVED,
    NONCE_BYTES,
    PROOF_BYTES,
    SECRET_BYTES,
    Listener,
    dial,
    new_secret,
    receive_exactly,
)

HOST = "127.0.0.1"
SECRET = new_secret()
HELLO = MAGIC + bytes(NONCE_BYTES) + (1).to_bytes(4, "little")


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener(host=HOST, secret=SECRET, rank=0, world_size=3)
    yield listener
    listener.close()


def accept(listener: Listener, num: int = 1) -> dict[int, socket.socket]:
    """The next ranks that come."""
    come: dict[int, socket.socket] = {}
    while len(come) < num:
        come.update(listener.accept(0.01))
    return come


def call(listener: Listener, *, rank: int = 1, to_rank: int = 0, secret: bytes = SECRET) -> socket.socket:
    return dial(HOST, listener.port, secret=secret, rank=rank, to_rank=to_rank, timeout_s=240)


def serve_until(listener: Listener, is_over: threading.Event) -> list[int]:
    """Who is let in meanwhile."""
    come: list[int] = []
    while not is_over.is_set():
        come += listener.accept(0.01)
    return come


def test_two_sides_with_the_secret_are_connected(listener: Listener) -> None:
    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(call, listener, rank=rank) for rank in (2, 1)]
        come = accept(listener, 2)
        assert sorted(come) == [1, 2]
        for rank, calling in zip((2, 1), calls, strict=True):
            calling.result(timeout=240).sendall(bytes([rank]))
            assert receive_exactly(come[rank], 1) == bytes([rank])
    for each in (*come.values(), *(calling.result() for calling in calls)):
        each.close()


def test_every_start_has_another_secret() -> None:
    assert len({new_secret() for _ in range(10)}) == 10
    assert len(new_secret()) == SECRET_BYTES == 32


@pytest.mark.parametrize("wrong", ["secret of the caller", "secret of the listener", "rank of the listener"])
def test_a_caller_notices_another_listener_and_is_not_let_in(listener: Listener, wrong: str) -> None:
    is_over = threading.Event()
    secret = new_secret() if wrong.startswith("secret") else SECRET
    with ThreadPoolExecutor(1) as threads:
        serving = threads.submit(serve_until, listener, is_over)
        with pytest.raises(PermissionError, match="does not know the secret of this group"):
            call(listener, secret=secret, to_rank=2 if wrong.startswith("rank") else 0)
        is_over.set()
        assert serving.result(timeout=240) == []


def closed(stranger: socket.socket) -> bool:
    """Whether the other side has ended the connection, whatever it said before."""
    stranger.settimeout(240)
    try:
        while stranger.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


@pytest.mark.parametrize(
    "content",
    [
        bytes(HELLO_BYTES),
        MAGIC + bytes(NONCE_BYTES) + (3).to_bytes(4, "little"),
        MAGIC + bytes(NONCE_BYTES) + (0).to_bytes(4, "little"),
        MAGIC + bytes(NONCE_BYTES) + (2**32 - 1).to_bytes(4, "little"),
        HELLO + bytes(PROOF_BYTES),
        HELLO + bytes(100_000),
    ],
    ids=["no hello", "a rank beyond the last", "the listener's rank", "a huge rank", "a wrong proof", "more than that"],
)
def test_a_stranger_is_turned_away(listener: Listener, content: bytes) -> None:
    is_over = threading.Event()
    with ThreadPoolExecutor(1) as threads, socket.create_connection((HOST, listener.port)) as stranger:
        serving = threads.submit(serve_until, listener, is_over)
        stranger.sendall(content)
        assert closed(stranger)
        is_over.set()
        assert serving.result(timeout=240) == []


def test_a_proof_is_of_no_use_a_second_time(listener: Listener) -> None:
    """What a caller has sent once, sent again."""
    sent: list[bytes] = []

    class Recorded(socket.socket):
        def sendall(self, data: bytes, *_: object) -> None:  # type: ignore[override]  # of bytes alone
            sent.append(data)
            super().sendall(data)

    with ThreadPoolExecutor(1) as threads, pytest.MonkeyPatch.context() as patch:

        def connect(place: tuple[str, int], timeout: float) -> socket.socket:
            made = Recorded()
            made.settimeout(timeout)
            made.connect(place)
            return made

        patch.setattr(handshake.socket, "create_connection", connect)
        calling = threads.submit(call, listener)
        come = accept(listener)
        calling.result(timeout=240).close()
    come[1].close()
    is_over = threading.Event()
    with ThreadPoolExecutor(1) as threads, socket.create_connection((HOST, listener.port)) as stranger:
        serving = threads.submit(serve_until, listener, is_over)
        for content in sent:
            stranger.sendall(content)
        assert closed(stranger)
        is_over.set()
        assert serving.result(timeout=240) == []


def test_who_says_nothing_is_closed_later_and_keeps_no_one_out(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    strangers = []
    for number in range(2 * MAX_UNPROVED):
        strangers.append(socket.create_connection((HOST, listener.port)))
        if number % 16 == 0:
            listener.accept(0)
    with ThreadPoolExecutor(1) as threads:
        calling = threads.submit(call, listener)
        come = accept(listener)
        calling.result(timeout=240).close()
    come[1].close()
    assert len(listener._unproved) <= MAX_UNPROVED
    assert all(closed(each) for each in strangers[:MAX_UNPROVED]), "the oldest go first"
    monkeypatch.setattr(handshake.time, "monotonic", lambda: 1e12)
    listener.accept(0)
    assert not listener._unproved
    for each in strangers:
        each.close()


def test_a_place_of_another_machine_is_an_error() -> None:
    with pytest.raises(OSError, match="assign"):
        Listener(host="192.0.2.1", secret=SECRET, rank=0, world_size=2)
