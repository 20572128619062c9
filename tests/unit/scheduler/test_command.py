"""The scheduler's command: its defaults, what it says of its queue, and what it says of its health."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from pagoda_common.config.engine_config import EngineConfig, SchedulerConfig
from pagoda_scheduler import __main__ as command
from pagoda_scheduler.beams.running_beams import Beams
from pagoda_scheduler.core.request import Request, RequestStatus
from pagoda_scheduler.engine.readers import ANNOUNCE_DELAY_S, Readers
from tests.unit.scheduler.stories import make_request


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            SchedulerConfig(max_num_queued_reqs=10, max_num_queued_tokens=200, max_queued_share=0.5),
            "at most 10 sequences and at most 200 prompt tokens; one client may hold 50% of both",
        ),
        (
            SchedulerConfig(max_num_queued_reqs=0, max_num_queued_tokens=7, max_queued_share=0.25),
            "any number of sequences and at most 7 prompt tokens; one client may hold 25% of both",
        ),
    ],
)
def test_the_bounds_of_the_queue_are_said(config: SchedulerConfig, text: str) -> None:
    assert command._queue_bounds(config) == text


async def test_health_is_told_when_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []
    states = [False, True, True, False, False, True]
    engine = SimpleNamespace(is_ready=states[0])
    sleeps: list[float] = []

    async def set_serving(value: bool) -> None:
        told.append(value)

    async def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        if len(sleeps) == len(states):
            raise asyncio.CancelledError
        engine.is_ready = states[len(sleeps)]

    monkeypatch.setattr(command.asyncio, "sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await command._follow_readiness(engine, SimpleNamespace(set_serving=set_serving))  # type: ignore[arg-type]  # all that is asked of them
    assert told == [True, False, True]
    assert sleeps == [0.2] * 6


def test_flags_have_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    served: dict[str, Any] = {}

    async def serve(config: EngineConfig, **options: Any) -> None:
        served.update(options)

    monkeypatch.setattr(command, "serve", serve)
    monkeypatch.setattr(command, "configure_logging", lambda *args, **more: None)
    monkeypatch.setattr(command, "run_plugins", lambda: None)
    monkeypatch.setattr("sys.argv", ["pagoda-scheduler"])
    command.main()
    assert (served["port"], served["drain_timeout_s"], served["metrics_port"]) == (50052, 30.0, None)
    assert served["host"] == "127.0.0.1"
    more = ["--host", "127.0.0.2", "--port", "7", "--drain-timeout", "4.5", "--metrics-port", "9"]
    monkeypatch.setattr("sys.argv", ["pagoda-scheduler", *more])
    command.main()
    assert served == {"host": "127.0.0.2", "port": 7, "drain_timeout_s": 4.5, "metrics_port": 9}


class Side:
    """What beams ask of others."""

    def __init__(self, *, has_free: bool = True, can_fork: bool = True, can_begin_anew: bool = True) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.has_free = has_free
        self.running: list[Request] = []
        self.can_fork = lambda request: can_fork
        self.can_begin_anew = lambda request: can_begin_anew
        self.beams = Beams(
            kv=self,  # type: ignore[arg-type]  # notes what it is asked
            slots=self,  # type: ignore[arg-type]  # notes what it is asked
            running=self.running,
            wait=lambda request: self.calls.append(("wait", request)),
            preempt=lambda request: self.calls.append(("preempt", request)),
            finish=lambda request: self.calls.append(("finish", request)),
        )

    def take(self) -> int:
        return 6

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.calls.append((name, *args))


def beam_of(name: str, *, sampled: int = 70) -> Request:
    beam = make_request(name, 5)
    beam.status, beam.slot, beam.sampled_token_id = RequestStatus.RUNNING, 3, sampled
    beam.num_computed_tokens = 5
    return beam


def test_a_beam_that_takes_the_workers_token_stays() -> None:
    side, beam = Side(), beam_of("a")
    side.beams._continue(beam, 70)
    assert (beam.output_token_ids, beam.num_tokens, beam.max_num_tokens) == ([70], 6, 7)
    assert not beam.waits_for_siblings
    assert side.calls == [("cache_computed", beam, 5), ("go_on", beam)]
    assert side.beams.forget(beam), "the worker knows it"


def test_a_beam_with_another_token_enters_again() -> None:
    side, beam = Side(), beam_of("a")
    side.beams._continue(beam, 71)
    side.calls.clear()
    appended, admitted = {beam: [4]}, dict[Request, int]()
    side.beams.reenter({}, appended, admitted)
    assert (appended, admitted) == ({beam: [4]}, {}), "it is not in the step"
    side.beams.reenter({beam: 1}, appended, admitted)
    assert (appended, admitted) == ({}, {beam: 5})
    assert side.calls == [("renew", 3), ("begin_anew", beam)]
    side.beams.reenter({beam: 1}, appended, admitted)
    assert len(side.calls) == 2, "once"


def test_a_beam_that_cannot_enter_again_is_preempted() -> None:
    side, beam = Side(can_begin_anew=False), beam_of("a")
    side.beams._continue(beam, 71)
    assert side.calls[1:] == [("preempt", beam)]
    waiting = beam_of("b")
    waiting.status = RequestStatus.WAITING
    side.calls.clear()
    side.beams._continue(waiting, 71)
    assert side.calls == []


def test_a_fork_takes_a_slot_and_the_worker_does_not_know_it() -> None:
    side, parent = Side(), beam_of("a")
    parent.output_token_ids.append(60)
    child = side.beams._fork(parent, 72)
    assert (child.output_token_ids, child.slot, child.status) == ([60, 72], 6, RequestStatus.RUNNING)
    assert side.calls == [("fork", parent, child)]
    assert side.running == [child]
    side.calls.clear()
    admitted: dict[Request, int] = {}
    side.beams.reenter({child: 1}, {}, admitted)
    assert side.calls == [("begin_anew", child)], "no slot to renew"
    assert admitted == {child: 0}
    other = side.beams._fork(parent, 73)
    assert not side.beams.forget(other)
    assert side.beams.forget(other), "it is forgotten once"


@pytest.mark.parametrize("options", [{"has_free": False}, {"can_fork": False}])
def test_a_fork_without_room_waits(options: dict[str, bool]) -> None:
    side, parent = Side(**options), beam_of("a")
    child = side.beams._fork(parent, 72)
    assert side.calls == [("wait", child)]
    assert (side.running, child.slot) == ([], -1)


async def test_announcements_within_a_moment_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    readers = Readers(sequences_of=lambda sink: ())
    readers.sinks |= {Sink("a", told), Sink("b", told)}  # type: ignore[arg-type]  # all that is asked of them
    calls: list[tuple[float, Any]] = []
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "call_later", lambda delay, call: calls.append((delay, call)) or "handle")
    readers.announce()
    readers.announce()
    assert [delay for delay, _ in calls] == [ANNOUNCE_DELAY_S] == [0.01]
    calls[0][1]()
    assert sorted(told) == ["a", "b"]
    readers.announce()
    assert len(calls) == 2


class Sink:
    """Records its calls."""

    def __init__(self, name: str, told: list[str]) -> None:
        self.name, self.told = name, told

    def announce(self) -> None:
        self.told.append(self.name)
