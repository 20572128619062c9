"""Converts VllmEngine requests to Pagoda's."""

from smg_grpc_proto import vllm_engine_pb2

from pagoda.v1 import scheduler_pb2, types_pb2
from pagoda_common.engine.convert import plain_values, token_ids_to_bytes
from pagoda_common.errors import InvalidRequest
from pagoda_common.params.sampling_params import SAMPLING_FIELDS

_UNSUPPORTED = ("mm_inputs", "media_refs", "kv_transfer_params", "kv_transfer_params_json")


def submit_from_vllm(request: vllm_engine_pb2.GenerateRequest) -> scheduler_pb2.SubmitRequest:
    """The equivalent request of Pagoda. Stop strings are handled by the caller, which has the tokenizer.

    Raises:
        InvalidRequest: it has no token ids, or asks for something that is not supported.
    """
    if not request.tokenized.input_ids:
        raise InvalidRequest(
            "input must be token ids (tokenized.input_ids), this service has no tokenizer", field="input"
        )
    for name in _UNSUPPORTED:
        if request.HasField(name):
            raise InvalidRequest(f"{name} is not supported", field=name)
    if request.extra_mm_inputs:
        raise InvalidRequest("extra_mm_inputs is not supported", field="extra_mm_inputs")
    return scheduler_pb2.SubmitRequest(
        request_id=request.request_id,
        prompt_token_ids=token_ids_to_bytes(request.tokenized.input_ids),
        sampling_params=_sampling_params(request.sampling_params),
    )


def _sampling_params(theirs: vllm_engine_pb2.SamplingParams) -> types_pb2.SamplingParams:
    """vLLM's sampling parameters as Pagoda's. A zero top_p or repetition_penalty means not set."""
    if theirs.HasField("truncate_prompt_tokens"):
        raise InvalidRequest(
            "truncate_prompt_tokens is not supported here: send fewer tokens", field="truncate_prompt_tokens"
        )
    values = {"n": 1, **plain_values(theirs)}
    if "seed" in values:
        values["seed"] %= 2**64
    ours = types_pb2.SamplingParams(**{SAMPLING_FIELDS[name].proto or name: value for name, value in values.items()})
    ours.logit_bias.update(theirs.logit_bias)
    constraint = theirs.WhichOneof("constraint")
    if constraint == "choice":
        ours.structured_output.choice.texts.extend(theirs.choice.choices)
    elif constraint is not None and getattr(theirs, constraint):
        setattr(ours.structured_output, constraint, getattr(theirs, constraint))
    return ours
