"""Messages for requests that outlive their frontend: the stored form, and the form for the adopting frontend."""

from pagoda.v1 import scheduler_pb2
from pagoda_common.engine.convert import FINISH_NUMBERS, token_ids_to_bytes
from pagoda_scheduler.core.request import Request
from pagoda_scheduler.engine.open_requests import OpenRequest, Origin


def origin_of(message: scheduler_pb2.SubmitRequest) -> Origin | None:
    """The stored form of a request that may outlive its frontend; None if it may not."""
    if not message.resume_key:
        return None
    kept = scheduler_pb2.SubmitRequest()
    kept.CopyFrom(message)
    kept.ClearField("slots")
    kept.ClearField("resume")
    return Origin(message.resume_key, kept)


def adopted_to_proto(open_request: OpenRequest) -> scheduler_pb2.AdoptedRequest:
    """A request with an origin, for the frontend that adopts it."""
    assert open_request.origin is not None
    submitted = open_request.origin.message
    assert isinstance(submitted, scheduler_pb2.SubmitRequest)
    params = submitted.sampling_params
    is_kept = not (
        params.HasField("logprobs")
        or params.HasField("prompt_logprobs")
        or submitted.HasField("beam_search")
        or submitted.HasField("pooling")
    )
    sequences = [_sequence(sequence, is_kept=is_kept) for sequence in open_request.sequences]
    return scheduler_pb2.AdoptedRequest(submitted=submitted, sequences=sequences)


def _sequence(request: Request, *, is_kept: bool) -> scheduler_pb2.AdoptedSequence:
    adopted = scheduler_pb2.AdoptedSequence()
    if request.output_token_ids:  # it has run
        adopted.num_cached_tokens = request.num_cached_tokens
    if not is_kept:
        return adopted
    adopted.output_token_ids = token_ids_to_bytes(request.output_token_ids)
    if request.finish_reason is not None and request.error is None:
        adopted.finish_reason = FINISH_NUMBERS[request.finish_reason]
        if request.stop_token_id is not None:
            adopted.stop_token_id = request.stop_token_id
    return adopted
