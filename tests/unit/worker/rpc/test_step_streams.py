"""Streams of steps of WorkerServicer: order, takeovers, and steps that never end."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from pagoda.v1 import worker_pb2
from pagoda_common.errors import StaleEpoch, Superseded
from pagoda_worker.rpc import servicer as module
from tests.unit.worker.rpc.served_worker import CALL, Served, init_request


async def test_a_stream_answers_in_order_and_ends_with_its_requests(served: Served) -> None:
    async def requests() -> AsyncIterator[worker_pb2.ExecuteModelRequest]:
        for number in range(1, 7):
            yield served.step(number, number)

    answers = [answer async for answer in served.servicer.Execute(requests(), CALL)]
    assert [(answer.step, np.frombuffer(answer.token_ids, "<u4").tolist()) for answer in answers] == [
        (number, [number]) for number in range(1, 7)
    ]


async def test_a_step_out_of_turn_ends_its_stream_after_the_answers_before_it(served: Served) -> None:
    async def requests() -> AsyncIterator[worker_pb2.ExecuteModelRequest]:
        yield served.step(1)
        yield served.step(3)

    stream = aiter(served.servicer.Execute(requests(), CALL))
    assert (await anext(stream)).step == 1
    with pytest.raises(StaleEpoch, match="step is 3, must be 2"):
        await anext(stream)


async def test_a_newer_stream_takes_over(served: Served) -> None:
    gate = asyncio.Event()

    async def requests() -> AsyncIterator[worker_pb2.ExecuteModelRequest]:
        await gate.wait()
        yield served.step(1)

    async def more() -> AsyncIterator[worker_pb2.ExecuteModelRequest]:
        yield served.step(1, 4)

    older = asyncio.ensure_future(anext(aiter(served.servicer.Execute(requests(), CALL))))
    await asyncio.sleep(0)
    newer = [answer async for answer in served.servicer.Execute(more(), CALL)]
    gate.set()
    with pytest.raises(Superseded, match="a newer Execute stream took over"):
        await older
    assert [answer.step for answer in newer] == [1]
    assert served.core.asked == [("expect", 4)]


async def test_a_step_that_never_ends_is_told_to_the_supervisor(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (module.STUCK_AFTER_S, module.EXIT_STUCK) == (10.0, 70)
    monkeypatch.setattr(module, "STUCK_AFTER_S", 0.02)
    served.core.gate.clear()
    step = asyncio.ensure_future(served.servicer.ExecuteModel(served.step(1), CALL))
    while not served.servicer._pipeline.is_running:  # noqa: ASYNC110 (the model thread says nothing)
        await asyncio.sleep(0.001)
    again = asyncio.ensure_future(served.servicer.InitDevice(init_request(6), CALL))
    while not served.stuck:  # noqa: ASYNC110 (a plain call sets it)
        await asyncio.sleep(0.001)
    assert served.stuck == ["stuck"]
    served.core.gate.set()
    await again
    await step
    assert served.core.asked[-1][0] == "init_device"


async def test_a_step_that_never_ends_keeps_no_worker_from_saying_so_when_it_is_put_to_sleep(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STUCK_AFTER_S", 0.02)
    served.core.gate.clear()
    step = asyncio.ensure_future(served.servicer.ExecuteModel(served.step(1), CALL))
    while not served.servicer._pipeline.is_running:  # noqa: ASYNC110 (the model thread says nothing)
        await asyncio.sleep(0.001)
    request = worker_pb2.WorkerSleepRequest(**served.ids, level=1)
    slept = asyncio.ensure_future(served.servicer.Sleep(request, CALL))
    async with asyncio.timeout(240):
        while not served.stuck:  # noqa: ASYNC110 (a plain call sets it)
            await asyncio.sleep(0.001)
    assert served.serving == [False]
    served.core.gate.set()
    await slept
    await step
    assert served.core.asked[-1] == ("sleep", 1)


async def test_a_stream_reads_no_more_steps_than_it_may_accept_ahead(served: Served) -> None:
    taken: list[int] = []

    async def requests() -> AsyncIterator[worker_pb2.ExecuteModelRequest]:
        for number in range(1, 8):
            taken.append(number)
            yield served.step(number)

    served.core.gate.clear()
    stream = aiter(served.servicer.Execute(requests(), CALL))
    first = asyncio.ensure_future(anext(stream))
    for _ in range(50):
        await asyncio.sleep(0)
    assert taken == [1, 2, 3, 4]
    served.core.gate.set()
    answers = [await first] + [answer async for answer in stream]
    assert [answer.step for answer in answers] == taken == list(range(1, 8))


async def test_who_hangs_up_is_no_longer_read_from(served: Served) -> None:
    ended: list[str] = []

    async def requests() -> AsyncIterator[worker_pb2.ExecuteModelRequest]:
        try:
            yield served.step(1)
            await asyncio.Event().wait()
        finally:
            ended.append("requests")

    stream: Any = aiter(served.servicer.Execute(requests(), CALL))
    await anext(stream)
    await stream.aclose()
    for _ in range(10):
        await asyncio.sleep(0)
    assert ended == ["requests"]


async def test_an_answer_that_cannot_be_written_fails_its_step(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise ValueError("no such column")

    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    with monkeypatch.context() as patch:
        patch.setattr(module, "step_output_to_proto", fail)
        with pytest.raises(ValueError, match="no such column"):
            await asyncio.wait_for(served.servicer.ExecuteModel(served.step(1), CALL), 60)
    assert served.observed == []
