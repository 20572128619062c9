"""What a session makes of each message: several slots at once, ends, gaps, rejections; and what it sends."""

import asyncio
from array import array
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from pagoda.v1 import scheduler_pb2, types_pb2
from pagoda_common.engine.convert import error_to_proto, sampling_params_to_proto
from pagoda_common.engine.generation import _cut
from pagoda_common.engine.session import MAX_BATCH_BYTES, EngineSession
from pagoda_common.engine.stream import EngineRequest, EngineStream, Known
from pagoda_common.errors import Code, DeadlineExceeded, InvalidRequest, NotReady
from pagoda_common.params.beam_search import BeamSearchParams
from pagoda_common.params.lora_adapter import LoraAdapter
from pagoda_common.params.outputs import EngineOutput, HypothesisLogprobs, TokenLogprobs
from pagoda_common.params.pooling_params import PoolingParams
from pagoda_common.params.sampling_params import SamplingParams


def column(*values: int) -> bytes:
    return np.array(values, dtype="<u4").tobytes()


class Harness:
    """A session that has said hello and writes to no one."""

    def __init__(self) -> None:
        self.streams: dict[str, EngineStream] = {}
        self.states: list[Any] = []
        self.session = EngineSession(
            stub=cast("Any", None),
            frontend_id="f",
            streams=self.streams,
            on_open=lambda _: None,
            on_state=self.states.append,
        )

    def open(self, name: str, *, pooling: PoolingParams | None = None, **params: Any) -> EngineStream:
        request = EngineRequest(
            request_id=name, prompt_token_ids=[1, 2, 3], sampling_params=SamplingParams(**params), pooling=pooling
        )
        stream = self.streams[name] = EngineStream(request=request, on_stop=lambda *_: None, on_abort=lambda *_: None)
        self.session.submit(stream)
        return stream

    def receive(self, **fields: Any) -> None:
        self.session._receive(scheduler_pb2.SchedulerMessage(session_epoch=1, **fields))

    def sent(self) -> list[scheduler_pb2.FrontendMessage]:
        found = list(self.session._outbox)
        self.session._outbox.clear()
        return found


@pytest.fixture
def harness() -> Harness:
    return Harness()


def finished(slot: int, num_tokens: int = 0, reason: int = types_pb2.FINISH_REASON_STOP, **more: Any) -> Any:
    return scheduler_pb2.FinishedSequence(slot=slot, finish_reason=reason, num_output_tokens=num_tokens, **more)


def test_one_token_of_each_slot_goes_to_its_sequence(harness: Harness) -> None:
    first, second = harness.open("a", n=2), harness.open("b")
    harness.receive(slots=column(2, 0, 1), offsets=column(0, 0, 0), token_ids=column(7, 8, 9))
    harness.receive(slots=column(0, 2), offsets=column(1, 1), token_ids=column(10, 11))
    assert [log.token_ids for log in (*first.sequences, *second.sequences)] == [[8, 10], [9], [7, 11]]


def test_several_tokens_of_several_slots_are_counted_off(harness: Harness) -> None:
    first, second = harness.open("a", logprobs=0), harness.open("b")
    logprobs = types_pb2.LogprobColumns(
        rows=column(2, 3),
        counts=column(2, 1),
        sampled_ranks=column(4, 1),
        token_ids=column(8, 5, 9),
        logprobs=np.array([-2.0, -0.5, -1.0], dtype="<f4").tobytes(),
    )
    harness.receive(
        slots=column(1, 0), offsets=column(0, 0), counts=bytes([2, 2]), token_ids=column(6, 7, 8, 9), logprobs=logprobs
    )
    assert second.sequences[0].token_ids == [6, 7]
    log = first.sequences[0]
    assert log.token_ids == [8, 9]
    assert log.logprobs == [
        TokenLogprobs(array("I", [8, 5]), array("f", [-2.0, -0.5]), 4),
        TokenLogprobs(array("I", [9]), array("f", [-1.0]), 1),
    ]


