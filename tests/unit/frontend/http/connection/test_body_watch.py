"""How slow a body may come, and how much of it may be no content."""

import pytest

from pagoda_frontend.http.connection.body_watch import (
    CHUNK_BYTES,
    FRAMING_BYTES,
    GRACE_S,
    MAX_TINY_CHUNKS,
    MIN_BYTES_PER_S,
    BodyWatch,
)


def test_each_look_must_find_more() -> None:
    watch = BodyWatch(now_s=100.0)
    watch.add(MIN_BYTES_PER_S)
    assert watch.look(100.0 + GRACE_S) == 1, "the grace and a second for what has come"
    watch.add(MIN_BYTES_PER_S - 1)
    assert watch.look(101.0 + GRACE_S) <= 0


@pytest.mark.parametrize(("rate", "is_slow"), [(30_000, True), (49_000, True), (60_000, False)])
def test_a_body_must_be_fast_on_the_whole(rate: int, is_slow: bool) -> None:
    watch, now_s, num_sent = BodyWatch(now_s=0.0), GRACE_S, 0
    left_s = GRACE_S
    while left_s > 0 and now_s < 3600:
        watch.add(int(rate * now_s) - num_sent)
        num_sent = int(rate * now_s)
        left_s = watch.look(now_s)
        now_s += left_s
    assert (left_s <= 0) == is_slow


def test_time_in_which_the_server_did_not_read_does_not_count() -> None:
    watch = BodyWatch(now_s=100.0)
    watch.add(MIN_BYTES_PER_S)
    watch.pause(1000.0)
    assert watch.look(1000.0) == GRACE_S


def test_what_came_before_a_pause_buys_no_time_after_it() -> None:
    watch = BodyWatch(now_s=0.0)
    watch.add(100 * MIN_BYTES_PER_S)
    watch.pause(50.0)
    watch.add(2 * MIN_BYTES_PER_S)
    assert watch.look(50.0 + GRACE_S) == 2, "the grace and two seconds for what has come since"


def test_framing_is_bounded_by_the_number_of_chunks() -> None:
    watch = BodyWatch(now_s=0.0)
    watch.num_received = FRAMING_BYTES
    assert not watch.fault
    watch.num_received += 1
    assert "trailers" in watch.fault
    watch.num_chunks = 100
    watch.num_received = FRAMING_BYTES + 100 * CHUNK_BYTES
    assert not watch.fault
    watch.add(1000)
    watch.num_received += 1000
    assert not watch.fault


def test_tiny_chunks_are_bounded() -> None:
    watch = BodyWatch(now_s=0.0)
    watch.num_chunks = MAX_TINY_CHUNKS
    watch.add(MAX_TINY_CHUNKS)
    assert not watch.fault
    watch.num_chunks += 1
    watch.add(1)
    assert not watch.fault, "64 bytes of content pay for one more"
    watch.num_chunks += MAX_TINY_CHUNKS
    assert "chunks" in watch.fault
