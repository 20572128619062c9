"""Constraints over the wire: compiled ahead of steps by workers that can, for each life of a worker again."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from pagoda.v1 import scheduler_pb2, types_pb2
from pagoda_common.engine.convert import token_ids_to_bytes
from pagoda_common.params.structured_outputs import HOLD_CAPABILITY
from tests.fakes.fake_worker import FakeWorker
from tests.harness.scheduler import RunningScheduler


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(240):
        while not condition():  # noqa: ASYNC110 (conditions are of any kind)
            await asyncio.sleep(0.01)


def submit(name: str, prompt: list[int], max_tokens: int, *, regex: str = "", n: int = 1) -> Any:
    params = types_pb2.SamplingParams(temperature=1, max_tokens=max_tokens, ignore_eos=True, n=n)
    if regex:
        params.structured_output.regex = regex
    return scheduler_pb2.SubmitRequest(
        request_id=name, prompt_token_ids=token_ids_to_bytes(prompt), sampling_params=params
    )


async def generate(scheduler: RunningScheduler, request: Any) -> dict[int, list[int]]:
    """Output tokens of each sequence, whose offsets leave no gap."""
    tokens: dict[int, list[int]] = {}
    async for output in scheduler.stub.Generate(request, timeout=240):
        mine = tokens.setdefault(output.index, [])
        if output.token_ids:
            assert output.offset == len(mine)
            mine += output.token_ids
    return tokens


async def test_a_stream_goes_on_while_the_constraint_of_another_is_compiled(scheduler: RunningScheduler) -> None:
    worker = FakeWorker(capabilities=(HOLD_CAPABILITY,))
    await worker.start(scheduler.address)
    await scheduler.until_ready()
    worker.compiles.clear()
    slow = asyncio.create_task(generate(scheduler, submit("slow", [100], 5, regex="slow", n=3)))
    await until(lambda: worker.asked_regexes == ["slow"])
    assert await generate(scheduler, submit("victim", [7], 200)) == {0: list(range(8, 208))}
    assert not slow.done()
    worker.compiles.set()
    assert await slow == {index: list(range(101, 106)) for index in range(3)}
    assert worker.held_regexes == {"slow"}
    assert await generate(scheduler, submit("next", [50], 3, regex="slow")) == {0: [51, 52, 53]}
    assert worker.asked_regexes == ["slow"]
    await worker.stop()


async def test_a_constraint_that_cannot_be_compiled_fails_its_request_alone(scheduler: RunningScheduler) -> None:
    worker = FakeWorker(capabilities=(HOLD_CAPABILITY,))
    worker.bad_regexes.add("bad")
    await worker.start(scheduler.address)
    await scheduler.until_ready()
    other = asyncio.create_task(generate(scheduler, submit("other", [7], 100)))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(scheduler, submit("bad", [100], 5, regex="bad", n=2))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "bad is bad" in (caught.value.details() or "")
    assert await other == {0: list(range(8, 108))}
    assert scheduler.engine.load().num_used_blocks == 0
    await worker.stop()


async def test_a_worker_without_the_capability_is_never_asked(scheduler: RunningScheduler) -> None:
    worker = FakeWorker()
    await worker.start(scheduler.address)
    await scheduler.until_ready()
    assert await generate(scheduler, submit("r", [5], 12, regex="r")) == {0: list(range(6, 18))}
    assert worker.asked_regexes == []
    await worker.stop()


async def test_a_lost_worker_is_followed_by_one_that_compiles_again(scheduler: RunningScheduler) -> None:
    first, second = (FakeWorker(capabilities=(HOLD_CAPABILITY,)) for _ in range(2))
    await first.start(scheduler.address)
    await scheduler.until_ready()
    first.delay_s = 0.02
    running = asyncio.create_task(generate(scheduler, submit("running", [5], 60, regex="known")))
    await until(lambda: first.held_regexes == {"known"})
    first.compiles.clear()
    waiting = asyncio.create_task(generate(scheduler, submit("waiting", [500], 10, regex="new")))
    await until(lambda: "new" in first.asked_regexes)
    await first.stop()
    await second.start(scheduler.address)
    assert await running == {0: list(range(6, 66))}
    assert await waiting == {0: list(range(501, 511))}
    assert sorted(second.asked_regexes) == ["known", "new"]
    await second.stop()