def test_tokens_of_slots_that_nobody_has_are_dropped(harness: Harness) -> None:
    stream = harness.open("a")
    harness.receive(slots=column(9, 0), offsets=column(0, 0), token_ids=column(5, 6))
    harness.receive(slots=column(9, 0), offsets=column(0, 1), counts=bytes([2, 1]), token_ids=column(5, 5, 7))
    assert stream.sequences[0].token_ids == [6, 7]
    assert len(harness.sent()) == 1, "no gap"


def test_a_finished_sequence_takes_no_token(harness: Harness) -> None:
    log = harness.open("a").sequences[0]
    log.finish("stop")
    harness.receive(slots=column(0), offsets=column(0), token_ids=column(5))
    assert log.token_ids == []
    stopped = harness.open("b").sequences[0]
    stopped.is_closed = True
    harness.receive(slots=column(1), offsets=column(0), token_ids=column(5))
    assert stopped.token_ids == []


def test_prompt_log_probabilities_come_in_parts_and_beyond_256_tokens(harness: Harness) -> None:
    request = EngineRequest(
        request_id="a", prompt_token_ids=[5] * 300, sampling_params=SamplingParams(prompt_logprobs=0)
    )
    stream = harness.streams["a"] = EngineStream(request=request, on_stop=lambda *_: None, on_abort=lambda *_: None)
    harness.session.submit(stream)
    for start, num_rows in ((1, 255), (256, 50)):  # the last six are beyond the prompt
        columns = types_pb2.LogprobColumns(
            rows=column(*range(num_rows)),
            counts=column(*[1] * num_rows),
            sampled_ranks=column(*[1] * num_rows),
            token_ids=column(*range(start, start + num_rows)),
            logprobs=np.full(num_rows, -1.0, dtype="<f4").tobytes(),
        )
        harness.receive(prompt_logprobs=[scheduler_pb2.SessionPromptLogprobs(slot=0, start=start, logprobs=columns)])
    assert stream.prompt_logprobs is not None
    assert len(stream.prompt_logprobs) == 300
    assert stream.prompt_logprobs[0] is None
    assert [entry and entry.token_ids[0] for entry in stream.prompt_logprobs[1:]] == list(range(1, 300))


def test_the_first_admission_stands(harness: Harness) -> None:
    log = harness.open("a").sequences[0]
    for cached, queue_ns in ((2, 1_500_000_000), (9, 7)):
        admitted = scheduler_pb2.AdmittedSequence(slot=0, num_cached_tokens=cached, queue_ns=queue_ns)
        harness.receive(admitted=[admitted])
    assert (log.num_cached_tokens, log.queue_s) == (2, 1.5)


def test_an_end_frees_the_slot_and_the_last_one_closes_the_request(harness: Harness) -> None:
    stream = harness.open("a", n=2)
    harness.receive(slots=column(0, 1), offsets=column(0, 0), token_ids=column(5, 6))
    harness.receive(finished=[finished(0, 1, stop_token_id=5, num_preemptions=3)])
    first, second = stream.sequences
    assert (first.finish_reason, first.stop_token_id, first.num_preemptions) == ("stop", 5, 3)
    assert "a" in harness.streams
    harness.receive(finished=[finished(1, 1, types_pb2.FINISH_REASON_LENGTH)])
    assert (second.finish_reason, second.stop_token_id) == ("length", None)
    assert "a" not in harness.streams
    harness.sent()
    harness.open("b", n=3)
    assert sorted(harness.sent()[0].submit.slots) == [0, 1, 2]


def test_an_end_that_knows_of_more_tokens_is_a_gap(harness: Harness) -> None:
    stream = harness.open("a")
    harness.sent()
    harness.receive(finished=[finished(0, 1)])
    assert stream.sequences[0].finish_reason is None
    (again,) = harness.sent()
    assert (again.submit.attempt, again.submit.request_id) == (2, "a")
    error = error_to_proto(InvalidRequest("wrong", field="x"))
    harness.receive(finished=[finished(again.submit.slots[0], 9, types_pb2.FINISH_REASON_ERROR, error=error)])
    log = stream.sequences[0]
    assert log.finish_reason == "error"
    assert log.error is not None
    assert (log.error.code, log.error.message) == (Code.INVALID_ARGUMENT, "wrong")


