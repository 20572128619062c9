"""Sleep, wake-up and other weights under load: what runs goes on, what comes waits, what fails changes nothing."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from pagoda.v1 import scheduler_pb2, types_pb2
from pagoda_common.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from pagoda_common.engine.convert import token_ids_to_bytes
from tests.fakes.fake_worker import FakeWorker
from tests.harness.scheduler import RunningScheduler, running_scheduler


def config(**scheduler: int) -> EngineConfig:
    return EngineConfig(cache=CacheConfig(block_size=4), scheduler=SchedulerConfig(max_num_seqs=8, **scheduler))


@pytest.fixture
async def scheduler() -> AsyncIterator[RunningScheduler]:
    async with running_scheduler(config()) as running:
        yield running


@pytest.fixture
async def worker(scheduler: RunningScheduler) -> AsyncIterator[FakeWorker]:
    worker = FakeWorker()
    await worker.start(scheduler.address, group=0)
    await scheduler.until_ready()
    worker.delay_s = 0.002
    yield worker
    await worker.stop()


@pytest.fixture
async def second(scheduler: RunningScheduler, worker: FakeWorker) -> AsyncIterator[FakeWorker]:
    second = FakeWorker()
    await second.start(scheduler.address, group=1)
    await scheduler.until(lambda: len(scheduler.engine.cores) == 2)
    second.delay_s = 0.002
    yield second
    await second.stop()


async def generate(scheduler: RunningScheduler, first: int, num_tokens: int) -> list[int]:
    """The tokens of one request whose prompt is `first`, checked for gaps."""
    params = types_pb2.SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    request = scheduler_pb2.SubmitRequest(
        request_id=f"from-{first}", prompt_token_ids=token_ids_to_bytes([first]), sampling_params=params
    )
    tokens: list[int] = []
    async for output in scheduler.stub.Generate(request):
        assert output.offset == len(tokens) or not output.token_ids
        tokens += output.token_ids
    return tokens


def start(scheduler: RunningScheduler, num_tokens: int) -> "asyncio.Future[list[list[int]]]":
    """Eight streams."""
    return asyncio.gather(*(generate(scheduler, 1000 * i, num_tokens) for i in range(1, 9)))


def expected(num_tokens: int) -> list[list[int]]:
    return [list(range(1000 * i + 1, 1000 * i + 1 + num_tokens)) for i in range(1, 9)]


def steps(tokens: list[int], first: int) -> list[int]:
    """Differences between neighbours."""
    return [after - before for before, after in zip([first, *tokens], tokens, strict=False)]


async def fails(awaitable: object, code: grpc.StatusCode, fragment: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await awaitable  # type: ignore[misc]  # any call of a stub
    assert raised.value.code() == code
    assert fragment in (raised.value.details() or "")


async def is_sleeping(scheduler: RunningScheduler) -> tuple[bool, int, list[tuple[int, int]]]:
    state = await scheduler.stub.IsSleeping(scheduler_pb2.IsSleepingRequest())
    return state.is_sleeping, state.level, [(group.group, group.level) for group in state.groups]


async def until_stepping(scheduler: RunningScheduler) -> None:
    """Wait until every group has computed something for the streams."""
    await scheduler.until(lambda: all(core.num_steps > 8 for core in scheduler.engine.cores))


async def test_what_runs_goes_on_after_the_sleep_and_what_comes_waits(
    scheduler: RunningScheduler, worker: FakeWorker
) -> None:
    running = start(scheduler, 60)
    await until_stepping(scheduler)
    slept = await scheduler.stub.Sleep(scheduler_pb2.SleepRequest())
    assert (slept.num_groups, slept.freed_bytes) == (1, 1000)
    assert await is_sleeping(scheduler) == (True, 1, [(0, 1)])
    load = await scheduler.stub.GetLoad(scheduler_pb2.GetLoadRequest())
    assert (load.is_ready, load.sleep_level, load.num_waiting_reqs) == (False, 1, 8)
    assert "the model sleeps (level 1)" in load.not_ready_reason
    late = asyncio.create_task(generate(scheduler, 50, 5))
    await scheduler.until(lambda: scheduler.engine.num_submitted == 9)
    assert not running.done()
    woken = await scheduler.stub.WakeUp(scheduler_pb2.WakeUpRequest())
    assert woken.num_groups == 1
    assert await asyncio.wait_for(running, 240) == expected(60)
    assert await late == list(range(51, 56))
    assert await is_sleeping(scheduler) == (False, 0, [(0, 0)])
    load = await scheduler.stub.GetLoad(scheduler_pb2.GetLoadRequest())
    assert (load.is_ready, load.sleep_level, load.num_worker_losses, load.num_used_blocks) == (True, 0, 0, 0)
    assert worker.calls == ["sleep 1", "wake"]


async def test_a_sleep_may_deepen_and_ends_in_two_parts(scheduler: RunningScheduler, worker: FakeWorker) -> None:
    for level in (1, 2, 1):
        await scheduler.stub.Sleep(scheduler_pb2.SleepRequest(level=level))
    assert await is_sleeping(scheduler) == (True, 2, [(0, 2)])
    await scheduler.stub.WakeUp(scheduler_pb2.WakeUpRequest(tags=["weights"]))
    assert (await is_sleeping(scheduler))[0]
    await scheduler.stub.WakeUp(scheduler_pb2.WakeUpRequest(tags=["kv_cache"]))
    assert not (await is_sleeping(scheduler))[0]
    assert worker.calls == ["sleep 1", "sleep 2", "sleep 1", "wake weights", "wake"]
    assert await generate(scheduler, 5, 3) == [6, 7, 8]


async def test_one_group_sleeps_while_the_other_takes_its_requests(
    scheduler: RunningScheduler, worker: FakeWorker, second: FakeWorker
) -> None:
    running = start(scheduler, 80)
    await until_stepping(scheduler)
    await scheduler.stub.Sleep(scheduler_pb2.SleepRequest(level=2, group=1))
    assert await is_sleeping(scheduler) == (False, 0, [(0, 0), (1, 2)])
    assert scheduler.engine.is_ready
    assert await asyncio.wait_for(running, 240) == expected(80)
    assert second.calls == ["sleep 2"]
    assert worker.calls == []
    await scheduler.stub.WakeUp(scheduler_pb2.WakeUpRequest(group=1))
    assert len(scheduler.engine.cores) == 2


async def test_a_sleep_with_abort_ends_what_runs(scheduler: RunningScheduler, worker: FakeWorker) -> None:
    running = start(scheduler, 2000)
    await until_stepping(scheduler)
    await scheduler.stub.Sleep(scheduler_pb2.SleepRequest(mode=scheduler_pb2.SLEEP_MODE_ABORT))
    assert all(len(tokens) < 2000 for tokens in await asyncio.wait_for(running, 240))
    assert not scheduler.engine.requests


async def test_a_worker_that_cannot_sleep_serves_on(scheduler: RunningScheduler, worker: FakeWorker) -> None:
    running = start(scheduler, 60)
    await until_stepping(scheduler)
    worker.refuses_sleep = True
    refused = scheduler.stub.Sleep(scheduler_pb2.SleepRequest())
    await fails(refused, grpc.StatusCode.RESOURCE_EXHAUSTED, "host memory is full")
    assert await asyncio.wait_for(running, 240) == expected(60)
    assert not (await is_sleeping(scheduler))[0]
    await worker.stop()
    await scheduler.until(lambda: not scheduler.engine.cores)
    restarted = FakeWorker()
    await restarted.start(scheduler.address, group=0)
    await scheduler.until(lambda: bool(scheduler.engine.cores or restarted.calls))
    assert restarted.calls == [], "no sleep is asked of it"
    assert await generate(scheduler, 5, 3) == [6, 7, 8]
    await restarted.stop()


async def test_a_group_whose_weights_cannot_come_back_sleeps_on(
    scheduler: RunningScheduler, worker: FakeWorker
) -> None:
    await scheduler.stub.Sleep(scheduler_pb2.SleepRequest(level=2))
    worker.refuses_sleep = True
    await fails(
        scheduler.stub.WakeUp(scheduler_pb2.WakeUpRequest()),
        grpc.StatusCode.FAILED_PRECONDITION,
        "the checkpoint is gone",
    )
    assert (await is_sleeping(scheduler))[:2] == (True, 2)
    worker.refuses_sleep = False
    await scheduler.stub.WakeUp(scheduler_pb2.WakeUpRequest())
    assert await generate(scheduler, 5, 2) == [6, 7]


async def test_wrong_arguments_are_refused(scheduler: RunningScheduler, worker: FakeWorker) -> None:
    wrong, stub = grpc.StatusCode.INVALID_ARGUMENT, scheduler.stub
    await fails(stub.Sleep(scheduler_pb2.SleepRequest(level=3)), wrong, "level is 3, must be 1 or 2")
    await fails(stub.WakeUp(scheduler_pb2.WakeUpRequest(tags=["all"])), wrong, "tags has 'all'")
    await fails(stub.ReloadWeights(scheduler_pb2.ReloadWeightsRequest()), wrong, "model must name")
    unknown = scheduler_pb2.SleepRequest(group=7)
    await fails(stub.Sleep(unknown), grpc.StatusCode.NOT_FOUND, "group is 7, must be registered: 0")


async def test_the_queue_of_a_sleeping_engine_is_bounded() -> None:
    worker = FakeWorker()
    async with running_scheduler(config(max_num_queued_reqs=2)) as scheduler:
        await worker.start(scheduler.address)
        await scheduler.until_ready()
        await scheduler.stub.Sleep(scheduler_pb2.SleepRequest())
        waiting = [asyncio.create_task(generate(scheduler, first, 3)) for first in (10, 20)]
        await scheduler.until(lambda: scheduler.engine.num_submitted == 2)
        await fails(generate(scheduler, 30, 3), grpc.StatusCode.RESOURCE_EXHAUSTED, "max_num_queued_reqs is 2")
        await scheduler.stub.WakeUp(scheduler_pb2.WakeUpRequest())
        assert await asyncio.gather(*waiting) == [[11, 12, 13], [21, 22, 23]]
        await worker.stop()


async def test_new_weights_take_over_in_the_middle_of_streams(scheduler: RunningScheduler, worker: FakeWorker) -> None:
    running = start(scheduler, 80)
    await until_stepping(scheduler)
    reloaded = await scheduler.stub.ReloadWeights(scheduler_pb2.ReloadWeightsRequest(model="plus-7"))
    assert reloaded.num_groups == 1
    assert worker.calls == ["prepare plus-7", "reload plus-7"]
    for first, tokens in zip(range(1000, 9000, 1000), await asyncio.wait_for(running, 240), strict=True):
        taken = steps(tokens, first)
        num_old = taken.count(1)
        assert 0 < num_old < 80
        assert taken == [1] * num_old + [7] * (80 - num_old)
    assert await generate(scheduler, 5, 3) == [12, 19, 26]


async def test_two_groups_change_over_one_after_the_other(
    scheduler: RunningScheduler, worker: FakeWorker, second: FakeWorker
) -> None:
    running = start(scheduler, 120)
    await until_stepping(scheduler)
    reload = asyncio.ensure_future(scheduler.stub.ReloadWeights(scheduler_pb2.ReloadWeightsRequest(model="plus-7")))
    while not reload.done():
        assert scheduler.engine.cores
        await asyncio.sleep(0.001)
    assert (await reload).num_groups == 2
    for first, tokens in zip(range(1000, 9000, 1000), await asyncio.wait_for(running, 240), strict=True):
        assert len(tokens) == 120
        assert set(steps(tokens, first)) == {1, 7}
    assert worker.calls == second.calls == ["prepare plus-7", "reload plus-7"]


async def test_weights_that_do_not_fit_change_nothing(
    scheduler: RunningScheduler, worker: FakeWorker, second: FakeWorker
) -> None:
    running = start(scheduler, 60)
    await until_stepping(scheduler)
    cores = list(scheduler.engine.cores)
    reload = scheduler.stub.ReloadWeights(scheduler_pb2.ReloadWeightsRequest(model="/nowhere"))
    await fails(reload, grpc.StatusCode.FAILED_PRECONDITION, "model '/nowhere' is not a directory")
    assert scheduler.engine.cores == cores
    assert await asyncio.wait_for(running, 240) == expected(60)
    assert worker.calls == ["prepare /nowhere", "forget"]


async def test_a_change_over_that_fails_leaves_the_old_weights(scheduler: RunningScheduler, worker: FakeWorker) -> None:
    running = start(scheduler, 60)
    await until_stepping(scheduler)
    reload = scheduler.stub.ReloadWeights(scheduler_pb2.ReloadWeightsRequest(model="plus-7-broken"))
    await fails(reload, grpc.StatusCode.FAILED_PRECONDITION, "group 0: model 'plus-7-broken'")
    assert await asyncio.wait_for(running, 240) == expected(60)
    assert scheduler.engine.is_ready


async def test_a_restarted_worker_holds_the_new_weights(scheduler: RunningScheduler, worker: FakeWorker) -> None:
    await scheduler.stub.ReloadWeights(scheduler_pb2.ReloadWeightsRequest(model="plus-7"))
    await worker.stop()
    await scheduler.until(lambda: not scheduler.engine.cores)
    restarted = FakeWorker()
    await restarted.start(scheduler.address, group=0)
    await scheduler.until_ready()
    assert await generate(scheduler, 5, 3) == [12, 19, 26]
    await restarted.stop()


async def test_one_group_alone_may_hold_other_weights(
    scheduler: RunningScheduler, worker: FakeWorker, second: FakeWorker
) -> None:
    await scheduler.stub.ReloadWeights(scheduler_pb2.ReloadWeightsRequest(model="plus-7", group=1))
    assert worker.calls == []
    assert second.weights.is_for_one_group
    await scheduler.stub.Sleep(scheduler_pb2.SleepRequest(group=0))
    assert await generate(scheduler, 5, 3) == [12, 19, 26]


async def test_a_worker_that_dies_asleep_comes_back_asleep(scheduler: RunningScheduler, worker: FakeWorker) -> None:
    await scheduler.stub.Sleep(scheduler_pb2.SleepRequest(level=2))
    waiting = asyncio.create_task(generate(scheduler, 5, 3))
    await worker.stop()
    restarted = FakeWorker()
    await restarted.start(scheduler.address, group=0)
    await scheduler.until(lambda: restarted.calls == ["sleep 2"])
    assert restarted.num_loads == 0
    assert await is_sleeping(scheduler) == (True, 2, [(0, 2)])
    await scheduler.stub.WakeUp(scheduler_pb2.WakeUpRequest())
    assert await waiting == [6, 7, 8]
    await restarted.stop()


async def test_a_new_scheduler_learns_of_sleep_and_weights_from_the_worker() -> None:
    worker = FakeWorker()
    worker.sleep_level = 1
    worker.weights.CopyFrom(types_pb2.WeightsSource(model="plus-7", version=5))
    async with running_scheduler(config()) as scheduler:
        await worker.start(scheduler.address)
        await scheduler.until(lambda: worker.calls == ["sleep 1"])
        assert (await is_sleeping(scheduler))[:2] == (True, 1)
        await scheduler.stub.WakeUp(scheduler_pb2.WakeUpRequest())
        assert await generate(scheduler, 5, 2) == [12, 19]
        await worker.stop()


async def test_a_worker_that_dies_in_the_change_over_comes_back_with_the_new_weights(
    scheduler: RunningScheduler, worker: FakeWorker, second: FakeWorker
) -> None:
    second.hangs_on_reload = True
    running = start(scheduler, 80)
    await until_stepping(scheduler)
    reload = asyncio.ensure_future(scheduler.stub.ReloadWeights(scheduler_pb2.ReloadWeightsRequest(model="plus-7")))
    await scheduler.until(lambda: "reload plus-7" in second.calls)
    await second.stop()
    await fails(reload, grpc.StatusCode.UNAVAILABLE, "(1 of 2 groups hold the new weights)")
    for first, tokens in zip(range(1000, 9000, 1000), await asyncio.wait_for(running, 240), strict=True):
        assert len(tokens) == 80
        assert set(steps(tokens, first)) <= {1, 7}
    assert await generate(scheduler, 5, 2) == [12, 19]
    restarted = FakeWorker()
    await restarted.start(scheduler.address, group=1)
    await scheduler.until(lambda: len(scheduler.engine.cores) == 2)
    assert restarted.weights.model == "plus-7"
    await restarted.stop()
