"""A submitted request as sequences: every field of the message arrives, for each of several sequences."""

from typing import Any

import pytest

from pagoda.v1 import scheduler_pb2, types_pb2
from pagoda_common.config.engine_config import EngineConfig, ModelConfig, SchedulerConfig
from pagoda_common.engine.convert import FINISH_NUMBERS, token_ids_to_bytes
from pagoda_common.errors import InvalidRequest, PagodaError
from pagoda_scheduler.beams.beam_group import BeamGroup
from pagoda_scheduler.core.request import Request
from pagoda_scheduler.engine.open_requests import OpenRequest
from pagoda_scheduler.rpc.adoption import adopted_to_proto, origin_of
from pagoda_scheduler.rpc.convert_requests import requests_from_proto
from tests.unit.scheduler.engine.test_open_requests import Notes

INFO = types_pb2.ModelInfo(max_model_len=100, eos_token_ids=[5, 6], embedding_size=8)
SINK = Notes()


def message(**more: Any) -> scheduler_pb2.SubmitRequest:
    fields: dict[str, Any] = {
        "request_id": "r",
        "attempt": 3,
        "slots": [4, 9, 2],
        "prompt_token_ids": token_ids_to_bytes([70_000, 1, 2]),
        "sampling_params": types_pb2.SamplingParams(n=3, seed=10, max_tokens=7, prompt_logprobs=2, stop_token_ids=[8]),
        "priority": -4,
        "cache_salt": "salt",
        "arrival_time_ns": 123,
        "tenant": "t",
    }
    return scheduler_pb2.SubmitRequest(**{**fields, **more})


def sequences(
    submitted: scheduler_pb2.SubmitRequest, info: types_pb2.ModelInfo | None = INFO, **config: Any
) -> list[Request]:
    scheduler = SchedulerConfig(max_num_seqs=config.pop("max_num_seqs", 4))
    settings = EngineConfig(model=ModelConfig(**config), scheduler=scheduler)
    return requests_from_proto(submitted, sink=SINK, config=settings, model_info=info)


def test_every_field_reaches_every_sequence() -> None:
    found = sequences(message())
    assert [request.session_slot for request in found] == [4, 9, 2]
    assert [request.index for request in found] == [0, 1, 2]
    assert [request.sampling_params.seed for request in found] == [10, 11, 12]
    assert [request.sampling_params.prompt_logprobs for request in found] == [2, None, None]
    assert [request.is_uncached for request in found] == [True, False, False]
    assert [request.leader for request in found] == [None, found[0], found[0]]
    for request in found:
        assert (request.request_id, request.attempt, list(request.prompt_token_ids)) == ("r", 3, [70_000, 1, 2])
        assert (request.priority, request.cache_salt, request.arrival_ns, request.tenant) == (-4, "salt", 123, "t")
        assert (request.sampling_params.n, request.sampling_params.max_tokens, request.max_num_tokens) == (1, 7, 10)
        assert (request.eos_token_ids, set(request.end_token_ids)) == ((5, 6), {5, 6, 8})
        assert (request.sink, request.pooling, request.beam_group) == (SINK, None, None)


def test_seeds_wrap_around_and_one_is_drawn_where_none_is_set() -> None:
    params = types_pb2.SamplingParams(n=2, seed=2**64 - 1)
    assert [each.sampling_params.seed for each in sequences(message(slots=[], sampling_params=params))] == [
        2**64 - 1,
        0,
    ]
    params = types_pb2.SamplingParams(n=2)
    first, second = (each.sampling_params.seed for each in sequences(message(slots=[], sampling_params=params)))
    assert first is not None
    assert second == first + 1


def test_end_tokens_of_the_message_go_before_the_models() -> None:
    assert sequences(message(eos_token_ids=[7]))[0].eos_token_ids == (7,)
    assert sequences(message(), info=None)[0].eos_token_ids == ()


def test_without_a_model_the_context_is_open() -> None:
    unbounded = message(sampling_params=types_pb2.SamplingParams(n=3))
    assert sequences(unbounded)[0].max_num_tokens == 100
    assert sequences(unbounded, info=None)[0].max_num_tokens > 2**30


