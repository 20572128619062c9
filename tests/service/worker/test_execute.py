"""The Execute stream: steps in order, ahead of their answers, repeated, failing."""

import asyncio
import threading

import grpc
import grpc.aio
import numpy as np
import pytest

from pagoda_worker.steps.pending_step import PendingStep
from pagoda_worker.steps.step import StepInput
from tests.service.worker.conftest import PROMPT, Caller, Served, new_request, tokens_of, until
from tests.service.worker.test_lifecycle import fails

pytestmark = pytest.mark.parametrize("served", [False, True], indirect=True, ids=["one by one", "overlapped"])

NUM_STEPS = 12


async def generate_unary(caller: Caller, *requests: object) -> list[list[int]]:
    """NUM_STEPS tokens of each request, one unary call a step."""
    slots = [request.slot for request in requests]  # type: ignore[attr-defined]
    rows = [tokens_of(await caller.execute(caller.prefill(*requests)))]  # type: ignore[arg-type]
    rows += [tokens_of(await caller.execute(caller.request(slots))) for _ in range(NUM_STEPS - 1)]
    return [list(column) for column in zip(*rows, strict=True)]


async def test_two_steps_in_flight_give_the_same_tokens(caller: Caller) -> None:
    expected = await generate_unary(caller, new_request(0), new_request(1, (5, 6, 7)))
    await caller.initialize_cache()
    stream = caller.stub.Execute()
    await stream.write(caller.prefill(new_request(0), new_request(1, (5, 6, 7))))
    await stream.write(caller.request(num_seqs=2))  # the batch of the step before, not known to have a token yet
    outputs = []
    for _ in range(NUM_STEPS - 2):
        outputs.append(await stream.read())
        await stream.write(caller.request(num_seqs=2))
    outputs += [await stream.read(), await stream.read()]
    await stream.done_writing()
    assert await stream.read() == grpc.aio.EOF
    assert await stream.code() == grpc.StatusCode.OK
    assert [output.step for output in outputs] == list(range(1, NUM_STEPS + 1))
    assert [list(column) for column in zip(*map(tokens_of, outputs), strict=True)] == expected
    assert all(output.timings.forward_ns > 0 for output in outputs)


async def test_a_repeated_step_is_answered_from_memory(caller: Caller) -> None:
    requests = [caller.prefill(new_request())] + [caller.request([0]) for _ in range(9)]
    outputs = [await caller.execute(request) for request in requests]
    for request, output in zip(requests[-4:], outputs[-4:], strict=True):
        assert await caller.execute(request) == output
    following = await caller.execute(caller.request([0]))
    assert following.step == 11
    refused = grpc.StatusCode.FAILED_PRECONDITION
    await fails(caller.execute(requests[0]), refused, "step is 1, must be 12")
    caller.step = 12
    await fails(caller.execute(caller.request([0])), refused, "step is 13, must be 12")


async def test_a_stream_may_break_off_and_go_on_where_it_was(caller: Caller) -> None:
    expected = await generate_unary(caller, new_request())
    await caller.initialize_cache()
    broken = caller.stub.Execute()
    sent = [caller.prefill(new_request())] + [caller.request([0]) for _ in range(3)]
    for request in sent[:3]:
        await broken.write(request)
    tokens = tokens_of(await broken.read())
    broken.cancel()
    stream = caller.stub.Execute()
    for request in sent[1:] + [caller.request([0]) for _ in range(NUM_STEPS - 4)]:
        await stream.write(request)
        tokens += tokens_of(await stream.read())
    assert [tokens] == expected


async def test_a_newer_stream_replaces_the_older(caller: Caller) -> None:
    older = caller.stub.Execute()
    await older.write(caller.prefill(new_request()))
    assert (await older.read()).step == 1
    newer = caller.stub.Execute()
    await newer.write(caller.request([0]))
    assert (await newer.read()).step == 2
    await fails(older.read(), grpc.StatusCode.ABORTED)


