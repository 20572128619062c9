"""Open requests of several frontends: attempts, deadlines, leases and who may adopt what."""

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest

from pagoda_common.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from pagoda_common.errors import DeadlineExceeded, NotReady, PagodaError, Superseded
from pagoda_scheduler.core.request import Request
from pagoda_scheduler.core.step_result import StepResult
from pagoda_scheduler.engine.deadlines import Deadlines
from pagoda_scheduler.engine.engine import Engine
from pagoda_scheduler.engine.open_requests import OpenRequest, OpenRequests, Origin
from tests.unit.scheduler.stories import make_request


class Notes:
    """A reader that notes what it hears."""

    def __init__(self) -> None:
        self.results: list[StepResult] = []
        self.num_announcements = 0
        self.error: PagodaError | None = None
        self.is_behind = False

    def push(self, result: StepResult) -> None:
        self.results.append(result)

    def announce(self) -> None:
        self.num_announcements += 1

    def close(self, error: PagodaError) -> None:
        self.error = error


class Hand:
    """The event loop's clock, set by hand; timers fire when `move` reaches them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: self.now_s, raising=False)

    async def move(self, seconds: float) -> None:
        self.now_s += seconds
        for _ in range(4):
            await asyncio.sleep(0)


def engine_of(**scheduler: object) -> Engine:
    return Engine(config=EngineConfig(cache=CacheConfig(block_size=4), scheduler=SchedulerConfig(**scheduler)))  # type: ignore[arg-type]


def submit(
    engine: Engine, sink: Notes, name: str, *, key: str = "", attempt: int = 1, timeout_s: float = 0.0
) -> Request:
    request = make_request(name, 5, attempt=attempt, sink=sink)
    engine.sinks.add(sink)
    engine.submit([request], timeout_s=timeout_s, origin=Origin(key, name) if key else None)
    return request


def test_the_defaults_are_those_of_the_docs() -> None:
    scheduler = SchedulerConfig()
    assert (scheduler.orphan_lease_s, scheduler.step_watchdog_s) == (30.0, 2.0)


async def test_the_same_attempt_is_taken_in_once_a_newer_one_replaces_it_and_an_older_one_is_refused() -> None:
    engine, sink = engine_of(), Notes()
    first = submit(engine, sink, "r", attempt=2)
    submit(engine, sink, "r", attempt=2)
    assert (engine.num_submitted, engine.requests["r"].sequences) == (1, [first])
    newer = submit(engine, sink, "r", attempt=3)
    assert (engine.num_submitted, engine.requests["r"].sequences, first.is_finished) == (2, [newer], True)
    with pytest.raises(Superseded, match="request r is at attempt 3, got 2"):
        submit(engine, sink, "r", attempt=2)
    assert engine.load().num_waiting_reqs == 1
    assert sink.results == []


async def test_a_request_ends_with_its_time_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    hand, engine, sink = Hand(monkeypatch), engine_of(), Notes()
    short, free = submit(engine, sink, "short", timeout_s=10), submit(engine, sink, "free")
    await hand.move(9.9)
    assert not short.is_finished
    await hand.move(0.2)
    assert isinstance(short.error, DeadlineExceeded)
    assert (short.finish_reason, short.error.message) == ("error", "request was not finished within its 10 s")
    assert (list(engine.requests), free.is_finished) == (["free"], False)


async def test_an_orphan_ends_with_its_lease_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    hand, engine, sink, other = Hand(monkeypatch), engine_of(orphan_lease_s=30.0), Notes(), Notes()
    kept, lost, others = submit(engine, sink, "kept", key="k"), submit(engine, sink, "lost"), submit(engine, other, "o")
    engine.close_sink(sink)
    assert (lost.is_finished, kept.is_finished, others.is_finished) == (True, False, False)
    assert (kept.sink, others.sink, engine.sinks) == (None, other, {other})
    await hand.move(29.9)
    assert not kept.is_finished
    await hand.move(0.2)
    assert (kept.is_finished, list(engine.requests)) == (True, ["o"])


async def test_adopting_renews_the_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    hand, engine, sink = Hand(monkeypatch), engine_of(orphan_lease_s=30.0), Notes()
    kept = submit(engine, sink, "kept", key="k")
    engine.close_sink(sink)
    for _ in range(3):
        await hand.move(20)
        assert [each.sequences for each in engine.adopt("k")] == [[kept]]
    await hand.move(29)
    assert not kept.is_finished
    await hand.move(2)
    assert kept.is_finished
    assert engine.adopt("k") == []


async def test_asking_for_a_request_whose_frontend_is_there_gives_it_no_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    hand, engine, sink = Hand(monkeypatch), engine_of(orphan_lease_s=30.0), Notes()
    kept = submit(engine, sink, "kept", key="k")
    submit(engine, sink, "other", key="another key")
    assert [each.request_id for each in engine.adopt("k")] == ["kept"]
    await hand.move(100)
    assert not kept.is_finished


async def test_an_adopter_that_submits_the_request_again_ends_the_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    hand, engine, sink, adopter = Hand(monkeypatch), engine_of(orphan_lease_s=30.0), Notes(), Notes()
    submit(engine, sink, "kept", key="k")
    engine.close_sink(sink)
    taken = submit(engine, adopter, "kept", key="k", attempt=2)
    await hand.move(100)
    assert (taken.is_finished, list(engine.requests)) == (False, ["kept"])


async def test_without_a_lease_nothing_outlives_its_frontend() -> None:
    engine, sink = engine_of(orphan_lease_s=0.0), Notes()
    kept = submit(engine, sink, "kept", key="k")
    engine.close_sink(sink)
    assert (kept.is_finished, engine.requests) == (True, {})


async def test_what_has_ended_is_kept_for_an_adopter_until_it_is_released() -> None:
    engine, sink = engine_of(), Notes()
    ended, going_on = submit(engine, sink, "ended", key="k"), submit(engine, sink, "going on", key="k")
    engine.stop([ended, ended])
    assert (ended.finish_reason, list(engine.requests)) == ("stop", ["ended", "going on"])
    for name in ("ended", "going on", "unknown"):
        engine.release(name)
    assert list(engine.requests) == ["going on"]
    assert not going_on.is_finished


async def test_an_abort_ends_the_named_ones_in_one_message() -> None:
    engine, sink = engine_of(), Notes()
    requests = [submit(engine, sink, name) for name in "abc"]
    engine.abort(["a", "unknown", "c", "a"])
    assert [request.finish_reason for request in requests] == ["abort", None, "abort"]
    assert [result.finished for result in sink.results] == [[requests[0], requests[2]]]
    assert list(engine.requests) == ["b"]
    engine.abort(["unknown"])
    assert len(sink.results) == 1


async def test_an_engine_that_drains_takes_nothing_new_and_waits_no_longer_than_it_may() -> None:
    engine, sink = engine_of(), Notes()
    open_request = submit(engine, sink, "open")
    await asyncio.wait_for(engine.drain(0.05), 240)
    assert not open_request.is_finished
    with pytest.raises(NotReady, match="draining"):
        submit(engine, sink, "new")
    submit(engine, sink, "open")  # it is known
    waiting = asyncio.create_task(engine.drain(1000))
    await asyncio.sleep(0.03)
    assert not waiting.done()
    engine.abort(["open"])
    await asyncio.wait_for(waiting, 240)
    engine.hand_over()
    assert isinstance(sink.error, NotReady)


async def test_each_sink_gets_its_own_news_and_nobody_an_orphans() -> None:
    engine, one, two = engine_of(), Notes(), Notes()
    requests = [submit(engine, sink, name, key=name) for sink, name in ((one, "a"), (two, "b"), (one, "c"))]
    engine.close_sink(two)
    engine.stop(requests)
    assert [result.finished for result in one.results] == [[requests[0], requests[2]]]
    assert two.results == []


async def test_many_changes_make_one_announcement() -> None:
    engine, sink = engine_of(), Notes()
    submit(engine, sink, "a")
    engine.announce()
    engine.announce()
    assert sink.num_announcements == 0
    for count in (1, 2):
        while sink.num_announcements < count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        engine.announce()
    assert sink.num_announcements == 2


async def test_a_timer_that_fires_late_expires_all_that_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process was stopped for 20 s."""
    hand, expired = Hand(monkeypatch), list[str]()
    deadlines = Deadlines(expire=lambda name, _: expired.append(name))
    for name, seconds in (("c", 15), ("a", 1), ("later", 21), ("b", 2)):
        deadlines.set(name, seconds)
    await hand.move(20)
    assert (expired, len(deadlines)) == (["a", "b", "c"], 1)
    await hand.move(1)
    assert expired == ["a", "b", "c", "later"]


