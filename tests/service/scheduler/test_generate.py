"""Scheduler.Generate and Session over real sockets, with a fake worker."""

import asyncio

import grpc
import numpy as np
import pytest

from pagoda.v1 import scheduler_pb2, types_pb2
from tests.fakes.fake_worker import FakeWorker
from tests.harness.scheduler import RunningScheduler


def submit(name: str, prompt: list[int], *, max_tokens: int = 5, **fields: object) -> scheduler_pb2.SubmitRequest:
    params = types_pb2.SamplingParams(max_tokens=max_tokens, **fields.pop("params", {}))  # type: ignore[arg-type]
    column = np.array(prompt, dtype="<u4").tobytes()
    return scheduler_pb2.SubmitRequest(
        request_id=name,
        prompt_token_ids=column,
        sampling_params=params,
        **fields,  # type: ignore[arg-type]
    )


async def collect(scheduler: RunningScheduler, request: scheduler_pb2.SubmitRequest) -> list[int]:
    tokens: list[int] = []
    async for output in scheduler.stub.Generate(request):
        if output.token_ids:
            assert output.offset == len(tokens)
        tokens += output.token_ids
    return tokens


@pytest.fixture
async def worker(scheduler: RunningScheduler):  # type: ignore[no-untyped-def]
    worker = FakeWorker(eos_token_ids=(777,))
    await worker.start(scheduler.address)
    await scheduler.until_ready()
    yield worker
    await worker.stop()


async def test_a_request_streams_its_tokens_in_order(scheduler: RunningScheduler, worker: FakeWorker) -> None:
    assert await collect(scheduler, submit("a", [10, 11, 12])) == [13, 14, 15, 16, 17]
    assert scheduler.engine.requests == {}


async def test_many_requests_at_once_each_get_their_own_tokens(scheduler: RunningScheduler, worker: FakeWorker) -> None:
    prompts = [[100 * i, 100 * i + 1] for i in range(1, 30)]
    outputs = await asyncio.gather(*(collect(scheduler, submit(str(p), p, max_tokens=20)) for p in prompts))
    assert outputs == [list(range(p[-1] + 1, p[-1] + 21)) for p in prompts]
    assert scheduler.engine.load().num_used_blocks == 0


async def test_an_end_token_ends_the_stream(scheduler: RunningScheduler, worker: FakeWorker) -> None:
    assert await collect(scheduler, submit("a", [774], max_tokens=50)) == [775, 776, 777]
    params = {"ignore_eos": True}
    assert len(await collect(scheduler, submit("b", [774], max_tokens=50, params=params))) == 50


async def test_n_sequences_end_one_by_one(scheduler: RunningScheduler, worker: FakeWorker) -> None:
    finished = {}
    async for output in scheduler.stub.Generate(submit("a", [10], params={"n": 3})):
        if output.finish_reason:
            finished[output.index] = output.finish_reason
    assert finished == dict.fromkeys(range(3), types_pb2.FINISH_REASON_LENGTH)


async def test_a_cancelled_stream_frees_its_blocks(scheduler: RunningScheduler, worker: FakeWorker) -> None:
    call = scheduler.stub.Generate(submit("a", [10], max_tokens=4000))
    await call.read()
    assert scheduler.engine.load().num_used_blocks > 0
    call.cancel()
    await scheduler.until(lambda: scheduler.engine.load().num_used_blocks == 0)


async def test_an_abort_ends_the_stream_with_that_reason(scheduler: RunningScheduler, worker: FakeWorker) -> None:
    call = aiter(scheduler.stub.Generate(submit("a", [10], max_tokens=4000)))
    await anext(call)
    await scheduler.stub.Abort(scheduler_pb2.AbortRequest(request_ids=["a", "unknown"]))
    *_, last = [output async for output in call]
    assert last.finish_reason == types_pb2.FINISH_REASON_ABORT