def test_one_message_asks_once_for_a_request_with_several_gaps(harness: Harness) -> None:
    harness.open("a", n=2)
    harness.sent()
    harness.receive(slots=column(0, 1), offsets=column(3, 3), token_ids=column(5, 6))
    assert [message.submit.attempt for message in harness.sent()] == [2]


def test_an_engine_that_does_not_pool_is_an_error_of_the_request(harness: Harness) -> None:
    log = harness.open("a", pooling=PoolingParams()).sequences[0]
    harness.receive(finished=[finished(0)])
    assert log.error is not None
    assert log.error.code is Code.UNIMPLEMENTED
    pooled = harness.open("b", pooling=PoolingParams()).sequences[0]
    slot = harness.sent()[-1].submit.slots[0]
    harness.receive(finished=[finished(slot, embedding=np.array([0.5, 1.0], "<f4").tobytes())])
    assert pooled.embedding is not None
    assert pooled.embedding.tolist() == [0.5, 1.0]
    assert pooled.error is None
    aborted = harness.open("c", pooling=PoolingParams()).sequences[0]
    slot = harness.sent()[-1].submit.slots[0]
    harness.receive(finished=[finished(slot, reason=types_pb2.FINISH_REASON_ABORT)])
    assert aborted.finish_reason == "abort"


async def test_a_rejection_is_told_or_tried_again_after_a_pause(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    delays: list[float] = []
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "call_later", lambda delay_s, *_: delays.append(delay_s))
    told, hidden = harness.open("a"), harness.open("b")
    for name, error in (
        ("a", InvalidRequest("wrong")),
        ("b", NotReady("no worker")),
        ("b", NotReady("no worker", retry_after_s=3.0)),
        ("nobody", InvalidRequest("wrong")),
    ):
        rejected = scheduler_pb2.RejectedRequest(request_id=name, error=error_to_proto(error))
        harness.receive(rejected=[rejected])
    with pytest.raises(InvalidRequest):
        await told.get()
    assert set(harness.streams) == {"b"}
    assert delays == [0.2, 3.0]
    harness.sent()
    harness.session._submit_again(hidden)
    harness.session._submit_again(hidden)
    assert [message.submit.attempt for message in harness.sent()] == [2], "it is under way already"


def test_state_is_passed_on_and_tokens_alone_are_not(harness: Harness) -> None:
    harness.receive(load=types_pb2.EngineLoad(is_ready=True))
    harness.receive(model_info=types_pb2.ModelInfo(vocab_size=9))
    harness.receive(slots=column(0), offsets=column(0), token_ids=column(1))
    assert [message.HasField("load") for message in harness.states] == [True, False]


def test_aborts_that_wait_together_are_one_message(harness: Harness) -> None:
    for name in "abc":
        harness.open(name)
    harness.sent()
    harness.session.abort("a")
    harness.session.abort("b")
    harness.session.release("b")
    harness.session.abort("c")
    harness.session.abort("nobody")
    sent = harness.sent()
    assert [list(message.abort.request_ids) for message in sent] == [["a", "b"], [], ["c"]]
    assert list(sent[1].release.request_ids) == ["b"]


def test_a_stop_names_the_slot_of_its_sequence(harness: Harness) -> None:
    stream = harness.open("a", n=3)
    harness.sent()
    harness.session.stop("a", 1)
    harness.session.stop("nobody", 0)
    (message,) = harness.sent()
    assert list(message.stop.slots) == [1]
    harness.receive(slots=column(0, 1, 2), offsets=column(0, 0, 0), token_ids=column(5, 6, 7))
    assert [log.token_ids for log in stream.sequences] == [[5], [], [7]]


