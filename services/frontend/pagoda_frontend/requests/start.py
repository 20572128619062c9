"""From prompts and parameters of a body to a run: how many there may be, and whether they fit."""

from collections.abc import Sequence

from pagoda_common.errors import InvalidRequest
from pagoda_common.params.sampling_params import MAX_N, SamplingParams
from pagoda_frontend.openai.protocol import GenerationBody
from pagoda_frontend.requests.choices import Choices
from pagoda_frontend.requests.params import check_prompt_logprobs, fit_to_context
from pagoda_frontend.requests.resume import Resumption
from pagoda_frontend.requests.run import Run
from pagoda_frontend.requests.serving import ServedModel, Serving
from pagoda_frontend.requests.terms import Terms


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
