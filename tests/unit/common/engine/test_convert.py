"""Round trips: every field of what common converts, there and back, with a value that is not its default."""

import hashlib
import struct
from dataclasses import fields
from typing import Any

import pytest
from google.protobuf.message import Message

from pagoda.v1 import scheduler_pb2, types_pb2
from pagoda_common.config.checkpoint.weights_source import WeightsSource
from pagoda_common.engine.convert import (
    EARLY_STOPPING,
    FINISH_NUMBERS,
    FINISH_REASONS,
    POOLING_TASKS,
    adopted_request_from_proto,
    beam_search_params_from_proto,
    beam_search_params_to_proto,
    column,
    error_from_proto,
    error_to_proto,
    lora_adapter_from_proto,
    lora_adapter_to_proto,
    model_summary_from_proto,
    pooling_params_from_proto,
    pooling_params_to_proto,
    sampling_params_from_proto,
    sampling_params_to_proto,
    structured_outputs_from_proto,
    structured_outputs_to_proto,
    token_array_from_bytes,
    token_ids_from_bytes,
    token_ids_to_bytes,
    weights_source_from_proto,
    weights_source_to_proto,
)
from pagoda_common.engine.interface import ModelSummary
from pagoda_common.errors import Code, InvalidRequest, PagodaError, QueueFull, ShareFull
from pagoda_common.params.beam_search import BeamSearchParams, EarlyStopping
from pagoda_common.params.fields import SamplingField
from pagoda_common.params.lora_adapter import LoraAdapter
from pagoda_common.params.pooling_params import TASKS, PoolingParams
from pagoda_common.params.sampling_params import SAMPLING_FIELDS, SamplingParams
from pagoda_common.params.structured_outputs import StructuredOutputsParams

IN_MESSAGE = [name for name, row in SAMPLING_FIELDS.items() if row.proto is not None]
OTHERS: dict[str, Any] = {
    "presence_penalty": -1.5,
    "seed": 2**64 - 2,
    "logprobs": 0,
    "prompt_logprobs": -1,
    "logit_bias": {3: 1.5, 2**32 - 1: -100.0},
    "allowed_token_ids": (4, 5),
    "bad_words_token_ids": ((1, 2), (3,)),
    "logprob_token_ids": (11, 12),
    "structured_outputs": StructuredOutputsParams(regex="a+"),
    "extra_args": {"a": [1, 2.5, None, True, "x"], "b": {"c": 2**53 + 1}},
}


def value_of(row: SamplingField) -> Any:
    """A value within the bounds that is not the default, and that float32 holds."""
    if row.name in OTHERS:
        return OTHERS[row.name]
    if row.kind in ("number", "integer"):
        return row.low + {"number": 0.5, "integer": 3}[row.kind]
    return {"flag": not row.default, "token_ids": [7, 8]}[row.kind]


VALUES = {name: value_of(SAMPLING_FIELDS[name]) for name in IN_MESSAGE}


CONSTRAINTS: list[dict[str, Any]] = [
    {"json": '{"type": "integer"}'},
    {"json_object": True},
    {"regex": "a+"},
    {"choice": ("a", "b")},
    {"grammar": 'root ::= "a"'},
    {"structural_tag": '{"type": "structural_tag", "format": {"type": "any_text"}}'},
]
OPTIONS: list[dict[str, Any]] = [
    {"disable_any_whitespace": True},
    {"disable_additional_properties": True},
    {"whitespace_pattern": "[ ]?"},
    {"start_after_token_ids": (5, 6)},
]


def assert_filled(message: Message, *, but: frozenset[str] = frozenset()) -> None:
    """No field of `message` was forgotten; fields of a oneof exclude each other."""
    filled = {field.name for field, _ in message.ListFields()}
    known = {field.name for field in message.DESCRIPTOR.fields}
    assert known - filled == but


def test_values_are_not_the_defaults() -> None:
    assert [name for name, value in VALUES.items() if value == SAMPLING_FIELDS[name].default] == []


