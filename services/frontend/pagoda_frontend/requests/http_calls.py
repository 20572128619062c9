"""From a body to a Run: the steps that completions and conversations have in common, in HTTP's terms."""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from fastapi import Response

from pagoda_common.errors import InvalidRequest
from pagoda_common.params.sampling_params import MAX_N, SamplingParams
from pagoda_common.params.truncation import Truncation, truncation_of
from pagoda_common.text.bad_words import bad_words_token_ids
from pagoda_frontend.openai.chunks import ChunkOptions
from pagoda_frontend.openai.logprobs import LogprobWriter, prompt_logprobs_by_id
from pagoda_frontend.openai.protocol import GenerationBody
from pagoda_frontend.requests.choices import Choices
from pagoda_frontend.requests.params import (
    check_prompt_logprobs,
    check_sampling_params,
    check_supported,
    fit_to_context,
    make_sampling_params,
)
from pagoda_frontend.requests.resume import Resumption
from pagoda_frontend.requests.run import Run
from pagoda_frontend.requests.serving import ServedModel, Serving
from pagoda_frontend.requests.structured import structured_outputs_of
from pagoda_frontend.requests.terms import Terms


def sampling_params_of(
    body: GenerationBody,
    *,
    serving: Serving,
    model: ServedModel,
    choices: Choices,
    logprobs: int | None,
    max_tokens: int | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """What `body` asks of sampling, checked against model and server.

    Args:
        prompt_logprobs: None takes the body's.

    Raises:
        InvalidRequest: `field` names the field.
    """
    check_supported(body)
    structured_outputs = structured_outputs_of(body)
    if choices.is_chosen and logprobs is None:
        logprobs = 0  # the choice is made by them
    try:
        params = make_sampling_params(
            body,
            defaults=model.defaults,
            logprobs=logprobs,
            max_tokens=max_tokens,
            prompt_logprobs=body.prompt_logprobs if prompt_logprobs is None else prompt_logprobs,
            n=choices.num_generated,
            is_search=choices.beam_search is not None,
        )
    except InvalidRequest as error:
        if error.field != "n" or choices.num_generated == choices.n:
            raise
        raise InvalidRequest(f"best_of: {error.message}", field="best_of") from error
    check_sampling_params(params, vocab_size=model.vocab_size, max_logprobs=serving.config.max_logprobs)
    params.structured_outputs = structured_outputs
    if params.bad_words:
        params.bad_words_token_ids = bad_words_token_ids(params.bad_words, model.tokenizer)
    return params


def body_truncation(body: GenerationBody, *, params: SamplingParams, model: ServedModel) -> Truncation | None:
    """How `body` asks for its prompt to be cut.

    Raises:
        InvalidRequest: as `truncation_of`.
    """
    return truncation_of(
        body.truncate_prompt_tokens,
        body.truncation_side,
        max_tokens=params.max_tokens,
        max_model_len=model.max_model_len,
    )


def make_run(
    body: GenerationBody,
    *,
    serving: Serving,
    model: ServedModel,
    request_id: str,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    choices: Choices,
    terms: Terms,
    field: str,
    is_scoring: bool = False,
    note: bytes = b"",
    resumption: Resumption | None = None,
) -> Run:
    """The run of `prompts`; `field` is the body's field that they come from.

    Args:
        is_scoring: only the prompts' log probabilities are wanted.
        note, resumption: as `Run` has them.

    Raises:
        InvalidRequest: a prompt does not fit the context, or they are too many sequences.
    """
    if len(prompts) * params.n > MAX_N:
        raise InvalidRequest(f"n times prompts must be at most {MAX_N}, got {len(prompts) * params.n}", field="n")
    num_prompt_tokens = sum(len(prompt) for prompt in prompts)
    check_prompt_logprobs(params, num_prompt_tokens=num_prompt_tokens, vocab_size=model.vocab_size)
    fitted = [
        fit_to_context(params, num_prompt_tokens=len(prompt), max_model_len=model.max_model_len, field=field)
        for prompt in prompts
    ]
    return Run(
        serving=serving,
        request_id=request_id,
        prompts=prompts,
        sampling_params=fitted,
        terms=terms,
        cache_salt=body.cache_salt or "",
        beam_search=choices.beam_search,
        is_scoring=is_scoring,
        note=note,
        resumption=resumption,
    )


def logprob_writer(body: GenerationBody, model: ServedModel, num_top: int | None) -> LogprobWriter | None:
    """The writer of the log probabilities asked for; None when none are."""
    if num_top is None:
        return None
    as_token_ids = bool(body.return_tokens_as_token_ids)
    if body.logprob_token_ids:
        num_top = -1  # all that come are those asked for
    return LogprobWriter(tokenizer=model.tokenizer, num_top=num_top, as_token_ids=as_token_ids)


def prompt_logprobs_of(
    run: Run, model: ServedModel, *, place: int = 0
) -> list[dict[str, dict[str, Any]] | None] | None:
    """The log probabilities of one of a run's prompts in vLLM's shape; None when none were asked for."""
    return prompt_logprobs_by_id(run.prompt_logprobs[place], model.tokenizer)


def chunk_options(body: GenerationBody, logprobs: LogprobWriter | None) -> ChunkOptions:
    """What the chunks of a stream of `body` carry."""
    asked = body.stream_options
    include_usage = bool(asked and asked.include_usage)
    return ChunkOptions(
        include_usage=include_usage,
        continuous_usage=include_usage and bool(asked and asked.continuous_usage_stats),
        return_token_ids=bool(body.return_token_ids),
        logprobs=logprobs,
    )


def usage_of(run: Run, serving: Serving) -> dict[str, Any]:
    """The usage object, as of now."""
    usage: dict[str, Any] = {
        "prompt_tokens": run.num_prompt_tokens,
        "completion_tokens": run.num_output_tokens,
        "total_tokens": run.num_prompt_tokens + run.num_output_tokens,
    }
    if serving.config.enable_prompt_tokens_details:
        usage["prompt_tokens_details"] = {"cached_tokens": run.num_cached_tokens}
    return usage


def json_response(value: Any, headers: Mapping[str, str] | None = None) -> Response:
    """A 200 with a JSON body."""
    return Response(orjson.dumps(value), media_type="application/json", headers=dict(headers or {}))
