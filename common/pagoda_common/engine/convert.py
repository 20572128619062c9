"""Converts domain types that several services share to messages and back. Pure functions."""

import functools
import hashlib
import json
import struct
from array import array
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from pagoda.v1 import scheduler_pb2, types_pb2
from pagoda_common.config.checkpoint.weights_source import WeightsSource
from pagoda_common.engine.interface import ModelSummary
from pagoda_common.engine.stream import AdoptedRequest, AdoptedSequence
from pagoda_common.errors import Code, InvalidRequest, PagodaError, ShareFull
from pagoda_common.params.beam_search import BeamSearchParams, EarlyStopping
from pagoda_common.params.lora_adapter import LoraAdapter
from pagoda_common.params.outputs import FinishReason
from pagoda_common.params.pooling_params import PoolingParams, PoolingTask
from pagoda_common.params.sampling_params import SAMPLING_FIELDS, SamplingParams
from pagoda_common.params.structured_outputs import StructuredOutputsParams

UINT32 = np.dtype("<u4")
PLAIN_FIELDS = [
    (row.name, row.proto) for row in SAMPLING_FIELDS.values() if row.proto is not None and row.kind != "other"
]
"""Sampling fields that pagoda.v1.SamplingParams has as they are: name here, name there."""
NO_DEFAULTS: Mapping[str, Any] = MappingProxyType({})
FINISH_REASONS: dict[int, FinishReason] = {
    types_pb2.FINISH_REASON_STOP: "stop",
    types_pb2.FINISH_REASON_LENGTH: "length",
    types_pb2.FINISH_REASON_ABORT: "abort",
    types_pb2.FINISH_REASON_ERROR: "error",
}
FINISH_NUMBERS: dict[FinishReason, types_pb2.FinishReason] = {
    "stop": types_pb2.FINISH_REASON_STOP,
    "length": types_pb2.FINISH_REASON_LENGTH,
    "abort": types_pb2.FINISH_REASON_ABORT,
    "error": types_pb2.FINISH_REASON_ERROR,
}
EARLY_STOPPING: dict[EarlyStopping, types_pb2.EarlyStopping] = {
    "heuristic": types_pb2.EARLY_STOPPING_HEURISTIC,
    "first": types_pb2.EARLY_STOPPING_FIRST,
    "never": types_pb2.EARLY_STOPPING_NEVER,
}
EARLY_STOPPING_NAMES: dict[int, EarlyStopping] = {number: name for name, number in EARLY_STOPPING.items()}


def token_array_from_bytes(column: bytes, *, field: str = "prompt_token_ids") -> "array[int]":
    """A little-endian uint32 column as an array("I"): 4 bytes a token, where a list takes 36.

    Raises:
        InvalidRequest: the length is not a multiple of 4 bytes.
    """
    if len(column) % 4:
        raise InvalidRequest(f"{field} has {len(column)} bytes, must be a multiple of 4", field=field)
    return array("I", np.frombuffer(column, dtype=UINT32).astype(np.uint32, copy=False).tobytes())


def token_ids_to_bytes(token_ids: Sequence[int] | npt.NDArray[Any]) -> bytes:
    """Token ids as a little-endian uint32 column."""
    return np.asarray(token_ids, dtype=UINT32).tobytes()


def token_ids_from_bytes(column: bytes, *, field: str = "prompt_token_ids") -> list[int]:
    """A little-endian uint32 column as token ids.

    Raises:
        InvalidRequest: the length is not a multiple of 4 bytes.
    """
    return token_array_from_bytes(column, field=field).tolist()


def sampling_params_to_proto(params: SamplingParams) -> types_pb2.SamplingParams:
    """The part of `params` that the engine needs (stop strings and text options stay with the frontend)."""
    message = types_pb2.SamplingParams(**{proto: getattr(params, name) for name, proto in PLAIN_FIELDS})
    if params.logit_bias:
        message.logit_bias.update(params.logit_bias)
    for ids in params.bad_words_token_ids:
        message.bad_words_token_ids.add(ids=ids)
    if params.structured_outputs is not None:
        message.structured_output.CopyFrom(structured_outputs_to_proto(params.structured_outputs))
    if params.extra_args:
        message.extra_args_json = json.dumps(params.extra_args)
    return message


