"""Workers whose registration breaks, that fall silent, and that leave: what runs there goes on."""

import asyncio

import pytest

from pagoda.v1 import scheduler_pb2
from pagoda_scheduler.groups import worker_groups
from pagoda_scheduler.rpc import heartbeats
from tests.fakes.fake_worker import FakeWorker
from tests.harness.scheduler import RunningScheduler
from tests.service.scheduler.test_faults import generate

NUM_TOKENS = 60


async def start(scheduler: RunningScheduler, *, delay_s: float = 0.0) -> FakeWorker:
    worker = FakeWorker()
    worker.delay_s = delay_s
    num_serving = len(scheduler.engine.cores)
    await worker.start(scheduler.address)
    await scheduler.until(lambda: len(scheduler.engine.cores) == num_serving + 1)
    return worker


def run(scheduler: RunningScheduler, num: int, num_tokens: int = NUM_TOKENS) -> "list[asyncio.Task[list[int]]]":
    return [asyncio.create_task(generate(scheduler, str(i), [100 * i], num_tokens)) for i in range(1, num + 1)]


async def check(tasks: "list[asyncio.Task[list[int]]]", num_tokens: int = NUM_TOKENS) -> None:
    outputs = await asyncio.wait_for(asyncio.gather(*tasks), 240)
    assert outputs == [list(range(100 * i + 1, 100 * i + 1 + num_tokens)) for i in range(1, len(tasks) + 1)]


async def states(scheduler: RunningScheduler) -> list[str]:
    state = await scheduler.stub.GetState(scheduler_pb2.GetStateRequest())
    return [worker.state for worker in state.workers]


async def test_a_registration_that_breaks_and_comes_back_costs_nothing(scheduler: RunningScheduler) -> None:
    worker = await start(scheduler, delay_s=0.005)
    core = scheduler.engine.cores[0]
    tasks = run(scheduler, 5)
    await scheduler.until(lambda: core.num_steps > 5)
    worker.drop_registration()
    await scheduler.until(lambda: worker.num_registrations == 2)
    await check(tasks)
    assert scheduler.engine.cores == [core]
    assert scheduler.engine.load().counters.num_worker_losses == 0
    await worker.stop()


async def test_a_registration_that_stays_away_is_a_loss(
    scheduler: RunningScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_groups, "REGISTRATION_GRACE_S", 0.1)
    worker = await start(scheduler)
    assert worker._registration is not None
    worker._registration.cancel()
    await scheduler.until(lambda: not scheduler.engine.cores)
    await scheduler.until(lambda: scheduler.engine.load().counters.num_worker_losses == 1)
    assert await states(scheduler) == []
    await worker.stop()


async def test_a_killed_worker_is_lost_at_once_and_its_number_is_free(
    scheduler: RunningScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_groups, "REGISTRATION_GRACE_S", 3600)
    worker = await start(scheduler)
    await worker.stop()
    await scheduler.until(lambda: not scheduler.engine.cores)
    async with asyncio.timeout(240):
        while await states(scheduler):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    other = await start(scheduler)
    state = await scheduler.stub.GetState(scheduler_pb2.GetStateRequest())
    assert [group.identity.address for group in state.workers] == [other.address]
    await other.stop()


async def test_a_silent_worker_without_work_turns_readiness_false_and_comes_back(
    scheduler: RunningScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeats, "IDLE_TIMEOUT_S", 1.2)
    worker = await start(scheduler)
    worker.has_heartbeats = False
    await scheduler.until(lambda: not scheduler.engine.is_ready)
    await scheduler.until(lambda: "no heartbeat" in scheduler.engine.not_ready_reason or scheduler.engine.is_ready)
    worker.has_heartbeats = True
    await scheduler.until_ready()
    await worker.stop()


async def test_what_runs_on_a_leaving_worker_ends_there_and_what_waits_goes_elsewhere(
    scheduler: RunningScheduler,
) -> None:
    worker = await start(scheduler, delay_s=0.01)
    core = scheduler.engine.cores[0]
    tasks = run(scheduler, 12)  # eight of them run
    await scheduler.until(lambda: len(core.scheduler.running) == 8 and core.num_steps > 5)
    leaving = asyncio.create_task(worker.leave(60))
    await scheduler.until(lambda: not scheduler.engine.cores)
    assert not scheduler.engine.is_ready
    assert await states(scheduler) == ["leaving"]
    other = await start(scheduler)
    await scheduler.until(lambda: sum(task.done() for task in tasks) == 4)  # those that waited, before the others
    await check(tasks)
    await asyncio.wait_for(leaving, 240)
    assert scheduler.engine.load().counters.num_worker_losses == 0
    await scheduler.until(lambda: len(scheduler.engine.cores) == 1)
    await worker.stop()
    await other.stop()


async def test_what_a_leaving_worker_has_not_finished_in_time_goes_on_elsewhere_and_is_not_blamed(
    scheduler: RunningScheduler,
) -> None:
    worker = await start(scheduler, delay_s=0.02)
    core = scheduler.engine.cores[0]
    tasks = run(scheduler, 5)
    await scheduler.until(lambda: core.num_steps > 5)
    await asyncio.wait_for(worker.leave(0.1), 240)
    await worker.stop()
    requests = [one for open_request in scheduler.engine.requests.values() for one in open_request.sequences]
    assert [request.num_crashes for request in requests] == [0] * 5
    assert all(request.output_token_ids for request in requests)
    other = await start(scheduler)
    await check(tasks)
    assert scheduler.engine.load().counters.num_worker_losses == 0
    await other.stop()


async def test_an_idle_worker_leaves_at_once(scheduler: RunningScheduler) -> None:
    worker = await start(scheduler)
    await asyncio.wait_for(worker.leave(3600), 240)
    await scheduler.until(lambda: not scheduler.engine.is_ready)
    assert await states(scheduler) == []
    await worker.stop()
