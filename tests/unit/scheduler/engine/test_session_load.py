"""A session's messages tell the load when it matters, and not with every step."""

import numpy as np
import pytest

from pagoda.v1 import scheduler_pb2
from pagoda_common.config.engine_config import CacheConfig, EngineConfig
from pagoda_common.errors import NotReady
from pagoda_scheduler.core.step_result import StepResult
from pagoda_scheduler.engine.engine import Engine
from pagoda_scheduler.groups.worker_groups import WorkerGroups
from pagoda_scheduler.rpc import sinks as session
from pagoda_scheduler.rpc.scheduler_state import SchedulerState
from pagoda_scheduler.rpc.sinks import SessionSink
from tests.unit.scheduler.stories import PretendWorker, make_request, make_scheduler

NEVER_NS = 10**18


@pytest.fixture
def sent() -> list[scheduler_pb2.SchedulerMessage]:
    return []


@pytest.fixture
def sink(sent: list[scheduler_pb2.SchedulerMessage], monkeypatch: pytest.MonkeyPatch) -> SessionSink:
    """A session of an idle engine; what it would send is in `sent`."""
    engine = Engine(config=EngineConfig(cache=CacheConfig(block_size=4)))
    groups = WorkerGroups(config=engine.config, engine=engine, session_epoch=7)
    state = SchedulerState(session_epoch=7, engine=engine, groups=groups)
    sink = SessionSink(state=state, on_room=lambda sink: None)
    monkeypatch.setattr(sink.outbox, "put", sent.append)
    return sink


def decode(sink: SessionSink, *, max_tokens: int) -> None:
    """One request from its first step to its last, and an empty step after it."""
    scheduler, worker = make_scheduler(), PretendWorker()
    request = make_request("a", 5, max_tokens=max_tokens, ignore_eos=True)
    scheduler.add(request)
    while (output := scheduler.schedule()) is not None:
        sink.push(scheduler.update(worker.execute(output)))
    sink.push(StepResult(step=100))


def test_steps_that_admit_or_finish_tell_the_load_and_the_others_do_not(
    sink: SessionSink, sent: list[scheduler_pb2.SchedulerMessage], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "LOAD_PERIOD_NS", NEVER_NS)
    decode(sink, max_tokens=6)
    assert [len(np.frombuffer(message.token_ids, "<u4")) for message in sent] == [1] * 6 + [0]
    assert [message.HasField("load") for message in sent] == [True, False, False, False, False, True, True]
    assert all(message.session_epoch == 7 for message in sent)


def test_a_load_that_was_told_too_long_ago_is_told_again(
    sink: SessionSink, sent: list[scheduler_pb2.SchedulerMessage], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "LOAD_PERIOD_NS", 0)
    decode(sink, max_tokens=6)
    assert all(message.HasField("load") for message in sent)


def test_every_message_outside_of_a_step_tells_the_load(
    sink: SessionSink, sent: list[scheduler_pb2.SchedulerMessage], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "LOAD_PERIOD_NS", NEVER_NS)
    sink.hello("test")
    sink.announce()
    sink.reject("a", NotReady("draining"))
    assert [message.load.not_ready_reason for message in sent] == ["no worker has registered yet"] * 3


def test_a_load_that_was_told_just_now_is_not_told_again_before_its_period_is_over(
    sink: SessionSink, sent: list[scheduler_pb2.SchedulerMessage], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ns = session.LOAD_PERIOD_NS * 1000
    monkeypatch.setattr(session.time, "monotonic_ns", lambda: now_ns)
    request = make_request("a", 5)
    going = StepResult(step=1, requests=[request], offsets=[1], token_ids=[7], rows=[0])
    told = []
    for passed in (0, session.LOAD_PERIOD_NS - 1, 1, 1, session.LOAD_PERIOD_NS):
        now_ns += passed
        sink.push(going)
        told.append(sent[-1].HasField("load"))
    assert told == [True, False, True, False, True]