def sampling_params_from_proto(
    message: types_pb2.SamplingParams, *, defaults: Mapping[str, Any] = NO_DEFAULTS, **extra: Any
) -> SamplingParams:
    """`message` as validated SamplingParams; `extra` sets fields that the message does not carry (stop, …).

    Args:
        defaults: values by name for fields that are absent; without one, the contract's default.

    Raises:
        InvalidRequest: a value is out of its bounds; `field` names it.
    """
    values = {"max_tokens": None, **defaults, **extra, **plain_values(message)}
    return SamplingParams(
        logit_bias=dict(message.logit_bias) or None,
        bad_words_token_ids=tuple(tuple(words.ids) for words in message.bad_words_token_ids),
        structured_outputs=(
            structured_outputs_from_proto(message.structured_output) if message.HasField("structured_output") else None
        ),
        extra_args=_extra_args(message.extra_args_json),
        **values,
    )


def plain_values(message: Message) -> dict[str, Any]:
    """The plain sampling fields that `message` sets, by their names in SamplingParams.

    A field without presence is not set when it is zero.

    Args:
        message: pagoda.v1.SamplingParams, or another contract's that has fields of the same names.
    """
    values: dict[str, Any] = {}
    for name, proto, has_presence, is_repeated in _plain_fields(message.DESCRIPTOR):
        if has_presence:
            if message.HasField(proto):
                values[name] = getattr(message, proto)
        elif value := getattr(message, proto):
            values[name] = tuple(value) if is_repeated else value
    return values


@functools.cache
def _plain_fields(descriptor: Descriptor) -> list[tuple[str, str, bool, bool]]:
    """Name in SamplingParams, name in the message, has_presence and is_repeated of each plain field that is there."""
    known = descriptor.fields_by_name
    return [
        (name, proto, known[proto].has_presence, known[proto].is_repeated)
        for name, proto in PLAIN_FIELDS
        if proto in known
    ]


def structured_outputs_to_proto(params: StructuredOutputsParams) -> types_pb2.StructuredOutput:
    """`params` as a message."""
    return types_pb2.StructuredOutput(
        json_schema=params.json if isinstance(params.json, str) else None,
        json_object=params.json_object,
        regex=params.regex,
        choice=types_pb2.StringChoices(texts=params.choice) if params.choice is not None else None,
        grammar=params.grammar,
        structural_tag=params.structural_tag if isinstance(params.structural_tag, str) else None,
        disable_any_whitespace=params.disable_any_whitespace,
        disable_additional_properties=params.disable_additional_properties,
        whitespace_pattern=params.whitespace_pattern or "",
        start_after_token_ids=params.start_after_token_ids,
    )


def structured_outputs_from_proto(message: types_pb2.StructuredOutput) -> StructuredOutputsParams:
    """`message` as validated StructuredOutputsParams.

    Raises:
        InvalidRequest: there is no constraint, or it is not a good one; `field` is structured_outputs.
    """
    return _structured_outputs(message.SerializeToString(deterministic=True))


@functools.lru_cache(maxsize=8)
def _structured_outputs(encoded: bytes) -> StructuredOutputsParams:
    """Remembered: n sequences of a request bring the same one, and to check a large schema takes milliseconds."""
    message = types_pb2.StructuredOutput.FromString(encoded)
    kind = message.WhichOneof("constraint")
    return StructuredOutputsParams(
        json=message.json_schema if kind == "json_schema" else None,
        json_object=message.json_object if kind == "json_object" else None,
        regex=message.regex if kind == "regex" else None,
        choice=tuple(message.choice.texts) if kind == "choice" else None,
        grammar=message.grammar if kind == "grammar" else None,
        structural_tag=message.structural_tag if kind == "structural_tag" else None,
        disable_any_whitespace=message.disable_any_whitespace,
        disable_additional_properties=message.disable_additional_properties,
        whitespace_pattern=message.whitespace_pattern or None,
        start_after_token_ids=tuple(message.start_after_token_ids),
    )