async def test_what_a_replaced_stream_sends_is_not_taken_on(
    caller: Caller, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, begin = threading.Event(), served.worker.begin

    def slow(step: StepInput) -> PendingStep:
        gate.wait(240)
        return begin(step)

    monkeypatch.setattr(served.worker, "begin", slow)
    older = caller.stub.Execute()
    await older.write(caller.prefill(new_request()))
    await until(lambda: served.servicer.last_step == 1)
    first, newer = served.servicer._stream, caller.stub.Execute()
    await until(lambda: served.servicer._stream is not first)
    await older.write(caller.request([0]))
    last_steps = {(await caller.status()).last_step for _ in range(20)}
    gate.set()
    assert last_steps == {1}
    assert (await older.read()).step == 1
    await fails(older.read(), grpc.StatusCode.ABORTED)
    newer.cancel()


async def test_an_older_scheduler_loses_its_stream(caller: Caller, channel: grpc.aio.Channel) -> None:
    stream = caller.stub.Execute()
    await stream.write(caller.prefill(new_request()))
    await stream.read()
    await Caller(channel, epoch=2).init_device()
    await fails(stream.read(), grpc.StatusCode.ABORTED)


async def test_a_step_out_of_turn_ends_the_stream_after_the_answers_before_it(caller: Caller) -> None:
    stream = caller.stub.Execute()
    await stream.write(caller.prefill(new_request()))
    caller.step = 7
    await stream.write(caller.request([0]))
    assert (await stream.read()).step == 1
    await fails(stream.read(), grpc.StatusCode.FAILED_PRECONDITION, "step is 8, must be 2")


async def test_a_failed_step_is_internal_and_needs_a_new_cache(caller: Caller, served: Served) -> None:
    stream = caller.stub.Execute()
    await stream.write(caller.prefill(new_request()))
    await stream.read()
    unknown_block = {"appended_slots": b"\0\0", "appended_block_ids": np.array([99], "<u4").tobytes()}
    await stream.write(caller.request([0], **unknown_block))
    await fails(stream.read(), grpc.StatusCode.INTERNAL, "block 99 is not below num_blocks (40)")
    await fails(caller.execute(caller.request([0])), grpc.StatusCode.FAILED_PRECONDITION, "an earlier step failed")
    await caller.initialize_cache()
    assert len(tokens_of(await caller.execute(caller.prefill(new_request())))) == 1


async def test_a_failed_step_leaves_the_answers_of_those_before_it(caller: Caller) -> None:
    (expected,) = await generate_unary(caller, new_request())
    await caller.initialize_cache()
    stream = caller.stub.Execute()
    unknown_block = {"appended_slots": b"\0\0", "appended_block_ids": np.array([99], "<u4").tobytes()}
    sent = [caller.prefill(new_request()), *(caller.request(num_seqs=1) for _ in range(2))]
    for request in [*sent, caller.request(num_seqs=1, **unknown_block)]:
        await stream.write(request)
    assert [tokens_of(await stream.read()) for _ in sent] == [[token] for token in expected[:3]]
    await fails(stream.read(), grpc.StatusCode.INTERNAL, "block 99 is not below num_blocks (40)")


async def test_a_cache_may_be_made_anew_while_steps_are_in_flight(caller: Caller) -> None:
    expected = await generate_unary(caller, new_request())
    await caller.initialize_cache()
    stream = caller.stub.Execute()
    for request in [caller.prefill(new_request()), *(caller.request(num_seqs=1) for _ in range(3))]:
        await stream.write(request)
    await caller.initialize_cache()
    assert await generate_unary(caller, new_request()) == expected


@pytest.mark.parametrize(
    ("bad", "fragment"),
    [
        (new_request(1, (5, 4_000_000)), "outside of the vocabulary"),
        (new_request(1, ()), "the prompt is empty"),
        (new_request(1, (5,) * 129), "max_model_len is 128"),
        (new_request(1, (5,), temperature=-1.0), "temperature must be in [0, 2]"),
        (new_request(1, (5,), allowed_token_ids=[3], bad_words_token_ids=[{"ids": [3]}]), "leave no token to sample"),
    ],
)
async def test_a_bad_request_is_a_bad_slot_and_spares_the_batch(caller: Caller, bad: object, fragment: str) -> None:
    expected = await generate_unary(caller, new_request(0), new_request(2))
    await caller.initialize_cache()
    count = max(len(bad.prompt_token_ids) // 4, 1)  # type: ignore[attr-defined]
    requests = [new_request(0), bad, new_request(2)]
    rows = []
    for step in range(NUM_STEPS):
        first = {"new_requests": requests, "counts": [5, count, 5]} if step == 0 else {}
        output = await caller.execute(caller.request([0, 1, 2], **first))
        assert [(slot.slot, slot.code) for slot in output.bad_slots] == [(1, 3)]
        assert fragment in output.bad_slots[0].message
        assert list(output.num_sampled_tokens) == [1, 0, 1]
        rows.append(tokens_of(output))
    assert [list(column) for column in zip(*rows, strict=True)] == expected
    output = await caller.execute(caller.request([0, 1], [1, 5], new_requests=[new_request(1)], freed_slots=b"\1\0"))
    assert not output.bad_slots, "the slot is good for its next owner"


async def test_logprobs_travel_in_columns(caller: Caller) -> None:
    asking = new_request(1, logprobs=2, prompt_logprobs=0)
    output = await caller.execute(caller.prefill(new_request(0), asking))
    columns = output.logprobs
    assert np.frombuffer(columns.rows, "<u4").tolist() == [1]
    assert np.frombuffer(columns.counts, "<u4").tolist() == [3]
    ids, values = np.frombuffer(columns.token_ids, "<u4"), np.frombuffer(columns.logprobs, "<f4")
    assert ids[0] == ids[1] == tokens_of(output)[1]
    assert values[0] == values[1] > values[2]
    assert np.frombuffer(columns.sampled_ranks, "<u4").tolist() == [1]
    (prompt,) = output.prompt_logprobs
    assert (prompt.slot, prompt.start) == (1, 1)
    assert np.frombuffer(prompt.logprobs.token_ids, "<u4").tolist() == list(PROMPT[1:])
    output = await caller.execute(caller.request([0]))
    assert not output.HasField("logprobs")


async def test_logprobs_of_the_whole_vocabulary(caller: Caller) -> None:
    output = await caller.execute(caller.prefill(new_request(0, logprobs=-1)))
    assert np.frombuffer(output.logprobs.counts, "<u4").tolist() == [3073]
    values = np.frombuffer(output.logprobs.logprobs, "<f4")[1:]
    assert np.exp(values.astype(np.float64)).sum() == pytest.approx(1, abs=1e-5)
    assert (np.diff(values) <= 0).all()


async def test_an_empty_step_changes_slots_and_runs_nothing(caller: Caller) -> None:
    output = await caller.execute(caller.request(new_requests=[new_request()]))
    assert (output.step, output.token_ids, output.num_sampled_tokens) == (1, b"", b"")
    output = await caller.execute(caller.request([0], [len(PROMPT)]))
    assert len(tokens_of(output)) == 1
    output = await caller.execute(caller.request(freed_slots=b"\0\0"))
    output = await caller.execute(caller.request([0]))
    assert output.bad_slots[0].message == "slot 0 is empty"


async def test_chunks_of_a_prompt_are_sampled_at_the_end_only(caller: Caller) -> None:
    whole = tokens_of(await caller.execute(caller.prefill(new_request())))
    await caller.initialize_cache()
    output = await caller.execute(caller.request([0], [2], new_requests=[new_request()]))
    assert (list(output.num_sampled_tokens), tokens_of(output)) == ([0], [])
    output = await caller.execute(caller.request([0], [3]))
    assert tokens_of(output) == whole


async def test_blocks_are_swapped_out_in_and_copied(caller: Caller) -> None:
    expected = await generate_unary(caller, new_request())
    await caller.initialize_cache()
    tokens = tokens_of(await caller.execute(caller.prefill(new_request())))
    swap_out, swap_in, copy = (np.array(pair, "<u4").tobytes() for pair in ((0, 2), (2, 30), (30, 8)))
    await caller.execute(caller.request(blocks_to_swap_out=swap_out, freed_slots=b"\0\0"))
    await caller.execute(caller.request(blocks_to_swap_in=swap_in))
    back = new_request(2)  # owns blocks 8 to 11
    back.output_token_ids = np.array(tokens, "<u4").tobytes()
    back.num_computed_tokens = len(PROMPT)
    output = await caller.execute(caller.request([2], [1], blocks_to_copy=copy, new_requests=[back]))
    tokens += tokens_of(output)
    for _ in range(NUM_STEPS - 2):
        tokens += tokens_of(await caller.execute(caller.request([2])))
    assert [tokens] == expected


async def test_malformed_columns_are_refused(caller: Caller) -> None:
    await fails(
        caller.execute(caller.request(freed_slots=b"\0")), grpc.StatusCode.INVALID_ARGUMENT, "freed_slots has 1 bytes"
    )


async def test_many_steps_sent_at_once_are_answered_in_order(caller: Caller) -> None:
    stream = caller.stub.Execute()
    requests = [caller.prefill(new_request())] + [caller.request([0]) for _ in range(30)]

    async def send() -> None:
        for request in requests:
            await stream.write(request)
        await stream.done_writing()

    sending = asyncio.create_task(send())
    assert [output.step async for output in stream] == list(range(1, 32))
    await sending
