"""Worker groups of several ranks: brought up when all are there, stepped together, formed again when one is lost."""

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc
import pytest

from pagoda.v1 import scheduler_pb2
from pagoda_scheduler.groups import worker_groups
from tests.fakes.fake_worker import FakeWorker
from tests.harness.scheduler import RunningScheduler
from tests.service.scheduler.test_leaving import check, run, states


async def start(scheduler: RunningScheduler, rank: int, world_size: int = 2, *, num_blocks: int = 1000) -> FakeWorker:
    worker = FakeWorker(rank=rank, world_size=world_size, num_blocks=num_blocks)
    worker.delay_s = 0.003
    await worker.start(scheduler.address, group=0)
    return worker


async def start_group(scheduler: RunningScheduler) -> list[FakeWorker]:
    ranks = [await start(scheduler, rank) for rank in range(2)]
    await serving(scheduler)
    return ranks


async def serving(scheduler: RunningScheduler) -> None:
    await scheduler.until(lambda: len(scheduler.engine.cores) == 1)


async def stop(*ranks: FakeWorker) -> None:
    for rank in ranks:
        await rank.stop()


async def test_a_group_waits_for_its_missing_rank_and_says_which(
    scheduler: RunningScheduler, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="pagoda_scheduler")
    first = await start(scheduler, 0, world_size=3)
    last = await start(scheduler, 2, world_size=3)
    await scheduler.until(lambda: "waits for rank 1 of 3" in scheduler.engine.not_ready_reason)
    assert "worker group 0 waits for rank 1 of 3" in caplog.text
    assert not first.num_loads, "nothing begins before all ranks are there"
    middle = await start(scheduler, 1, world_size=3)
    await serving(scheduler)
    assert await states(scheduler) == ["serving"] * 3
    await stop(first, middle, last)


async def test_all_ranks_take_every_step_and_rank_0_says_the_tokens(scheduler: RunningScheduler) -> None:
    ranks = [await start(scheduler, 1, num_blocks=300), await start(scheduler, 0, num_blocks=500)]
    for rank in ranks:
        rank.keep_requests = True
    await serving(scheduler)
    assert scheduler.engine.cores[0].scheduler.kv.pool.num_blocks == 300, "what fits on every rank"
    await check(run(scheduler, 5))
    follower, leader = ranks
    assert leader.rendezvous == [""]
    assert follower.rendezvous == ["here:1"]
    await scheduler.until(lambda: len(follower.requests) == len(leader.requests))
    for theirs, ours in zip(follower.requests, leader.requests, strict=True):
        assert theirs.worker_incarnation == follower.incarnation
        theirs.worker_incarnation = ours.worker_incarnation
        assert theirs == ours
    await stop(*ranks)


@pytest.mark.parametrize("lost", [0, 1])
async def test_a_lost_rank_stops_the_group_until_another_takes_its_place(
    scheduler: RunningScheduler, lost: int
) -> None:
    ranks = await start_group(scheduler)
    core = scheduler.engine.cores[0]
    tasks = run(scheduler, 5)
    await scheduler.until(lambda: core.num_steps > 10)
    await ranks[lost].stop()
    await scheduler.until(lambda: f"waits for rank {lost} of 2" in scheduler.engine.not_ready_reason)
    ranks[lost] = await start(scheduler, lost)
    await check(tasks)
    assert ranks[1].rendezvous[-1] == f"here:{len(ranks[0].rendezvous)}", "the ranks meet at a new place"
    assert scheduler.engine.load().counters.num_worker_losses == 1
    await stop(*ranks)


async def test_a_rank_that_comes_back_before_its_loss_was_seen_replaces_the_older(scheduler: RunningScheduler) -> None:
    ranks = await start_group(scheduler)
    core = scheduler.engine.cores[0]
    tasks = run(scheduler, 5)
    await scheduler.until(lambda: core.num_steps > 10)
    successor = await start(scheduler, 1)
    await check(tasks)
    assert successor.num_loads == 1
    assert await states(scheduler) == ["serving"] * 2
    await stop(*ranks, successor)


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_rank_that_hangs_is_noticed_by_the_watchdog(
    scheduler: RunningScheduler, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_groups, "RETRY_S", 0.05)
    ranks = await start_group(scheduler)
    core = scheduler.engine.cores[0]
    assert core._watchdog is not None
    core._watchdog._min_s = 0.3
    tasks = run(scheduler, 3)
    await scheduler.until(lambda: core.num_steps > 10)
    ranks[rank].hang_at_step = 1
    await check(tasks)
    assert core not in scheduler.engine.cores
    await stop(*ranks)