def _extra_args(text: str) -> dict[str, Any] | None:
    if not text:
        return None
    try:
        value: dict[str, Any] = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"extra_args_json is not JSON: {error}", field="extra_args") from error
    return value


def beam_search_params_to_proto(params: BeamSearchParams) -> types_pb2.BeamSearchParams:
    """`params` as a message."""
    return types_pb2.BeamSearchParams(
        beam_width=params.beam_width,
        length_penalty=params.length_penalty,
        early_stopping=EARLY_STOPPING[params.early_stopping],
    )


def beam_search_params_from_proto(message: types_pb2.BeamSearchParams, *, n: int) -> BeamSearchParams:
    """The parameters in `message`; a beam_width of 0 is `n`.

    Raises:
        InvalidRequest: a value is out of its bounds; `field` names it.
    """
    return BeamSearchParams(
        beam_width=message.beam_width or n,
        length_penalty=message.length_penalty if message.HasField("length_penalty") else 1.0,
        early_stopping=EARLY_STOPPING_NAMES.get(message.early_stopping, "heuristic"),
    )


def pooling_params_to_proto(params: PoolingParams) -> types_pb2.PoolingParams:
    """`params` as a message."""
    return types_pb2.PoolingParams(
        normalize=params.normalizes,
        task=POOLING_TASKS.get(params.task or "", types_pb2.POOLING_TASK_UNSPECIFIED),
        dimensions=params.dimensions or 0,
        use_activation=params.use_activation,
        second_text_start=params.second_text_start,
    )


def pooling_params_from_proto(message: types_pb2.PoolingParams) -> PoolingParams:
    """The parameters in `message`; a task that is not known here is the default one.

    Raises:
        InvalidRequest: a value is out of its bounds; `field` names it.
    """
    return PoolingParams(
        normalize=message.normalize if message.HasField("normalize") else None,
        task=pooling_task_of(message.task),
        dimensions=message.dimensions or None,
        use_activation=message.use_activation if message.HasField("use_activation") else None,
        second_text_start=message.second_text_start,
    )


POOLING_TASKS: dict[str, types_pb2.PoolingTask] = {
    "embed": types_pb2.POOLING_TASK_EMBED,
    "token_embed": types_pb2.POOLING_TASK_TOKEN_EMBED,
    "classify": types_pb2.POOLING_TASK_CLASSIFY,
    "token_classify": types_pb2.POOLING_TASK_TOKEN_CLASSIFY,
    "score": types_pb2.POOLING_TASK_SCORE,
    "sparse": types_pb2.POOLING_TASK_SPARSE,
}


def pooling_task_of(value: types_pb2.PoolingTask) -> PoolingTask | None:
    """The task with this number; None: there is none, or it is not known here."""
    return next((cast("PoolingTask", name) for name, number in POOLING_TASKS.items() if number == value), None)


def pooling_tasks_of(values: Iterable[types_pb2.PoolingTask]) -> tuple[PoolingTask, ...]:
    """The tasks with these numbers, without those that are not known here."""
    return tuple(task for value in values if (task := pooling_task_of(value)) is not None)


def error_to_proto(error: PagodaError) -> types_pb2.RequestError:
    """`error` as a message of one request."""
    field = ShareFull.FIELD if isinstance(error, ShareFull) else error.field or ""
    return types_pb2.RequestError(
        code=int(error.code), message=error.message, field=field, retry_after_s=error.retry_after_s
    )


def error_from_proto(message: types_pb2.RequestError) -> PagodaError:
    """The error of one request."""
    code = Code(message.code) if message.code in Code._value2member_map_ else Code.INTERNAL
    field = message.field or None
    if code is Code.INVALID_ARGUMENT:
        return InvalidRequest(message.message, field=field)
    if code is Code.RESOURCE_EXHAUSTED and field == ShareFull.FIELD:
        return ShareFull(message.message, retry_after_s=message.retry_after_s)
    return PagodaError(message.message, field=field, code=code, retry_after_s=message.retry_after_s)


