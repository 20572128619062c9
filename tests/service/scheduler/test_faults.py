"""Workers that hang or crash, and requests that make them: what is sound goes on, token for token."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from pagoda.v1 import scheduler_pb2, types_pb2
from pagoda_common.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from pagoda_common.engine.convert import token_ids_to_bytes
from pagoda_scheduler.core.in_flight import InFlight
from pagoda_scheduler.core.request import Request
from pagoda_scheduler.core.step_result import StepResult
from pagoda_scheduler.rpc import heartbeats
from tests.fakes.fake_worker import FakeWorker
from tests.harness.scheduler import RunningScheduler, running_scheduler

POISON = 777_777


@pytest.fixture(params=[True, False], ids=["async", "sync"])
async def scheduler(request: pytest.FixtureRequest) -> AsyncIterator[RunningScheduler]:
    config = EngineConfig(
        cache=CacheConfig(block_size=4),
        scheduler=SchedulerConfig(
            max_num_seqs=8, max_num_batched_tokens=64, async_scheduling=request.param, step_watchdog_s=0.5
        ),
    )
    async with running_scheduler(config) as running:
        yield running


@pytest.fixture
async def worker(scheduler: RunningScheduler) -> AsyncIterator[FakeWorker]:
    worker = FakeWorker()
    await worker.start(scheduler.address)
    await scheduler.until_ready()
    yield worker
    await worker.stop()


async def generate(scheduler: RunningScheduler, name: str, prompt: list[int], max_tokens: int) -> list[int]:
    params = types_pb2.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    request = scheduler_pb2.SubmitRequest(
        request_id=name, prompt_token_ids=token_ids_to_bytes(prompt), sampling_params=params
    )
    tokens: list[int] = []
    async for output in scheduler.stub.Generate(request):
        assert output.offset == len(tokens) or not output.token_ids
        tokens += output.token_ids
    return tokens


async def test_a_worker_that_hangs_is_given_up_and_its_requests_go_on(
    scheduler: RunningScheduler, worker: FakeWorker
) -> None:
    worker.hang_at_step = 12
    outputs = await asyncio.wait_for(
        asyncio.gather(*(generate(scheduler, str(i), [100 * i], 40) for i in range(1, 6))), 60
    )
    assert outputs == [list(range(100 * i + 1, 100 * i + 41)) for i in range(1, 6)]
    assert scheduler.engine.load().counters.num_worker_losses == 1


async def test_a_worker_without_heartbeats_is_lost(
    scheduler: RunningScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeats, "TIMEOUT_S", 1.5)
    worker = FakeWorker()
    await worker.start(scheduler.address)
    await scheduler.until_ready()
    worker.has_heartbeats = False
    await scheduler.until(lambda: scheduler.engine.load().counters.num_worker_losses > 0)
    worker.has_heartbeats = True
    monkeypatch.undo()
    await scheduler.until_ready()  # it registers again
    assert await generate(scheduler, "a", [10], 5) == [11, 12, 13, 14, 15]
    await worker.stop()


async def test_a_poisonous_request_fails_alone(scheduler: RunningScheduler, worker: FakeWorker) -> None:
    worker.crash_tokens = {POISON}
    worker.delay_s = 0.002
    sound = [asyncio.create_task(generate(scheduler, str(i), [100 * i], 60)) for i in range(1, 7)]
    await scheduler.until(lambda: scheduler.engine.cores[0].num_steps > 5)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(generate(scheduler, "poison", [1, 2, POISON], 5), 240)
    assert caught.value.code() == grpc.StatusCode.INTERNAL
    assert "crashed its worker 3 times in a row, the last time alone" in (caught.value.details() or "")
    assert worker.num_crashes == 3
    outputs = await asyncio.wait_for(asyncio.gather(*sound), 240)
    assert outputs == [list(range(100 * i + 1, 100 * i + 61)) for i in range(1, 7)]
    core = scheduler.engine.cores[0]
    assert (len(core.scheduler.quarantine), core.scheduler.kv.pool.num_used_blocks) == (0, 0)


async def test_two_poisonous_requests_fail_and_a_long_suspect_is_cleared(
    scheduler: RunningScheduler, worker: FakeWorker
) -> None:
    worker.crash_tokens = {POISON}
    long_prompt = [5] * 150  # three steps of prefill, alone
    tasks = [
        asyncio.create_task(generate(scheduler, "p1", [POISON], 5)),
        asyncio.create_task(generate(scheduler, "p2", [3, POISON], 5)),
        asyncio.create_task(generate(scheduler, "long", long_prompt, 5)),
        asyncio.create_task(generate(scheduler, "short", [40], 20)),
    ]
    first, second, long, short = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 240)
    for failed in (first, second):
        assert isinstance(failed, grpc.aio.AioRpcError)
        assert failed.code() == grpc.StatusCode.INTERNAL
    assert long == [6, 7, 8, 9, 10]
    assert short == list(range(41, 61))


async def test_a_worker_lost_again_and_again_for_other_reasons_fails_nobody(
    scheduler: RunningScheduler, worker: FakeWorker
) -> None:
    worker.delay_s = 0.005
    tasks = [asyncio.create_task(generate(scheduler, str(i), [100 * i], 60)) for i in range(1, 6)]
    for _ in range(4):
        losses = scheduler.engine.load().counters.num_worker_losses
        worker.fail_at_step = 3
        await scheduler.until(lambda before=losses: scheduler.engine.load().counters.num_worker_losses > before)
        await scheduler.until_ready()
    outputs = await asyncio.wait_for(asyncio.gather(*tasks), 240)
    assert outputs == [list(range(100 * i + 1, 100 * i + 61)) for i in range(1, 6)]


async def test_a_bug_that_one_request_meets_fails_it_alone(
    scheduler: RunningScheduler, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = InFlight._append

    def append(self: InFlight, request: Request, token_id: int, result: StepResult) -> None:
        if request.request_id == "cursed":
            raise ZeroDivisionError("a bug")
        original(self, request, token_id, result)

    monkeypatch.setattr(InFlight, "_append", append)
    worker.delay_s = 0.002
    sound = asyncio.create_task(generate(scheduler, "sound", [100], 60))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(generate(scheduler, "cursed", [10], 5), 240)
    assert caught.value.code() == grpc.StatusCode.INTERNAL
    assert await asyncio.wait_for(sound, 240) == list(range(101, 161))


async def test_a_standby_worker_takes_over_at_once() -> None:
    config = EngineConfig(cache=CacheConfig(block_size=4), scheduler=SchedulerConfig(max_serving_groups=1))
    first, second, third = FakeWorker(), FakeWorker(), FakeWorker()
    async with running_scheduler(config) as scheduler:

        async def states() -> list[str]:
            state = await scheduler.stub.GetState(scheduler_pb2.GetStateRequest())
            return [worker.state for worker in state.workers]

        await first.start(scheduler.address)
        await scheduler.until_ready()
        await second.start(scheduler.address)
        async with asyncio.timeout(240):
            while await states() != ["serving", "standby"]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        first.delay_s = 0.005
        outputs = asyncio.gather(*(generate(scheduler, str(i), [100 * i], 60) for i in range(1, 6)))
        await scheduler.until(lambda: scheduler.engine.cores[0].num_steps > 5)
        await first.stop()
        assert await asyncio.wait_for(outputs, 240) == [list(range(100 * i + 1, 100 * i + 61)) for i in range(1, 6)]
        assert await states() == ["serving"]
        await third.start(scheduler.address)
        async with asyncio.timeout(240):
            while sorted(await states()) != ["serving", "standby"]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await second.stop()
        await third.stop()