def test_what_was_sampled_before_comes_back_and_what_had_ended_stays_ended() -> None:
    submitted = message()
    for output, reason in (([3, 4], None), ([5], "stop"), ([], None)):
        known = submitted.resume.sequences.add(output_token_ids=token_ids_to_bytes(output))
        if reason is not None:
            known.is_finished, known.finish_reason, known.stop_token_id = True, FINISH_NUMBERS["stop"], 8
    found = sequences(submitted)
    assert [request.output_token_ids for request in found] == [[3, 4], [5], []]
    assert [request.is_finished for request in found] == [False, True, False]
    assert (found[1].finish_reason, found[1].stop_token_id, found[0].stop_token_id) == ("stop", 8, None)
    assert [request.leader for request in found] == [None] * 3


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"request_id": ""}, "request_id"),
        ({"prompt_token_ids": b""}, "prompt_token_ids"),
        ({"prompt_token_ids": b"12345"}, "prompt_token_ids"),
        ({"slots": [1, 2]}, "slots"),
        ({"sampling_params": types_pb2.SamplingParams(n=3, logprobs=21)}, "logprobs"),
        ({"sampling_params": types_pb2.SamplingParams(n=3, prompt_logprobs=21)}, "prompt_logprobs"),
        ({"beam_search": types_pb2.BeamSearchParams(beam_width=2)}, "beam_width"),
        ({"beam_search": types_pb2.BeamSearchParams(beam_width=257)}, "beam_width"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        sequences(message(**change), max_logprobs=20)
    assert caught.value.field == field


def test_all_log_probabilities_are_as_many_as_the_vocabulary() -> None:
    submitted = message(sampling_params=types_pb2.SamplingParams(n=3, logprobs=-1))
    info = types_pb2.ModelInfo(max_model_len=100, vocab_size=50)
    sequences(submitted, info, max_logprobs=50)
    with pytest.raises(InvalidRequest) as caught:
        sequences(submitted, info, max_logprobs=49)
    assert caught.value.field == "logprobs"


def test_bounds_are_met_at_the_number_they_name() -> None:
    sequences(message(sampling_params=types_pb2.SamplingParams(n=3, logprobs=20, prompt_logprobs=20)), max_logprobs=20)
    sequences(message(sampling_params=types_pb2.SamplingParams(n=3, logprobs=-1)), max_logprobs=-1)
    for width in (3, 4, 256):
        found = sequences(message(beam_search=types_pb2.BeamSearchParams(beam_width=width)))
        assert found[0].beam_group is not None
        assert found[0].beam_group.sequences == found


@pytest.mark.parametrize("num_resumed", [1, 4])
def test_as_many_sequences_resume_as_there_are(num_resumed: int) -> None:
    submitted = message()
    for _ in range(num_resumed):
        submitted.resume.sequences.add()
    with pytest.raises(InvalidRequest, match=f"resume has {num_resumed} sequences, n is 3"):
        sequences(submitted)


def test_a_request_that_had_ended_whole_is_refused() -> None:
    submitted = message()
    for _ in range(3):
        submitted.resume.sequences.add(is_finished=True)
    with pytest.raises(InvalidRequest, match="no unfinished sequence"):
        sequences(submitted)


def test_pooling_wants_a_model_that_pools_and_no_beams() -> None:
    pooled = message(slots=[], sampling_params=None)
    pooled.pooling.normalize = False
    (found,) = sequences(pooled)
    assert found.pooling is not None
    assert (found.pooling.normalize, found.sampling_params.max_tokens) == (False, 1)
    with pytest.raises(PagodaError, match="does not support pooling"):
        sequences(pooled, info=types_pb2.ModelInfo(max_model_len=100))
    assert sequences(pooled, info=None)
    info = types_pb2.ModelInfo(max_model_len=100, embedding_size=8, pooling_tasks=[types_pb2.POOLING_TASK_CLASSIFY])
    assert sequences(pooled, info=info), "the model's first task"
    pooled.pooling.task = types_pb2.POOLING_TASK_EMBED
    with pytest.raises(InvalidRequest, match="the model does not embed: it can classify"):
        sequences(pooled, info=info)
    pooled.pooling.task = types_pb2.POOLING_TASK_UNSPECIFIED
    pooled.beam_search.beam_width = 1
    with pytest.raises(InvalidRequest, match="beam_search"):
        sequences(pooled)


def test_beams_want_log_probabilities() -> None:
    beams = message(beam_search=types_pb2.BeamSearchParams(beam_width=3))
    sequences(beams, logprobs_mode="processed_logprobs")
    with pytest.raises(InvalidRequest, match="logprobs_mode is raw_logits"):
        sequences(beams, logprobs_mode="raw_logits")


def test_an_adopter_gets_what_was_submitted_and_what_came_of_it() -> None:
    submitted = message(resume_key="key", frontend_note=b"note")
    submitted.sampling_params.ClearField("prompt_logprobs")
    submitted.resume.sequences.add()
    origin = origin_of(submitted)
    assert origin is not None
    assert origin.key == "key"
    submitted.ClearField("resume")
    found = sequences(submitted)
    found[0].output_token_ids, found[0].first_cached_tokens = [3, 70_000], 2
    found[1].output_token_ids, found[1].finish_reason, found[1].stop_token_id = [8], "stop", 8
    adopted = adopted_to_proto(OpenRequest(3, found, None, origin))
    submitted.ClearField("slots")
    assert adopted.submitted == submitted
    assert [each.output_token_ids for each in adopted.sequences] == [
        token_ids_to_bytes([3, 70_000]),
        token_ids_to_bytes([8]),
        b"",
    ]
    first, second, third = adopted.sequences
    assert (first.num_cached_tokens, third.HasField("num_cached_tokens")) == (2, False)
    assert (second.finish_reason, second.stop_token_id) == (FINISH_NUMBERS["stop"], 8)
    assert not first.HasField("stop_token_id")
    assert origin_of(message()) is None


def test_whose_call_it_is_and_its_adapter_reach_every_sequence() -> None:
    submitted = message(group="call", client="client")
    submitted.lora.name, submitted.lora.path, submitted.lora.version = "sql", "/sql", 4
    for request in sequences(submitted):
        assert (request.group, request.client) == ("call", "client")
        assert request.lora is not None
        assert (request.lora.name, request.lora.path, request.lora.version) == ("sql", "/sql", 4)
    for request in sequences(message()):
        assert (request.group, request.client, request.lora) == ("r", "", None)


def test_an_arrival_that_is_not_told_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagoda_scheduler.rpc.convert_requests.time.time_ns", lambda: 987)
    assert [request.arrival_ns for request in sequences(message(arrival_time_ns=0))] == [987] * 3


def test_a_search_has_every_parameter_and_begins_anew() -> None:
    submitted = message(
        beam_search=types_pb2.BeamSearchParams(
            beam_width=5, length_penalty=0.5, early_stopping=types_pb2.EARLY_STOPPING_NEVER
        )
    )
    for _ in range(3):
        submitted.resume.sequences.add(output_token_ids=token_ids_to_bytes([9]))
    found = sequences(submitted)
    assert [request.output_token_ids for request in found] == [[]] * 3
    assert [request.leader for request in found] == [None] * 3
    group = found[0].beam_group
    assert isinstance(group, BeamGroup)
    search = group._new_search
    assert (search.beam_width, search.max_tokens, search.end_token_ids) == (5, 7, frozenset({5, 6, 8}))
    assert (search.length_penalty, search.early_stopping) == (0.5, "never")


def test_the_widest_search_is_as_wide_as_the_slots_where_these_are_more() -> None:
    wide = message(beam_search=types_pb2.BeamSearchParams(beam_width=300))
    assert sequences(wide, max_num_seqs=300)[0].beam_group is not None
    with pytest.raises(InvalidRequest, match=r"beam_width must be between n \(3\) and 299, got 300"):
        sequences(wide, max_num_seqs=299)
    with pytest.raises(InvalidRequest, match=r"beam_width must be between n \(3\) and 256, got 300"):
        sequences(wide, max_num_seqs=4)


@pytest.mark.parametrize(
    ("change", "is_kept"),
    [
        ({}, True),
        ({"sampling_params": types_pb2.SamplingParams(n=3, logprobs=0)}, False),
        ({"sampling_params": types_pb2.SamplingParams(n=3, prompt_logprobs=0)}, False),
        ({"beam_search": types_pb2.BeamSearchParams(beam_width=3)}, False),
        ({"pooling": types_pb2.PoolingParams()}, False),
    ],
)
def test_what_cannot_be_told_again_is_computed_again(change: dict[str, Any], is_kept: bool) -> None:
    submitted = message(resume_key="key", sampling_params=types_pb2.SamplingParams(n=3))
    submitted.MergeFrom(scheduler_pb2.SubmitRequest(**change))
    found = sequences(message())
    for request in found:
        request.output_token_ids, request.first_cached_tokens, request.finish_reason = [3], 2, "length"
    found[1].finish_reason, found[1].error = "error", InvalidRequest("why")
    adopted = adopted_to_proto(OpenRequest(3, found, None, origin_of(submitted)))
    first, failed, _ = adopted.sequences
    assert (first.num_cached_tokens, failed.num_cached_tokens) == (2, 2)
    assert first.output_token_ids == (token_ids_to_bytes([3]) if is_kept else b"")
    assert first.finish_reason == (FINISH_NUMBERS["length"] if is_kept else 0)
    assert failed.finish_reason == 0, "it is computed again"