@pytest.mark.parametrize("name", IN_MESSAGE)
def test_a_sampling_field_alone_comes_back_and_changes_no_other(name: str) -> None:
    params = SamplingParams(**{"max_tokens": None, name: VALUES[name]})
    assert getattr(params, name) == VALUES[name]
    assert sampling_params_from_proto(sampling_params_to_proto(params)) == params


def test_all_sampling_fields_come_back_together() -> None:
    params = SamplingParams(**(VALUES | {"logprobs": 2}))
    message = sampling_params_to_proto(params)
    assert_filled(message)
    assert sampling_params_from_proto(message) == params


def test_defaults_come_back_and_an_empty_message_has_those_of_the_contract() -> None:
    assert sampling_params_from_proto(sampling_params_to_proto(SamplingParams())) == SamplingParams()
    assert sampling_params_from_proto(types_pb2.SamplingParams()) == SamplingParams(max_tokens=None)


def test_a_field_that_the_message_sets_goes_before_the_default_of_the_model() -> None:
    defaults = {"temperature": 0.5, "top_k": 20}
    message = types_pb2.SamplingParams(temperature=0.0, min_p=0.0)
    params = sampling_params_from_proto(message, defaults={"temperature": 0.5})
    assert params.temperature == 0.0
    params = sampling_params_from_proto(types_pb2.SamplingParams(top_k=0), defaults=defaults, max_tokens=16)
    assert (params.temperature, params.top_k, params.max_tokens) == (0.5, 0, 16)
    params = sampling_params_from_proto(types_pb2.SamplingParams(max_tokens=3), max_tokens=16)
    assert params.max_tokens == 3


@pytest.mark.parametrize("constraint", CONSTRAINTS, ids=lambda value: next(iter(value)))
@pytest.mark.parametrize("option", [{}, *OPTIONS], ids=lambda value: next(iter(value), "no option"))
def test_a_constraint_and_its_options_come_back(constraint: dict[str, Any], option: dict[str, Any]) -> None:
    known = {name for one in (*CONSTRAINTS, *OPTIONS) for name in one}
    assert {one.name for one in fields(StructuredOutputsParams)} == known
    params = StructuredOutputsParams(**constraint, **option)
    message = structured_outputs_to_proto(params)
    assert message.WhichOneof("constraint") is not None
    assert structured_outputs_from_proto(message) == params


@pytest.mark.parametrize("early_stopping", EARLY_STOPPING)
def test_a_beam_search_comes_back(early_stopping: EarlyStopping) -> None:
    params = BeamSearchParams(beam_width=4, length_penalty=0.0, early_stopping=early_stopping)
    message = beam_search_params_to_proto(params)
    assert_filled(message)
    assert beam_search_params_from_proto(message, n=2) == params
    assert beam_search_params_from_proto(types_pb2.BeamSearchParams(), n=2) == BeamSearchParams(beam_width=2)


def test_pooling_comes_back() -> None:
    for normalize in (True, False):
        for task in TASKS:
            more = {"dimensions": 7, "use_activation": not normalize, "second_text_start": 70_000}
            params = PoolingParams(normalize=normalize, task=task, **more)
            message = pooling_params_to_proto(params)
            assert_filled(message)
            assert pooling_params_from_proto(message) == params
    assert pooling_params_from_proto(types_pb2.PoolingParams()) == PoolingParams()
    assert not pooling_params_to_proto(PoolingParams()).HasField("normalize"), "the model's files decide"
    assert pooling_params_from_proto(types_pb2.PoolingParams(task=99)).task is None, "of a version to come"  # type: ignore[arg-type]


def test_an_error_comes_back_with_its_code_field_and_retry() -> None:
    error = PagodaError("the queue is full", field="prompt", code=Code.RESOURCE_EXHAUSTED, retry_after_s=1.5)
    message = error_to_proto(error)
    assert_filled(message)
    back = error_from_proto(message)
    assert (back.message, back.field, back.code, back.retry_after_s) == (
        "the queue is full",
        "prompt",
        Code.RESOURCE_EXHAUSTED,
        1.5,
    )


