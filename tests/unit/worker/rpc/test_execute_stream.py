"""ExecuteStream and StepAnswer: order, end, failure, the window, and answers that several streams wait for."""

import asyncio

import pytest

from pagoda.v1 import worker_pb2
from pagoda_common.errors import Superseded
from pagoda_worker.rpc.execute_stream import ExecuteStream, StepAnswer
from pagoda_worker.rpc.fence import MAX_STEPS_AHEAD


def output(step: int) -> worker_pb2.SamplerOutput:
    return worker_pb2.SamplerOutput(step=step)


async def turn() -> None:
    """Let everybody run who can."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_answers_leave_in_the_order_of_their_steps() -> None:
    stream, first, second = ExecuteStream(), StepAnswer(), StepAnswer()
    stream.put(first)
    stream.put(second)
    second.give(output(2))
    writer = asyncio.create_task(stream.next())
    await turn()
    assert not writer.done()
    first.give(output(1))
    assert await writer == output(1)
    assert await stream.next() == output(2)


async def test_the_end_comes_after_what_is_on_its_way() -> None:
    stream, answer = ExecuteStream(), StepAnswer()
    stream.put(answer)
    stream.end()
    writer = asyncio.create_task(stream.next())
    await turn()
    assert not writer.done()
    answer.give(output(1))
    assert await writer == output(1)
    assert await stream.next() is None


async def test_the_end_wakes_a_writer_that_has_nothing_to_write() -> None:
    stream = ExecuteStream()
    writer = asyncio.create_task(stream.next())
    await turn()
    stream.end()
    assert await writer is None


async def test_an_error_comes_after_what_is_on_its_way() -> None:
    stream, answer = ExecuteStream(), StepAnswer()
    stream.put(answer)
    stream.end(Superseded("by another"))
    answer.give(output(1))
    assert await stream.next() == output(1)
    with pytest.raises(Superseded):
        await stream.next()


async def test_a_failed_step_fails_the_stream() -> None:
    stream, answer = ExecuteStream(), StepAnswer()
    stream.put(answer)
    writer = asyncio.create_task(stream.next())
    await turn()
    answer.fail(ValueError("broken"))
    with pytest.raises(ValueError, match="broken"):
        await writer


async def test_a_step_waits_until_the_answer_of_an_earlier_one_is_written() -> None:
    stream = ExecuteStream()
    for step in range(1, MAX_STEPS_AHEAD + 1):
        await stream.has_room()
        answer = StepAnswer()
        stream.put(answer)
        answer.give(output(step))
    reader = asyncio.create_task(stream.has_room())
    assert await stream.next() == output(1)
    await turn()
    assert not reader.done()  # taken, but on its way
    assert await stream.next() == output(2)
    await asyncio.wait_for(reader, timeout=240)


async def test_two_streams_wait_for_one_answer() -> None:
    old, new, answer = ExecuteStream(), ExecuteStream(), StepAnswer()
    old.put(answer)
    new.put(answer)
    gone, writer = asyncio.create_task(old.next()), asyncio.create_task(new.next())
    await turn()
    gone.cancel()
    await turn()
    answer.give(output(1))
    assert await writer == output(1)
    assert answer.result() == output(1)


async def test_a_listener_that_comes_late_is_called_at_once() -> None:
    answer, heard = StepAnswer(), []
    answer.give(output(1))
    answer.when_there(lambda: heard.append("now"))
    assert heard == ["now"]