def model_summary_from_proto(message: types_pb2.ModelInfo) -> ModelSummary:
    """The part of `message` that clients need; the digest covers all of it."""
    return ModelSummary(
        model=message.model,
        vocab_size=message.vocab_size,
        max_model_len=message.max_model_len,
        embedding_size=message.embedding_size,
        pooling_tasks=pooling_tasks_of(message.pooling_tasks),
        unserved_pooling_tasks=pooling_tasks_of(message.unserved_pooling_tasks),
        only_pools=message.only_pools,
        labels=tuple(message.labels),
        has_matryoshka=message.has_matryoshka,
        matryoshka_dimensions=tuple(message.matryoshka_dimensions),
        eos_token_ids=tuple(message.eos_token_ids),
        generation_config_json=message.generation_config_json,
        digest=hashlib.sha256(message.SerializeToString(deterministic=True)).hexdigest(),
    )


def weights_source_to_proto(source: WeightsSource) -> types_pb2.WeightsSource:
    """`source` as a message."""
    return types_pb2.WeightsSource(
        model=source.model,
        revision=source.revision or "",
        version=source.version,
        is_for_one_group=source.is_for_one_group,
    )


def weights_source_from_proto(message: types_pb2.WeightsSource) -> WeightsSource:
    """Raises ConfigError when it names no model."""
    return WeightsSource(
        model=message.model,
        revision=message.revision or None,
        version=message.version,
        is_for_one_group=message.is_for_one_group,
    )


def lora_adapter_to_proto(adapter: LoraAdapter) -> types_pb2.LoraAdapter:
    """`adapter` as a message."""
    return types_pb2.LoraAdapter(
        name=adapter.name,
        path=adapter.path,
        version=adapter.version,
        base_model_name=adapter.base_model_name,
        is_pinned=adapter.is_pinned,
    )


def lora_adapter_from_proto(message: types_pb2.LoraAdapter) -> LoraAdapter:
    """Raises InvalidRequest when the name is empty, or name or path are too long."""
    return LoraAdapter(
        name=message.name,
        path=message.path,
        version=message.version,
        base_model_name=message.base_model_name,
        is_pinned=message.is_pinned,
    )


def column(values: Sequence[int], dtype: Literal["<u2", "<u4"]) -> bytes:
    """Integers as a little-endian column. Several are made in every step, mostly short ones: NumPy takes twice as long.

    Raises:
        struct.error: a value does not fit.
    """
    return struct.pack(f"<{len(values)}{'I' if dtype == '<u4' else 'H'}", *values)


def adopted_request_from_proto(message: scheduler_pb2.AdoptedRequest) -> AdoptedRequest:
    """The state of a request that an adopter needs."""
    submitted = message.submitted
    return AdoptedRequest(
        request_id=submitted.request_id,
        attempt=submitted.attempt,
        prompt_token_ids=token_ids_from_bytes(submitted.prompt_token_ids),
        seed=submitted.sampling_params.seed,
        arrival_time_ns=submitted.arrival_time_ns,
        timeout_s=submitted.timeout_s,
        sequences=[
            AdoptedSequence(
                token_ids=token_ids_from_bytes(sequence.output_token_ids, field="output_token_ids"),
                finish_reason=FINISH_REASONS.get(sequence.finish_reason),
                stop_token_id=sequence.stop_token_id if sequence.HasField("stop_token_id") else None,
                num_cached_tokens=sequence.num_cached_tokens if sequence.HasField("num_cached_tokens") else None,
            )
            for sequence in message.sequences
        ],
        note=submitted.frontend_note,
        tenant=submitted.tenant,
        lora=lora_adapter_from_proto(submitted.lora) if submitted.HasField("lora") else None,
    )
