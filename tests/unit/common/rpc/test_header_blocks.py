"""Endless header blocks are found wherever the piece begins, and calls are not taken for one."""

import asyncio
import random

import pytest

from pagoda_common.rpc import flood_guard
from pagoda_common.rpc.flood_guard import FloodGuard, peer_address
from pagoda_common.rpc.header_blocks import MAX_BLOCK_BYTES, SEEN_BYTES, can_be_messages, has_endless_block
from tests.harness.raw_http2 import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    MAX_FRAME,
    PING,
    PREFACE,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
    header,
)

SMALL = header("a", "") * (MAX_FRAME // 4)
LARGE = header("x-a", "a" * 120) * (MAX_FRAME // 126)
RANDOM = random.Random(11)
PLACES = (0, 1, 8, 9, 10, 5000, MAX_FRAME, MAX_FRAME + 8)
LOOKS_ENDLESS = frame(CONTINUATION, 0, 1) * (MAX_FRAME // 9 + 1)


def piece(frames: bytes, place: int) -> bytes:
    """What is queued of so many frames when all before `place` is read."""
    return frames[place : place + SEEN_BYTES]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("block", [SMALL, LARGE, b"", b"\x09" * 500, b"\0" * 10_000])
@pytest.mark.parametrize("flags", [0, END_STREAM, 0xF8])
def test_a_block_that_goes_on_is_found(block: bytes, place: int, flags: int) -> None:
    frames = frame(CONTINUATION, flags, 77, block) * (SEEN_BYTES // (len(block) + 9) + 10)
    assert has_endless_block(piece(frames, place))


def test_a_block_that_has_just_begun_is_found() -> None:
    begun = PREFACE + frame(SETTINGS, 0, 0) + frame(HEADERS, 0, 1, header("a", "b"))
    assert has_endless_block(piece(begun + frame(CONTINUATION, 0, 1, LARGE) * 7, 0))
    assert not has_endless_block(begun + frame(CONTINUATION, 0, 1, LARGE) * 3)
    assert not has_endless_block(begun + frame(CONTINUATION, 0, 1) * 999)
    assert has_endless_block(begun + frame(CONTINUATION, 0, 1) * 1001)


def test_a_block_that_ends_is_not_endless() -> None:
    half = frame(CONTINUATION, 0, 1, LARGE[: MAX_BLOCK_BYTES // 8])
    call = frame(HEADERS, 0, 1, LARGE) + half * 6 + frame(CONTINUATION, END_HEADERS, 1, LARGE)
    assert not has_endless_block(call * 3)
    assert not has_endless_block(b"".join(frame(CONTINUATION, 0, stream, LARGE) * 3 for stream in (1, 3, 5)))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "frames",
    [
        frame(DATA, 0, 1, RANDOM.randbytes(MAX_FRAME)) * 12,
        frame(DATA, 0, 1, bytes(MAX_FRAME)) * 12,
        frame(DATA, 0, 1, b"\0\0\0\x09" * (MAX_FRAME // 4)) * 12,
        (frame(HEADERS, END_HEADERS, 5, header("a", "b") * 50) + frame(DATA, END_STREAM, 5, b"message")) * 600,
        (frame(PING, 0, 0, bytes(8)) + frame(WINDOW_UPDATE, 0, 0, bytes(4)) + frame(WINDOW_UPDATE, 0, 9, bytes(4)))
        * 4000,
        frame(PING, 0, 0, b"\0\0\0\x09\0\0\0\0") * 9000,
    ],
    ids=["random message", "zeros", "nines", "calls", "windows and pings", "pings with a type"],
)
def test_calls_are_not_taken_for_a_block(frames: bytes, place: int) -> None:
    assert not has_endless_block(piece(frames, place))


@pytest.mark.parametrize("place", PLACES)
def test_a_message_that_looks_like_a_block_can_be_one(place: int) -> None:
    frames = frame(DATA, 0, 1, LOOKS_ENDLESS[:MAX_FRAME]) * 12
    assert has_endless_block(piece(frames, place))
    assert can_be_messages(piece(frames, place))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("block", [SMALL, LARGE])
def test_a_block_can_be_no_message(block: bytes, place: int) -> None:
    assert not can_be_messages(piece(frame(CONTINUATION, 0, 77, block) * 12, place))


def test_peers_of_the_library_are_addresses() -> None:
    assert peer_address("ipv4:127.0.0.1:5") == ("127.0.0.1", 5)
    assert peer_address("ipv6:%5B::1%5D:70") == peer_address("ipv6:[::1]:70") == ("::1", 70)
    assert peer_address("ipv6:[fe80::1%25eth0]:7") == ("fe80::1", 7)
    assert peer_address("ipv6:[::ffff:1.2.3.4]:7") == ("1.2.3.4", 7)
    assert peer_address("unix-abstract:pagoda-worker-1") is None
    assert peer_address("") is None


async def test_the_guard_rests_longer_than_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    computed_s = iter([0.0, 0.2])
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: 1000.0)
    monkeypatch.setattr(flood_guard.time, "thread_time", lambda: next(computed_s))
    guard = FloodGuard(1, set)
    guard._on_time()
    assert guard._timer is not None
    assert guard._timer.when() == pytest.approx(1000.8)
    guard.stop()
    assert guard._timer.cancelled()
