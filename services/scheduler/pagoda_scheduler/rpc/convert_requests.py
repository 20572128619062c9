"""Converts a submitted request to the engine's sequences. Pure functions."""

import secrets
import time
from collections.abc import Sequence

from pagoda.v1 import scheduler_pb2, types_pb2
from pagoda_common.config.engine_config import EngineConfig
from pagoda_common.engine.convert import (
    FINISH_REASONS,
    beam_search_params_from_proto,
    lora_adapter_from_proto,
    pooling_params_from_proto,
    pooling_task_of,
    sampling_params_from_proto,
    token_array_from_bytes,
    token_ids_from_bytes,
)
from pagoda_common.errors import Code, InvalidRequest, PagodaError
from pagoda_common.params.logprobs_bound import exceeds_max_logprobs
from pagoda_common.params.pooling_params import POOLED, PoolingParams
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_scheduler.beams.beam_group import BeamGroup
from pagoda_scheduler.beams.beam_search import BeamSearch
from pagoda_scheduler.core.request import Request, RequestStatus
from pagoda_scheduler.engine.sink import Sink

MAX_BEAM_WIDTH = 256
"""Maximum beam width of an engine with fewer slots, in which beams take turns."""
UNKNOWN_MODEL_LEN = 2**31
"""Bound on the context while no group has loaded the model; the model's bound is applied when a group takes the
request."""
UNKNOWN_VOCAB_SIZE = 2**31
"""Vocabulary size while no group has loaded the model: larger than any bound."""


def requests_from_proto(
    message: scheduler_pb2.SubmitRequest, *, sink: Sink, config: EngineConfig, model_info: types_pb2.ModelInfo | None
) -> list[Request]:
    """The n sequences of a submitted request.

    Args:
        model_info: None while no group has loaded the model.

    Raises:
        InvalidRequest: a field is wrong.
        PagodaError: the model does not support the request.
    """
    pooling = _pooling(message, model_info)
    # A pooled sequence has max_tokens 1, which stands for its embedding.
    params = sampling_params_from_proto(message.sampling_params) if pooling is None else POOLED
    prompt = token_array_from_bytes(message.prompt_token_ids)
    if not message.request_id:
        raise InvalidRequest("request_id must not be empty", field="request_id")
    if not prompt:
        raise InvalidRequest("prompt_token_ids must not be empty", field="prompt_token_ids")
    vocab_size = model_info.vocab_size if model_info is not None else UNKNOWN_VOCAB_SIZE
    _check_logprobs(params.logprobs, "logprobs", config, vocab_size)
    _check_logprobs(params.prompt_logprobs, "prompt_logprobs", config, vocab_size)
    slots = list(message.slots) or [0] * params.n
    if len(slots) != params.n:
        raise InvalidRequest(f"slots has {len(slots)} entries, n is {params.n}", field="slots")
    resumed = message.resume.sequences
    if resumed and len(resumed) != params.n:
        raise InvalidRequest(f"resume has {len(resumed)} sequences, n is {params.n}", field="resume")
    seed = secrets.randbits(63) if params.seed is None else params.seed
    model_end = tuple(model_info.eos_token_ids) if model_info is not None else ()
    lora = lora_adapter_from_proto(message.lora) if message.HasField("lora") else None
    sequences = [
        Request(
            request_id=message.request_id,
            index=index,
            attempt=message.attempt,
            prompt_token_ids=prompt,
            output_token_ids=(token_ids_from_bytes(resumed[index].output_token_ids, field="resume") if resumed else []),
            sampling_params=_params_of(index, params, seed),
            max_model_len=model_info.max_model_len if model_info is not None else UNKNOWN_MODEL_LEN,
            eos_token_ids=tuple(message.eos_token_ids) or model_end,
            priority=message.priority,
            arrival_ns=message.arrival_time_ns or time.time_ns(),
            cache_salt=message.cache_salt,
            tenant=message.tenant,
            group=message.group,
            client=message.client,
            sink=sink,
            session_slot=slot,
            pooling=pooling,
            lora=lora,
        )
        for index, slot in enumerate(slots)
    ]
    if message.HasField("beam_search"):
        for sequence in sequences:
            sequence.output_token_ids.clear()
        BeamGroup(sequences=sequences, search=_beam_search(message.beam_search, sequences, config))
    elif not resumed:
        for sequence in sequences[1:]:
            sequence.leader = sequences[0]
    _finish_resumed(sequences, resumed)
    return sequences


def _params_of(index: int, params: SamplingParams, seed: int) -> SamplingParams:
    """Parameters of one of n sequences: each has its own seed; only the first has prompt log probabilities."""
    prompt_logprobs = None if index else params.prompt_logprobs
    return params.with_changes(n=1, seed=(seed + index) % 2**64, prompt_logprobs=prompt_logprobs)


def _finish_resumed(sequences: list[Request], resumed: Sequence[scheduler_pb2.ResumeSequence]) -> None:
    """Mark the resumed sequences that have already ended.

    Raises:
        InvalidRequest: all have ended.
    """
    for sequence, known in zip(sequences, resumed, strict=False):
        if known.is_finished:
            sequence.status = RequestStatus.FINISHED
            sequence.finish_reason = FINISH_REASONS.get(known.finish_reason, "stop")
            sequence.stop_token_id = known.stop_token_id if known.HasField("stop_token_id") else None
    if all(sequence.is_finished for sequence in sequences):
        raise InvalidRequest("resume has no unfinished sequence", field="resume")


def _pooling(message: scheduler_pb2.SubmitRequest, model_info: types_pb2.ModelInfo | None) -> PoolingParams | None:
    if not message.HasField("pooling"):
        return None
    if message.HasField("beam_search"):
        raise InvalidRequest("a request with pooling cannot have beam_search", field="beam_search")
    if model_info is not None and not model_info.embedding_size:
        raise PagodaError("the worker does not support pooling", code=Code.UNIMPLEMENTED)
    params = pooling_params_from_proto(message.pooling)
    known = () if model_info is None else tuple(model_info.pooling_tasks)
    if params.task is not None and known and message.pooling.task not in known:
        names = ", ".join(name for number in known if (name := pooling_task_of(number)) is not None)
        raise InvalidRequest(f"the model does not {params.task}: it can {names}", field="pooling.task")
    return params


def _beam_search(message: types_pb2.BeamSearchParams, sequences: list[Request], config: EngineConfig) -> BeamSearch:
    bound = max(MAX_BEAM_WIDTH, config.scheduler.max_num_seqs)
    params = beam_search_params_from_proto(message, n=len(sequences))
    if not len(sequences) <= params.beam_width <= bound:
        limits = f"between n ({len(sequences)}) and {bound}"
        raise InvalidRequest(f"beam_width must be {limits}, got {params.beam_width}", field="beam_width")
    mode = config.model.logprobs_mode
    if not mode.endswith("logprobs"):
        raise InvalidRequest(f"beam search needs log probabilities, logprobs_mode is {mode}", field="beam_search")
    first = sequences[0]
    return BeamSearch(
        beam_width=params.beam_width,
        max_tokens=first.max_num_tokens - first.num_prompt_tokens,
        end_token_ids=first.end_token_ids,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
    )


def _check_logprobs(value: int | None, name: str, config: EngineConfig, vocab_size: int) -> None:
    bound = config.model.max_logprobs
    if exceeds_max_logprobs(value, max_logprobs=bound, vocab_size=vocab_size):
        raise InvalidRequest(f"{name} is {value}, max_logprobs is {bound}", field=name)