async def test_a_deadline_ends_the_request(scheduler: RunningScheduler, worker: FakeWorker) -> None:
    worker.delay_s = 0.01
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(scheduler, submit("a", [10], max_tokens=4000, timeout_s=0.2))
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert scheduler.engine.load().num_used_blocks == 0


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (submit("a", []), "prompt_token_ids"),
        (submit("a", [2_000_000]), "prompt_token_ids"),
        (submit("a", [1] * 5000), "prompt_token_ids"),
        (submit("a", [1], max_tokens=0), "max_tokens"),
        (submit("a", [1], params={"temperature": -1.0}), "temperature"),
        (submit("a", [1], params={"top_p": float("nan")}), "top_p"),
        (submit("a", [1], params={"logprobs": 21}), "logprobs"),
        (scheduler_pb2.SubmitRequest(request_id="a", prompt_token_ids=b"abc"), "prompt_token_ids"),
    ],
)
async def test_a_bad_request_is_refused_by_the_fields_name(
    scheduler: RunningScheduler, worker: FakeWorker, request_: scheduler_pb2.SubmitRequest, field: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(scheduler, request_)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    details = dict(caught.value.trailing_metadata() or ())
    assert field.encode() in details["grpc-status-details-bin"]
    assert await collect(scheduler, submit("b", [1])) == [2, 3, 4, 5, 6]


async def test_a_bad_slot_fails_one_request_only(scheduler: RunningScheduler, worker: FakeWorker) -> None:
    worker.bad_tokens.add(500)
    good = asyncio.create_task(collect(scheduler, submit("good", [10], max_tokens=100)))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(scheduler, submit("bad", [495], max_tokens=100))
    assert caught.value.details() == "logits are not finite"
    assert len(await good) == 100


async def test_a_decode_step_carries_no_prompt_and_few_bytes(scheduler: RunningScheduler, worker: FakeWorker) -> None:
    worker.keep_requests = True
    await asyncio.gather(*(collect(scheduler, submit(str(i), [i * 50], max_tokens=40)) for i in range(8)))
    steps = [step for step in worker.requests if step.num_seqs == 8 and not step.new_requests]
    assert steps
    assert max(step.ByteSize() for step in steps) < 100


async def test_requests_survive_the_loss_of_their_worker(scheduler: RunningScheduler, worker: FakeWorker) -> None:
    worker.delay_s = 0.005
    prompts = [[1000 * i] for i in range(1, 13)]
    streams = [asyncio.create_task(collect(scheduler, submit(str(p), p, max_tokens=60))) for p in prompts]
    await scheduler.until(lambda: scheduler.engine.load().counters.num_steps > 20)
    await worker.stop()
    await scheduler.until(lambda: not scheduler.engine.is_ready)
    successor = FakeWorker()
    await successor.start(scheduler.address)
    assert await asyncio.gather(*streams) == [list(range(p[0] + 1, p[0] + 61)) for p in prompts]
    assert scheduler.engine.load().counters.num_worker_losses == 1
    await successor.stop()


async def test_a_failed_forward_pass_is_recomputed_on_the_same_worker(
    scheduler: RunningScheduler, worker: FakeWorker
) -> None:
    worker.fail_at_step = 10
    assert await collect(scheduler, submit("a", [10], max_tokens=30)) == list(range(11, 41))
    assert worker.num_loads == 2


async def test_a_stub_is_told_that_no_worker_is_there(scheduler: RunningScheduler) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(scheduler, submit("a", [10]))
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert "no worker has registered yet" in (caught.value.details() or "")


async def test_two_groups_share_the_requests_and_one_may_leave(scheduler: RunningScheduler, worker: FakeWorker) -> None:
    second = FakeWorker()
    await second.start(scheduler.address)
    await scheduler.until(lambda: len(scheduler.engine.cores) == 2)
    worker.delay_s = second.delay_s = 0.005
    streams = [asyncio.create_task(collect(scheduler, submit(str(i), [1000 * i], max_tokens=50))) for i in range(1, 9)]
    await scheduler.until(lambda: all(core.num_steps > 10 for core in scheduler.engine.cores))
    await second.stop()
    outputs = await asyncio.gather(*streams)
    assert outputs == [list(range(1000 * i + 1, 1000 * i + 51)) for i in range(1, 9)]