async def test_compact_leaves_what_is_open() -> None:
    engine, sink = engine_of(), Notes()
    submit(engine, sink, "a", timeout_s=1000)
    engine.compact()
    assert list(engine.requests) == ["a"]
    engine.abort(["a"])
    engine.compact()
    assert (engine.requests, engine.load().num_waiting_reqs) == ({}, 0)


def test_an_open_request_is_known_by_attempt() -> None:
    requests = OpenRequests(lease_s=1, expire=lambda *_: None, end_lease=lambda *_: None)
    assert not requests.is_known("r", 1)
    assert (requests.is_busy, requests.has_orphans) == (False, False)


class Asked:
    """A sequence that counts how often it is asked for its state."""

    def __init__(self) -> None:
        self.request_id, self.is_over, self.num_asked = "r", False, 0

    @property
    def is_finished(self) -> bool:
        self.num_asked += 1
        return self.is_over


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("is_reversed", [False, True])
async def test_the_ends_of_many_sequences_cost_no_more_than_their_number(is_kept: bool, is_reversed: bool) -> None:
    sequences = [Asked() for _ in range(1000)]
    made = cast("list[Request]", sequences)
    requests = OpenRequests(lease_s=1.0, expire=lambda *_: None, end_lease=lambda *_: None)
    open_request = OpenRequest(1, made, None, Origin("k", "m") if is_kept else None)
    requests.add(open_request)
    ends = list(reversed(sequences)) if is_reversed else sequences
    for sequence in ends[:-1]:
        sequence.is_over = True
        requests.note_end(cast("Request", sequence))
        assert "r" in requests.by_id
        assert not open_request.is_over
    ends[-1].is_over = True
    requests.note_end(cast("Request", Asked()))
    assert not open_request.is_over, "a sequence of another attempt"
    requests.note_end(cast("Request", ends[-1]))
    assert (open_request.is_over, "r" in requests.by_id) == (True, is_kept)
    assert sum(sequence.num_asked for sequence in sequences) <= 3 * len(sequences)


@pytest.mark.parametrize("way", ["its client is gone", "its lease is over", "a newer attempt"])
async def test_the_trace_of_a_request_that_is_dropped_ends(way: str) -> None:
    """No step tells of its end."""
    engine, sink, ended = Engine(config=EngineConfig()), Notes(), list[list[Request]]()
    engine.traces = SimpleNamespace(end=ended.append)  # type: ignore[assignment]  # all that is asked of it
    dropped = submit(engine, sink, "a", key="k" if way == "its lease is over" else "")
    assert ended == []
    if way == "a newer attempt":
        submit(engine, sink, "a", attempt=2)
    else:
        engine.close_sink(sink)
    if way == "its lease is over":
        assert ended == [], "another frontend may adopt it"
        engine._end_lease("a", 30.0)
    assert ended == [[dropped]]
