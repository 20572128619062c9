"""Converts requests and responses of Generate (pagoda.v1.Inference): sampling parameters in, outputs back. Pure
functions."""

from collections.abc import Sequence

from pagoda.v1 import inference_pb2, types_pb2
from pagoda_common.engine.convert import FINISH_NUMBERS, sampling_params_from_proto
from pagoda_common.params.outputs import SequenceDelta, TokenLogprobs
from pagoda_common.params.sampling_params import SAMPLING_FIELDS, SamplingParams
from pagoda_frontend.conversation.message import MessageFinishReason
from pagoda_frontend.requests.params import COMPLETION_MAX_TOKENS, SamplingDefaults, check_sampling_params
from pagoda_frontend.requests.run import CollectedSequence


def sampling_params_of(
    request: inference_pb2.GenerateRequest, *, defaults: SamplingDefaults, vocab_size: int, max_logprobs: int
) -> SamplingParams:
    """The sampling parameters of `request`. A field that it leaves out takes the model's default, else the contract's.

    Raises:
        InvalidRequest: a value is out of its bounds; `field` names it.
    """
    asked = request.sampling_params
    is_search = request.HasField("beam_search")  # which takes no chances, and filters nothing
    if is_search:
        asked = types_pb2.SamplingParams()
        asked.CopyFrom(request.sampling_params)
        for row in SAMPLING_FIELDS.values():
            if row.search == "ignored" and row.proto is not None:
                asked.ClearField(row.proto)
    params = sampling_params_from_proto(
        asked,
        defaults={} if is_search else defaults.values,
        max_tokens=None if request.WhichOneof("prompt") == "chat" else COMPLETION_MAX_TOKENS,
        stop=list(request.stop),
        include_stop_str_in_output=request.include_stop_str_in_output,
        skip_special_tokens=not request.HasField("skip_special_tokens") or request.skip_special_tokens,
    )
    if defaults.max_new_tokens is not None:
        params.max_tokens = min(params.max_tokens or defaults.max_new_tokens, defaults.max_new_tokens)
    check_sampling_params(params, vocab_size=vocab_size, max_logprobs=max_logprobs)
    return params


def finish_number(reason: MessageFinishReason | None) -> types_pb2.FinishReason:
    """Why a sequence or a message has ended; unspecified while it has not."""
    if reason is None:
        return types_pb2.FINISH_REASON_UNSPECIFIED
    return types_pb2.FINISH_REASON_TOOL_CALLS if reason == "tool_calls" else FINISH_NUMBERS[reason]


def delta_to_proto(delta: SequenceDelta, *, request_id: str, num_prompt_tokens: int) -> inference_pb2.GenerateResponse:
    """One message of the stream."""
    response = inference_pb2.GenerateResponse(
        request_id=request_id,
        index=delta.index,
        text=delta.text,
        token_ids=delta.token_ids,
        offset=delta.offset,
        finish_reason=finish_number(delta.finish_reason),
    )
    if delta.logprobs:
        response.logprobs.extend(map(logprobs_to_proto, delta.logprobs))
    if delta.finish_reason is not None:
        _set_end(response, delta, num_prompt_tokens)
    return response


def sequence_to_proto(
    sequence: CollectedSequence, *, request_id: str, num_prompt_tokens: int
) -> inference_pb2.GenerateResponse:
    """A whole sequence."""
    response = inference_pb2.GenerateResponse(
        request_id=request_id,
        index=sequence.index,
        text=sequence.text,
        token_ids=sequence.token_ids,
        logprobs=map(logprobs_to_proto, sequence.logprobs),
        finish_reason=finish_number(sequence.finish_reason),
    )
    _set_end(response, sequence, num_prompt_tokens)
    return response


def _set_end(
    response: inference_pb2.GenerateResponse, ended: SequenceDelta | CollectedSequence, num_prompt_tokens: int
) -> None:
    if isinstance(ended.stop_reason, str):
        response.stop_string = ended.stop_reason
    elif ended.stop_reason is not None:
        response.stop_token_id = ended.stop_reason
    response.prompt_logprobs.extend(logprobs_to_proto(entry) for entry in ended.prompt_logprobs or () if entry)
    response.usage.num_prompt_tokens = num_prompt_tokens
    response.usage.num_output_tokens = ended.num_output_tokens
    response.usage.num_cached_tokens = ended.num_cached_tokens
    if ended.hypothesis is not None:
        response.cumulative_logprob = ended.hypothesis.cumulative_logprob


def logprobs_to_proto(position: TokenLogprobs) -> inference_pb2.TokenLogprobs:
    """One token's log probabilities."""
    return inference_pb2.TokenLogprobs(
        logprob=position.logprobs[0],
        rank=position.sampled_rank,
        top=_top_to_proto(position.token_ids[1:], position.logprobs[1:]),
    )


def _top_to_proto(token_ids: Sequence[int], logprobs: Sequence[float]) -> list[inference_pb2.TopLogprob]:
    pairs = zip(token_ids, logprobs, strict=True)
    return [inference_pb2.TopLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in pairs]
