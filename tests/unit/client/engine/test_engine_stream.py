"""A sequence takes exactly its next offset, drops what it has, and reports a gap."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagoda_common.engine.session import SessionSlots
from pagoda_common.engine.stream import EngineRequest, EngineStream
from pagoda_common.errors import DeadlineExceeded, NotReady, RequestFailed
from pagoda_common.params.sampling_params import SamplingParams


def make_stream(**params: object) -> tuple[EngineStream, list[object]]:
    told: list[object] = []
    request = EngineRequest(request_id="a", prompt_token_ids=[1], sampling_params=SamplingParams(**params))
    stream = EngineStream(
        request=request,
        on_stop=lambda _, index: told.append(index),
        on_abort=lambda _: told.append("abort"),
    )
    return stream, told


@given(pieces=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 5)), max_size=30))
def test_whatever_arrives_the_log_is_a_prefix_without_holes(pieces: list[tuple[int, int]]) -> None:
    stream, _ = make_stream()
    log = stream.sequences[0]
    for offset, count in pieces:
        known = len(log.token_ids)
        is_complete = log.extend(offset, list(range(offset, offset + count)))
        assert is_complete == (offset <= known)
        assert log.token_ids == list(range(len(log.token_ids)))
        assert len(log.token_ids) == max(known, offset + count if offset <= known else 0)


async def test_what_waits_is_given_out_together() -> None:
    stream, _ = make_stream(n=2)
    stream.sequences[1].extend(0, [5])
    stream.sequences[1].extend(1, [6, 7])
    stream.sequences[0].extend(0, [8])
    outputs = await stream.get()
    assert [(output.index, output.offset, output.token_ids) for output in outputs] == [(1, 0, [5, 6, 7]), (0, 0, [8])]
    stream.sequences[0].finish("length")
    (end,) = await stream.get()
    assert (end.index, end.offset, end.token_ids, end.finish_reason) == (0, 1, [], "length")
    assert not stream.is_finished


async def test_a_waiting_consumer_wakes_once_per_round() -> None:
    stream, _ = make_stream()
    waiting = asyncio.create_task(stream.get())
    await asyncio.sleep(0)
    stream.sequences[0].extend(0, [5])
    stream.sequences[0].extend(1, [6])
    assert (await waiting)[0].token_ids == [5, 6]


async def test_a_cancelled_consumer_loses_nothing() -> None:
    stream, _ = make_stream()
    waiting = asyncio.create_task(stream.get())
    await asyncio.sleep(0)
    stream.sequences[0].extend(0, [5])
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert (await stream.get())[0].token_ids == [5]


async def test_a_stopped_sequence_gives_nothing_more() -> None:
    stream, told = make_stream(n=2)
    stream.stop(1)
    stream.stop(1)
    stream.sequences[1].extend(0, [5])
    stream.sequences[0].extend(0, [6])
    assert [output.index for output in await stream.get()] == [0]
    assert told == [1]
    stream.sequences[0].finish("stop")
    await stream.get()
    assert stream.is_finished
    assert await stream.get() == []


async def test_news_comes_before_the_failure() -> None:
    stream, told = make_stream()
    stream.sequences[0].extend(0, [5])
    stream.fail(NotReady("gone"))
    assert (await stream.get())[0].token_ids == [5]
    with pytest.raises(NotReady):
        await stream.get()
    stream.abort()
    assert told == []


def test_gaps_without_progress_are_given_up() -> None:
    stream, _ = make_stream()
    assert [stream.count_resubmit() for _ in range(9)] == [True] * 8 + [False]
    stream.sequences[0].extend(0, [5])
    assert stream.count_resubmit()


def test_a_slot_is_free_again_after_its_end_was_reported() -> None:
    stream, _ = make_stream(n=3)
    first, second, third = stream.sequences
    slots = SessionSlots()
    assert [slots.add(first), slots.add(second)] == [0, 1]
    slots.retire([0])
    assert slots.get(0) is None
    assert slots.add(third) == 2
    slots.release(0)
    assert slots.add(first) == 0
    assert slots.get(0) is first
    assert slots.get(99) is None


def test_of_free_slots_the_one_that_ended_first_is_given_first() -> None:
    stream, _ = make_stream(n=3)
    slots = SessionSlots()
    for sequence in stream.sequences:
        slots.add(sequence)
    for slot in (2, 0, 1):
        slots.release(slot)
    assert [slots.add(sequence) for sequence in stream.sequences] == [2, 0, 1]


async def test_what_was_waiting_is_delivered_before_the_deadline_is_raised() -> None:
    stream, told = make_stream()
    stream.request.timeout_s = 3
    stream.sequences[0].extend(0, [7])
    stream.expire()
    stream.expire()
    [output] = await stream.get()
    assert output.token_ids == [7]
    with pytest.raises(DeadlineExceeded, match="within 3 s"):
        await stream.get()
    assert told == ["abort"]


async def test_a_failure_while_the_consumer_is_busy_is_raised_when_it_comes_back() -> None:
    stream, _ = make_stream()
    stream.sequences[0].extend(0, [5])
    assert await stream.get()
    stream.fail(NotReady("lost"))
    assert not stream.is_finished  # code that looks at that alone would take it for the end
    with pytest.raises(NotReady):
        await stream.get()
    assert stream.is_finished


async def test_a_patient_consumer_wakes_for_the_first_token_for_so_many_and_for_the_end() -> None:
    stream, _ = make_stream()
    log = stream.sequences[0]

    async def outputs_of(num_tokens: int) -> list[int]:
        waiting = asyncio.create_task(stream.get(at_least=3))
        for place in range(num_tokens):
            await asyncio.sleep(0)
            assert not waiting.done()
            log.extend(len(log.token_ids), [place])
        return (await waiting)[0].token_ids

    assert await outputs_of(1) == [0]
    assert await outputs_of(3) == [0, 1, 2]
    ending = asyncio.create_task(stream.get(at_least=3))
    await asyncio.sleep(0)
    log.extend(4, [7])
    log.finish("length")
    (end,) = await ending
    assert (end.token_ids, end.finish_reason) == ([7], "length")


async def test_an_error_comes_after_the_tokens_that_waited_with_it() -> None:
    stream, _ = make_stream()
    stream.sequences[0].extend(0, [5, 6])
    stream.sequences[0].finish("error", error=RequestFailed("lost"))
    (news,) = await stream.get()
    assert (news.token_ids, news.finish_reason, news.error) == ([5, 6], None, None)
    assert not stream.is_finished
    (end,) = await stream.get()
    assert (end.offset, end.token_ids, end.finish_reason) == (2, [], "error")
    assert end.error is not None
    assert stream.is_finished