async def test_a_registration_that_breaks_and_comes_back_costs_nothing(scheduler: RunningScheduler) -> None:
    ranks = await start_group(scheduler)
    core = scheduler.engine.cores[0]
    tasks = run(scheduler, 5)
    await scheduler.until(lambda: core.num_steps > 5)
    ranks[1].drop_registration()
    await scheduler.until(lambda: ranks[1].num_registrations == 2)
    await check(tasks)
    assert scheduler.engine.cores == [core]
    await stop(*ranks)


async def test_a_rank_that_leaves_takes_its_group_along_when_what_runs_has_ended(scheduler: RunningScheduler) -> None:
    ranks = await start_group(scheduler)
    core = scheduler.engine.cores[0]
    tasks = run(scheduler, 3)
    await scheduler.until(lambda: core.num_steps > 5)
    await ranks[1].leave(30.0)
    await check(tasks)
    assert scheduler.engine.load().counters.num_worker_losses == 0
    await scheduler.until(lambda: "waits for rank 1 of 2" in scheduler.engine.not_ready_reason)
    successor = await start(scheduler, 1)
    await check(run(scheduler, 3))
    await stop(ranks[0], ranks[1], successor)


async def test_a_group_sleeps_and_wakes_with_all_its_ranks(scheduler: RunningScheduler) -> None:
    ranks = await start_group(scheduler)
    slept = await scheduler.stub.Sleep(scheduler_pb2.SleepRequest(level=1))
    assert (slept.num_groups, slept.freed_bytes) == (1, 2000)
    assert [rank.sleep_level for rank in ranks] == [1, 1]
    await ranks[1].stop()
    ranks[1] = await start(scheduler, 1)
    await scheduler.until(lambda: ranks[1].sleep_level == 1)
    assert not scheduler.engine.cores
    await scheduler.stub.WakeUp(scheduler_pb2.WakeUpRequest())
    assert [rank.sleep_level for rank in ranks] == [0, 0]
    await check(run(scheduler, 2))
    await stop(*ranks)


async def test_all_ranks_change_over_to_new_weights_or_none(scheduler: RunningScheduler) -> None:
    ranks = await start_group(scheduler)
    await scheduler.stub.ReloadWeights(scheduler_pb2.ReloadWeightsRequest(model="plus-1"))
    assert all("reload plus-1" in rank.calls for rank in ranks)
    with pytest.raises(grpc.aio.AioRpcError, match="not a directory"):
        await scheduler.stub.ReloadWeights(scheduler_pb2.ReloadWeightsRequest(model="plus-2-broken"))
    assert [rank.weights.model for rank in ranks] == ["plus-1", "plus-1"]
    await check(run(scheduler, 2))
    await stop(*ranks)


async def refusal(scheduler: RunningScheduler, **identity: int) -> str:
    async def messages() -> AsyncIterator[scheduler_pb2.WorkerRegistration]:
        yield scheduler_pb2.WorkerRegistration(
            identity=scheduler_pb2.WorkerIdentity(address="127.0.0.1:1", incarnation=5, **identity)
        )
        await asyncio.Event().wait()

    with pytest.raises(grpc.aio.AioRpcError) as raised:
        async for _ in scheduler.stub.RegisterWorker(messages()):
            pass
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    return str(raised.value.details())


async def test_ranks_that_make_no_group_are_refused(scheduler: RunningScheduler) -> None:
    assert "rank is 2, must be below world_size, 2" in await refusal(scheduler, rank=2, world_size=2, group=0)
    assert "group is not set" in await refusal(scheduler, rank=1, world_size=2)


async def test_a_group_of_another_size_takes_the_place_of_an_older_one(scheduler: RunningScheduler) -> None:
    ranks = await start_group(scheduler)
    alone = await start(scheduler, 0, world_size=1)
    await scheduler.until(lambda: alone.num_loads == 1)
    await serving(scheduler)
    assert await states(scheduler) == ["serving"]
    await stop(*ranks, alone)