def test_a_batch_ends_when_it_is_large(harness: Harness) -> None:
    big = scheduler_pb2.FrontendMessage(
        submit=scheduler_pb2.SubmitRequest(prompt_token_ids=bytes(MAX_BATCH_BYTES // 2))
    )
    for _ in range(5):
        harness.session._send(big)
    sizes = []
    while harness.session.num_outgoing:
        sizes.append(len(harness.session._next_message().batch.messages))
    assert sizes == [2, 2, 0], "the last goes alone"


def test_a_request_that_is_sent_again_brings_what_is_known(harness: Harness) -> None:
    stream = harness.open("a", n=2, logprobs=None)
    first, second = stream.sequences
    first.extend(0, [5])
    second.extend(0, [6, 7])
    second.finish("stop", stop_token_id=7)
    harness.sent()
    harness.session.submit(stream)
    (message,) = harness.sent()
    one, two = message.submit.resume.sequences
    assert (one.output_token_ids, one.is_finished, one.HasField("stop_token_id")) == (column(5), False, False)
    assert (two.output_token_ids, two.is_finished, two.stop_token_id) == (column(6, 7), True, 7)
    assert two.finish_reason == types_pb2.FINISH_REASON_STOP
    assert list(message.submit.slots) == [2, 3], "what is under way names the old ones"


def cut(offset: int, num_tokens: int, known: Known, *, ends: bool = False) -> list[tuple[int, list[int], bool, bool]]:
    """Offset, tokens, whether the end is there, and whether the client has it: of each part."""
    ids = list(range(offset, offset + num_tokens))
    output = EngineOutput(
        index=1,
        offset=offset,
        token_ids=ids,
        logprobs=[TokenLogprobs([token_id], [-1.0], 1) for token_id in ids],
        finish_reason="stop" if ends else None,
        stop_token_id=9 if ends else None,
    )
    found = []
    for part, is_replayed in _cut(output, (Known(99), known)):
        assert part.logprobs is not None
        assert [entry.token_ids[0] for entry in part.logprobs] == part.token_ids
        assert (part.stop_token_id is not None) is (part.finish_reason is not None)
        found.append((part.offset, part.token_ids, part.finish_reason is not None, is_replayed))
    return found


def test_a_resumed_output_is_cut_where_the_client_s_part_ends() -> None:
    assert cut(0, 3, Known(3)) == [(0, [0, 1, 2], False, True)]
    assert cut(0, 3, Known(2)) == [(0, [0, 1], False, True), (2, [2], False, False)]
    assert cut(0, 1, Known(1)) == [(0, [0], False, True)], "exactly one token is not given twice"
    assert cut(0, 2, Known(1)) == [(0, [0], False, True), (1, [1], False, False)]
    assert cut(0, 2, Known(0)) == [(0, [0, 1], False, False)]
    assert cut(2, 2, Known(2)) == [(2, [2, 3], False, False)]
    assert cut(3, 2, Known(2)) == [(3, [3, 4], False, False)]
    assert cut(0, 2, Known(2), ends=True) == [(0, [0, 1], False, True), (2, [], True, False)]
    assert cut(0, 2, Known(2, is_finished=True), ends=True) == [(0, [0, 1], True, True)]
    assert cut(2, 0, Known(2), ends=True) == [(2, [], True, False)]


def test_a_request_is_sent_with_every_field(harness: Harness) -> None:
    request = EngineRequest(
        request_id="a",
        prompt_token_ids=[1, 258],
        sampling_params=SamplingParams(n=2, temperature=0.5, max_tokens=9),
        eos_token_ids=(2, 3),
        priority=-4,
        cache_salt="salt",
        timeout_s=50.0,
        tenant="tenant",
        resume_key="key",
        note=b"note",
        traceparent="00-trace",
        group="group",
        client="client",
        lora=LoraAdapter(name="style", path="p", version=5),
    )
    stream = EngineStream(request=request, on_stop=lambda *_: None, on_abort=lambda *_: None)
    harness.session.submit(stream)
    submit = harness.sent()[0].submit
    unset = {field.name for field in submit.DESCRIPTOR.fields} - {field.name for field, _ in submit.ListFields()}
    assert unset == {"resume", "beam_search", "pooling"}
    assert (submit.request_id, submit.attempt, list(submit.slots)) == ("a", 1, [0, 1])
    assert submit.prompt_token_ids == column(1, 258)
    assert submit.sampling_params == sampling_params_to_proto(request.sampling_params)
    assert (list(submit.eos_token_ids), submit.priority, submit.cache_salt) == ([2, 3], -4, "salt")
    assert 49 < submit.timeout_s <= 50
    assert submit.arrival_time_ns == stream.arrival_time_ns
    assert (submit.tenant, submit.resume_key, submit.frontend_note) == ("tenant", "key", b"note")
    assert (submit.traceparent, submit.group, submit.client) == ("00-trace", "group", "client")
    assert submit.lora == types_pb2.LoraAdapter(name="style", path="p", version=5)


def test_a_search_and_a_pooling_have_nothing_to_go_on_from(harness: Harness) -> None:
    search = EngineRequest(
        request_id="a",
        prompt_token_ids=[1],
        sampling_params=SamplingParams(n=2),
        beam_search=BeamSearchParams(beam_width=2, length_penalty=0.5),
    )
    stream = EngineStream(request=search, on_stop=lambda *_: None, on_abort=lambda *_: None)
    for attempt in (1, 2):
        harness.session.submit(stream)
        submit = harness.sent()[0].submit
        assert (submit.attempt, submit.beam_search.beam_width, submit.beam_search.length_penalty) == (attempt, 2, 0.5)
        assert not submit.HasField("resume")
    pooled = harness.open("b", pooling=PoolingParams(task="score", second_text_start=3))
    harness.session.submit(pooled)
    for message in harness.sent():
        assert (message.submit.pooling.task, message.submit.pooling.second_text_start) == (5, 3)
        assert not message.submit.HasField("resume")


def test_an_end_brings_what_a_search_has_found(harness: Harness) -> None:
    log = harness.open("a").sequences[0]
    harness.receive(slots=column(0, 0), offsets=column(0, 1), token_ids=column(7, 8))
    found = scheduler_pb2.BeamHypothesis(cumulative_logprob=-3.0, logprobs=[-1.0, -2.0], ranks=[4, 5])
    harness.receive(finished=[finished(0, 2, hypothesis=found)])
    assert log.hypothesis == HypothesisLogprobs(-3.0, [-1.0, -2.0], [4, 5])
    (output,) = [log.take()]
    assert (output.hypothesis, output.token_ids, output.finish_reason) == (log.hypothesis, [7, 8], "stop")


def test_an_output_has_what_the_sequence_knows(harness: Harness) -> None:
    log = harness.open("a", logprobs=0).sequences[0]
    assert log.take().num_cached_tokens == 0
    admitted = scheduler_pb2.AdmittedSequence(slot=0, num_cached_tokens=3, queue_ns=500_000_000)
    harness.receive(admitted=[admitted])
    harness.receive(finished=[finished(0, 0, stop_token_id=9, num_preemptions=2)])
    output = log.take()
    assert (output.num_cached_tokens, output.queue_s, output.num_preemptions) == (3, 0.5, 2)
    assert (output.stop_token_id, output.logprobs, output.error) == (9, [], None)
    assert log.is_closed


def test_loras_are_state_as_well(harness: Harness) -> None:
    harness.receive(loras=scheduler_pb2.LoraList(has_resolver=True))
    assert [message.loras.has_resolver for message in harness.states] == [True]


def test_the_stream_of_a_request_that_keeps_losing_tokens_ends(harness: Harness) -> None:
    stream = harness.open("a", n=2)
    for _ in range(8):
        slot = harness.sent()[-1].submit.slots[0]
        harness.receive(slots=column(slot), offsets=column(3), token_ids=column(5))
    slot = harness.sent()[-1].submit.slots[0]
    harness.receive(slots=column(slot), offsets=column(3), token_ids=column(5))
    assert [list(message.abort.request_ids) for message in harness.sent()] == [["a"]]
    assert harness.streams == {}
    for log in stream.sequences:
        assert log.error is not None
        assert log.error.message == "the engine keeps leaving out tokens of this request"


def test_a_request_over_its_time_says_how_much_it_had(harness: Harness) -> None:
    stream = harness.open("a")
    stream.request = replace(stream.request, timeout_s=0.01)
    (submitted,) = harness.sent()
    left = error_to_proto(DeadlineExceeded("request was not finished within its 0.007 s"))
    ended = scheduler_pb2.FinishedSequence(
        slot=submitted.submit.slots[0], finish_reason=types_pb2.FINISH_REASON_ERROR, error=left
    )
    harness.receive(finished=[ended])
    error = stream.sequences[0].error
    assert isinstance(error, DeadlineExceeded)
    assert error.message == "the request was not finished within 0.01 s"