def test_a_wrong_argument_comes_back_as_one_and_an_unknown_code_is_internal() -> None:
    back = error_from_proto(error_to_proto(InvalidRequest("n must be 1", field="n")))
    assert (type(back), back.message, back.field) == (InvalidRequest, "n must be 1", "n")
    unknown = error_from_proto(types_pb2.RequestError(code=999, message="x"))
    assert (unknown.code, unknown.field) == (Code.INTERNAL, None)


def test_a_source_of_weights_comes_back() -> None:
    source = WeightsSource(model="m", revision="r", version=5, is_for_one_group=True)
    message = weights_source_to_proto(source)
    assert_filled(message)
    assert weights_source_from_proto(message) == source
    assert weights_source_from_proto(types_pb2.WeightsSource(model="m")) == WeightsSource(model="m")


def test_a_summary_of_a_model_has_fields_of_the_message_and_the_digest_is_of_all() -> None:
    message = types_pb2.ModelInfo(
        model="m",
        vocab_size=3,
        max_model_len=4,
        embedding_size=5,
        eos_token_ids=[6, 7],
        generation_config_json="{}",
        pooling_tasks=[types_pb2.POOLING_TASK_SCORE, types_pb2.POOLING_TASK_UNSPECIFIED, types_pb2.POOLING_TASK_EMBED],
        only_pools=True,
        labels=["yes", "no"],
        has_matryoshka=True,
        matryoshka_dimensions=[8, 16],
    )
    summary = model_summary_from_proto(message)
    assert summary == ModelSummary(
        model="m",
        vocab_size=3,
        max_model_len=4,
        embedding_size=5,
        eos_token_ids=(6, 7),
        generation_config_json="{}",
        pooling_tasks=("score", "embed"),
        only_pools=True,
        labels=("yes", "no"),
        has_matryoshka=True,
        matryoshka_dimensions=(8, 16),
        digest=hashlib.sha256(message.SerializeToString(deterministic=True)).hexdigest(),
    )
    plain = model_summary_from_proto(types_pb2.ModelInfo())
    assert (plain.only_pools, plain.has_matryoshka, plain.labels, plain.pooling_tasks) == (False, False, (), ())
    message.num_layers = 1
    assert model_summary_from_proto(message).digest != summary.digest


def test_an_adapter_comes_back() -> None:
    adapter = LoraAdapter(name="n", path="p", version=2**63 + 1, base_model_name="b", is_pinned=True)
    message = lora_adapter_to_proto(adapter)
    assert_filled(message)
    assert lora_adapter_from_proto(message) == adapter
    assert lora_adapter_from_proto(types_pb2.LoraAdapter(name="n")) == LoraAdapter(name="n")
    with pytest.raises(InvalidRequest, match="lora name is ''"):
        lora_adapter_from_proto(types_pb2.LoraAdapter(path="p"))


def test_a_full_share_is_another_error_than_a_full_queue() -> None:
    share = error_from_proto(error_to_proto(ShareFull("yours is full", retry_after_s=2.5)))
    assert (type(share), share.message, share.retry_after_s, share.http.status) == (
        ShareFull,
        "yours is full",
        2.5,
        429,
    )
    queue = error_from_proto(error_to_proto(QueueFull("full")))
    assert (type(queue), queue.code, queue.field, queue.http.status) == (
        PagodaError,
        Code.RESOURCE_EXHAUSTED,
        None,
        503,
    )
    other = error_from_proto(types_pb2.RequestError(code=int(Code.UNAVAILABLE), field=ShareFull.FIELD))
    assert type(other) is PagodaError


def test_names_of_the_wire_are_those_of_the_contract() -> None:
    for names, prefix, enum in (
        (FINISH_NUMBERS, "FINISH_REASON_", types_pb2.FinishReason),
        (EARLY_STOPPING, "EARLY_STOPPING_", types_pb2.EarlyStopping),
        (POOLING_TASKS, "POOLING_TASK_", types_pb2.PoolingTask),
    ):
        known = {name.removeprefix(prefix).lower(): number for name, number in enum.items() if number}
        known.pop("tool_calls", None)  # which the frontend alone says
        assert {**names} == known


