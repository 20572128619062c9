"""Reads sampling parameters and truncation from a body, and checks them against model and server."""

from pagoda_common.errors import InvalidRequest
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_common.params.truncation import Truncation, truncation_of
from pagoda_common.text.bad_words import bad_words_token_ids
from pagoda_frontend.openai.protocol import GenerationBody
from pagoda_frontend.requests.choices import Choices
from pagoda_frontend.requests.params import check_sampling_params, check_supported, make_sampling_params
from pagoda_frontend.requests.structured import structured_outputs_of
from pagoda_frontend.serving.served_model import ServedModel


def sampling_params_of(
    body: GenerationBody,
    *,
    model: ServedModel,
    max_logprobs: int,
    choices: Choices,
    logprobs: int | None,
    max_tokens: int | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """The sampling parameters of `body`, checked against model and server.

    Args:
        max_logprobs: the server's bound; -1 means no bound.
        prompt_logprobs: None takes the body's value.

    Raises:
        InvalidRequest: `field` names the field.
    """
    check_supported(body)
    structured_outputs = model.structured_outputs.applied_to(structured_outputs_of(body))
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
    check_sampling_params(params, vocab_size=model.vocab_size, max_logprobs=max_logprobs)
    params.structured_outputs = structured_outputs
    if params.bad_words:
        params.bad_words_token_ids = bad_words_token_ids(params.bad_words, model.tokenizer)
    return params


def body_truncation(body: GenerationBody, *, params: SamplingParams, model: ServedModel) -> Truncation | None:
    """The truncation of the prompt that `body` asks for.

    Raises:
        InvalidRequest: as `truncation_of`.
    """
    return truncation_of(
        body.truncate_prompt_tokens,
        body.truncation_side,
        max_tokens=params.max_tokens,
        max_model_len=model.max_model_len,
    )
