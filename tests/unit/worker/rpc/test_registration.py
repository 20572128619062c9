"""Registration without a server: what a worker tells its scheduler, when, and how it leaves."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from pagoda.v1 import scheduler_pb2
from pagoda_worker.rpc import registration as module
from pagoda_worker.rpc.registration import CAPABILITIES, Registration


class Scheduler:
    """The scheduler's side of one stream after another."""

    def __init__(self) -> None:
        self.heard: list[scheduler_pb2.WorkerRegistration] = []
        self.can_leave = True
        self.ends_at = 10**9
        """Messages after which a stream ends."""
        self.num_streams = 0
        self.num_channels = 0
        self.is_closed = False

    async def RegisterWorker(
        self, messages: AsyncIterator[scheduler_pb2.WorkerRegistration]
    ) -> AsyncIterator[scheduler_pb2.RegisterWorkerResponse]:
        self.num_streams += 1
        yield scheduler_pb2.RegisterWorkerResponse(session_epoch=3, can_leave=self.can_leave)
        count = 0
        async for message in messages:
            self.heard.append(scheduler_pb2.WorkerRegistration.FromString(message.SerializeToString()))
            count += 1
            if message.HasField("leaving") or count >= self.ends_at:
                return

    def renew(self) -> None:
        self.num_channels += 1

    async def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    scheduler = Scheduler()
    monkeypatch.setattr(module, "Connection", lambda address, security: scheduler)
    stub = SimpleNamespace(SchedulerStub=lambda channel: scheduler)
    monkeypatch.setattr(module, "scheduler_pb2_grpc", stub)
    return scheduler


def registration_of(**more: Any) -> Registration:
    steps = iter(range(10, 10_000))
    identity = scheduler_pb2.WorkerIdentity(address="here:1", incarnation=7)
    return Registration(scheduler="there:2", identity=identity, last_step=lambda: next(steps), **more)


async def until(condition: Any) -> None:
    async with asyncio.timeout(240):
        while not condition():  # noqa: ASYNC110 (any condition)
            await asyncio.sleep(0.001)


def test_what_a_worker_can_do_and_how_often_it_says_so() -> None:
    assert set(CAPABILITIES) == {"swap", "speculation", "constraints", "lora"}
    assert (module.HEARTBEAT_PERIOD_S, module.RETRY_S, module.MAX_RETRY_S, module.LEAVE_MARGIN_S) == (
        1.0,
        0.1,
        0.3,
        2.0,
    )


async def test_an_identity_is_told_as_it_is_now_then_a_heartbeat_each_period(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HEARTBEAT_PERIOD_S", 0.001)

    def refresh(identity: scheduler_pb2.WorkerIdentity) -> None:
        identity.sleep_level += 1

    worker = registration_of(refresh=refresh)
    run = asyncio.create_task(worker.run())
    await until(lambda: len(scheduler.heard) > 3)
    identity, *beats = scheduler.heard[:4]
    assert (identity.identity.address, identity.identity.incarnation, identity.identity.sleep_level) == ("here:1", 7, 1)
    assert [beat.heartbeat.last_step for beat in beats] == [10, 11, 12]
    assert (scheduler.num_streams, scheduler.num_channels) == (1, 1)
    run.cancel()
    await asyncio.wait([run])
    assert scheduler.is_closed


async def test_a_stream_that_ends_is_followed_by_another_after_a_pause(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        await asyncio.sleep(0)

    monkeypatch.setattr(module, "asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": pause}))
    scheduler.ends_at = 1
    worker = registration_of()
    run = asyncio.create_task(worker.run())
    await until(lambda: scheduler.num_streams > 3)
    assert pauses[:3] == [0.1, 0.1, 0.1], "each registration was a success"
    assert scheduler.num_channels >= 3
    assert all(message.HasField("identity") for message in scheduler.heard)
    assert not worker._can_leave
    run.cancel()
    await asyncio.wait([run])


async def test_a_worker_that_leaves_says_how_long_it_waits_and_is_over_with_the_stream(scheduler: Scheduler) -> None:
    worker = registration_of()
    run = asyncio.create_task(worker.run())
    await until(lambda: scheduler.heard)
    await asyncio.wait_for(worker.leave(12.5), 240)
    await run
    kinds = [message.WhichOneof("message") for message in scheduler.heard]
    assert (kinds[0], kinds[-1]) == ("identity", "leaving")
    assert scheduler.heard[-1].leaving.timeout_s == 12.5
    assert (scheduler.num_streams, scheduler.is_closed) == (1, True)


async def test_a_scheduler_that_cannot_let_go_is_not_waited_for(scheduler: Scheduler) -> None:
    scheduler.can_leave = False
    worker = registration_of()
    await worker.leave(100)
    run = asyncio.create_task(worker.run())
    await until(lambda: scheduler.heard)
    await asyncio.wait_for(worker.leave(100), 240)
    assert not worker._leaving.is_set()
    run.cancel()
    await asyncio.wait([run])


async def test_leaving_takes_no_longer_than_its_time_and_a_margin(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float] = []
    timeout = asyncio.timeout

    def note(seconds: float) -> asyncio.Timeout:
        given.append(seconds)
        return timeout(0.001)

    monkeypatch.setattr(module, "asyncio", SimpleNamespace(**vars(asyncio) | {"timeout": note}))
    worker = registration_of()
    worker._can_leave = True
    await worker.leave(5.0)
    assert given == [7.0]
    assert worker._leaving.is_set()