def test_reasons_of_an_end_come_back() -> None:
    assert {FINISH_REASONS[number]: number for number in FINISH_REASONS} == FINISH_NUMBERS


def test_columns_are_little_endian() -> None:
    assert column([1, 258], "<u2") == b"\x01\x00\x02\x01"
    assert column([1, 2**32 - 2], "<u4") == b"\x01\x00\x00\x00\xfe\xff\xff\xff"
    assert column([], "<u4") == b""
    with pytest.raises(struct.error):
        column([65_536], "<u2")
    assert token_ids_to_bytes([258]) == b"\x02\x01\x00\x00"
    tokens = token_array_from_bytes(b"\x02\x01\x00\x00")
    assert (tokens.typecode, tokens.tolist(), tokens.itemsize) == ("I", [258], 4)


def test_extra_arguments_that_are_no_json_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="extra_args_json is not JSON: ") as caught:
        sampling_params_from_proto(types_pb2.SamplingParams(extra_args_json="{"))
    assert caught.value.field == "extra_args"


def test_a_constraint_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        structured_outputs_from_proto(types_pb2.StructuredOutput(disable_any_whitespace=True))
    assert caught.value.field == "structured_outputs"


def test_normalising_goes_under_either_name() -> None:
    message = pooling_params_to_proto(PoolingParams(use_activation=False))
    assert (message.normalize, message.use_activation) == (False, False)
    assert message.HasField("normalize")
    both = pooling_params_to_proto(PoolingParams(normalize=True, use_activation=False))
    assert (both.normalize, both.use_activation) == (True, False)


def test_token_ids_come_back_and_a_torn_column_is_refused_by_name() -> None:
    ids = [0, 1, 2**32 - 1]
    assert token_ids_from_bytes(token_ids_to_bytes(ids)) == ids
    with pytest.raises(InvalidRequest, match="output_token_ids has 5 bytes, must be a multiple of 4"):
        token_ids_from_bytes(b"12345", field="output_token_ids")


def test_an_adopted_request_has_what_the_message_says() -> None:
    submitted = scheduler_pb2.SubmitRequest(
        request_id="a",
        attempt=2,
        prompt_token_ids=token_ids_to_bytes([5, 6]),
        sampling_params=types_pb2.SamplingParams(seed=9),
        arrival_time_ns=11,
        timeout_s=2.5,
        tenant="t",
        frontend_note=b"note",
        lora=types_pb2.LoraAdapter(name="style", path="p", version=3),
    )
    sequence = scheduler_pb2.AdoptedSequence(
        output_token_ids=token_ids_to_bytes([7]),
        finish_reason=types_pb2.FINISH_REASON_STOP,
        stop_token_id=0,
        num_cached_tokens=0,
    )
    message = scheduler_pb2.AdoptedRequest(submitted=submitted, sequences=[sequence, scheduler_pb2.AdoptedSequence()])
    request = adopted_request_from_proto(message)
    assert (request.request_id, request.attempt, request.prompt_token_ids, request.seed) == ("a", 2, [5, 6], 9)
    assert (request.arrival_time_ns, request.timeout_s, request.tenant, request.note) == (11, 2.5, "t", b"note")
    assert request.lora == LoraAdapter(name="style", path="p", version=3)
    plain = scheduler_pb2.AdoptedRequest(submitted=scheduler_pb2.SubmitRequest(request_id="b"))
    assert adopted_request_from_proto(plain).lora is None
    first, second = request.sequences
    assert (first.token_ids, first.finish_reason) == ([7], "stop")
    assert (first.stop_token_id, first.num_cached_tokens) == (0, 0)
    assert (second.token_ids, second.finish_reason) == ([], None)
    assert (second.stop_token_id, second.num_cached_tokens) == (None, None)
