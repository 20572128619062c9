"""Turns a request body into SamplingParams: applies the model's defaults, checks vocabulary and context, refuses
unsupported fields."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from pagoda_common.errors import InvalidRequest, RequestTooLong
from pagoda_common.params.logprobs_bound import exceeds_max_logprobs
from pagoda_common.params.sampling_params import SAMPLING_FIELDS, SamplingParams
from pagoda_frontend.openai.protocol import GenerationBody, RequestBody

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for completions. Conversations get the rest of the context."""

_BY_HAND = ("max_tokens", "logprobs", "prompt_logprobs", "truncate_prompt_tokens")
"""Fields with another name or meaning in bodies than in SamplingParams."""
_PLAIN = [row for row in SAMPLING_FIELDS.values() if row.apis and row.kind != "other" and row.name not in _BY_HAND]
"""Fields that are copied from a body into SamplingParams."""

MAX_PROMPT_LOGPROBS = 1024**2
"""Maximum number of entries in one answer, over all prompts: about 80 MB of JSON."""
MAX_OUTPUT_LOGPROBS = 4 * 1024**2
"""Maximum number of entries in the outputs of a call with several sequences, which may be held until the last one ends:
about 350 MB."""
MAX_CACHE_SALT_CHARS = 128
NOT_IN_CACHE_SALT = "@/\\\0"
"""Characters with a special meaning in keys of cache stores."""

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "prompt_embeds": (),
    "logits_processors": ([],),
    "audio": (),
    "modalities": (["text"],),
    "repetition_detection": (),
}
"""Fields that are not supported yet, with the values (besides null) that have no effect."""


@dataclass(frozen=True, slots=True, init=False)
class SamplingDefaults:
    """Sampling defaults of the model's generation_config.json."""

    values: Mapping[str, Any]
    """By field name of SamplingParams; only those that the file sets."""
    max_new_tokens: int | None
    """Maximum tokens of any request."""

    def __init__(self, *, max_new_tokens: int | None = None, **values: Any) -> None:
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "max_new_tokens", max_new_tokens)


@functools.lru_cache(maxsize=4)
def sampling_defaults(generation_config_json: str) -> SamplingDefaults:
    """The defaults in a generation_config.json ("" when the model has none); values of the wrong type are left out."""
    config = orjson.loads(generation_config_json) if generation_config_json else {}
    values: dict[str, Any] = {}
    for row in SAMPLING_FIELDS.values():
        value = config.get(row.generation_config)
        if isinstance(value, int if row.kind == "integer" else int | float) and not isinstance(value, bool):
            values[row.name] = value
    return SamplingDefaults(max_new_tokens=values.pop("max_tokens", None), **values)


def check_supported(body: GenerationBody) -> None:
    """Refuse fields that would be ignored silently.

    Raises:
        InvalidRequest: a field asks for something that is not supported yet; `field` names it.
    """
    check_unsupported(body, UNSUPPORTED)
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream=true", field="stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest("prompt_logprobs is not available with stream=true", field="prompt_logprobs")
    check_cache_salt(body.cache_salt)


def check_unsupported(body: RequestBody, unsupported: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises InvalidRequest when a field that `body` does not define has a value that is not in `unsupported`."""
    extra = body.model_extra or {}
    for name in unsupported.keys() & extra.keys():
        if extra[name] is not None and extra[name] not in unsupported[name]:
            raise InvalidRequest(f"{name} is not supported yet", field=name)


def check_cache_salt(salt: str | None) -> None:
    """Raises InvalidRequest when `salt` is empty or too long, or has a character that it must not have."""
    if salt is None:
        return
    if not salt:
        raise InvalidRequest("cache_salt must not be empty, got ''", field="cache_salt")
    if len(salt) > MAX_CACHE_SALT_CHARS:
        message = f"cache_salt must have at most {MAX_CACHE_SALT_CHARS} characters, got {len(salt)}"
        raise InvalidRequest(message, field="cache_salt")
    wrong = set(NOT_IN_CACHE_SALT) & set(salt)
    if wrong:
        message = f"cache_salt must not contain any of '@', '/', '\\' and NUL, got {min(wrong)!r}"
        raise InvalidRequest(message, field="cache_salt")


def make_sampling_params(
    body: GenerationBody,
    *,
    defaults: SamplingDefaults,
    logprobs: int | None,
    max_tokens: int | None,
    prompt_logprobs: int | None = None,
    n: int | None = None,
    is_search: bool = False,
) -> SamplingParams:
    """Precedence: the request, then the model's generation_config.json, then OpenAI's default.

    Args:
        logprobs: top log probabilities per output token; None for none.
        prompt_logprobs: the same for prompt tokens.
        n: number of sequences to generate, if not the body's n.
        is_search: this is a beam search, which has no temperature and no filters.

    Raises:
        InvalidRequest: a value is out of its bounds; `field` names it.
    """
    values: dict[str, Any] = {"logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
    if body.logprob_token_ids and logprobs is None:
        raise InvalidRequest("logprob_token_ids needs logprobs", field="logprob_token_ids")
    if not is_search:
        values |= defaults.values
    for row in _PLAIN:
        value = getattr(body, row.name)
        if value is not None and not (is_search and row.search == "ignored"):
            values[row.name] = value
    if max_tokens is not None and defaults.max_new_tokens is not None and max_tokens > defaults.max_new_tokens:
        max_tokens = defaults.max_new_tokens
    values["max_tokens"] = max_tokens if max_tokens is not None else defaults.max_new_tokens
    if body.logit_bias is not None:
        values["logit_bias"] = {_token_id(key): value for key, value in body.logit_bias.items()}
    if n is not None:
        values["n"] = n
    if body.vllm_xargs:
        values["extra_args"] = body.vllm_xargs
    try:
        return SamplingParams(**values)
    except InvalidRequest as error:
        if error.field != "extra_args":
            raise
        raise InvalidRequest(error.message.replace("extra_args", "vllm_xargs"), field="vllm_xargs") from error


def _token_id(key: str) -> int:
    try:
        return int(key)
    except ValueError:
        raise InvalidRequest(f"logit_bias keys must be token ids, got {key[:100]!r}", field="logit_bias") from None


def check_sampling_params(params: SamplingParams, *, vocab_size: int, max_logprobs: int) -> None:
    """Checks beyond SamplingParams: the vocabulary and the server's limit on logprobs.

    Raises:
        InvalidRequest: `field` names the field.
    """
    check_token_ids(params.stop_token_ids or (), vocab_size=vocab_size, field="stop_token_ids")
    check_token_ids(params.allowed_token_ids or (), vocab_size=vocab_size, field="allowed_token_ids")
    check_token_ids(tuple(params.logit_bias or ()), vocab_size=vocab_size, field="logit_bias")
    check_token_ids(tuple(params.logprob_token_ids or ()), vocab_size=vocab_size, field="logprob_token_ids")
    for words in params.bad_words_token_ids:
        check_token_ids(words, vocab_size=vocab_size, field="bad_words_token_ids")
    for name, value in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if exceeds_max_logprobs(value, max_logprobs=max_logprobs, vocab_size=vocab_size):
            raise InvalidRequest(f"{name} must be at most {max_logprobs}, got {value}", field=name)


def check_prompt_logprobs(params: SamplingParams, *, num_prompt_tokens: int, vocab_size: int) -> None:
    """Raises InvalidRequest when the log probabilities of `num_prompt_tokens` are more than an answer can hold."""
    if params.prompt_logprobs is None:
        return
    num_each = (vocab_size if params.prompt_logprobs == -1 else params.prompt_logprobs) + 1
    if num_prompt_tokens * num_each > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"prompt_logprobs of {num_prompt_tokens} tokens with {num_each} entries each are too many: there may be at "
            f"most {MAX_PROMPT_LOGPROBS} entries, got {num_prompt_tokens * num_each}",
            field="prompt_logprobs",
        )


def check_output_logprobs(params: Sequence[SamplingParams], *, vocab_size: int) -> None:
    """Raises InvalidRequest when the log probabilities of all outputs may be more than an answer can hold.

    One sequence is always accepted, because the context bounds it.

    Args:
        params: one per prompt, with max_tokens that fit the context.
    """
    first = params[0]
    if first.logprobs is None or len(params) * first.n == 1:
        return
    num_each = (vocab_size if first.logprobs == -1 else first.logprobs) + 1
    num_tokens = sum(one.n * (one.max_tokens or 0) for one in params)
    if num_tokens * num_each > MAX_OUTPUT_LOGPROBS:
        raise InvalidRequest(
            f"logprobs of {len(params) * first.n} sequences with {num_tokens} tokens in all and {num_each} entries "
            f"each are too many: there may be at most {MAX_OUTPUT_LOGPROBS} entries, got {num_tokens * num_each}; "
            "lower max_tokens or n",
            field="logprobs",
        )


def check_token_ids(token_ids: Sequence[int], *, vocab_size: int, field: str) -> None:
    """Raises InvalidRequest when one of `token_ids` is not in the vocabulary."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        bound = f"must be below {vocab_size}" if wrong >= 0 else "must be at least 0"
        raise InvalidRequest(f"{field}: token id {wrong} is out of vocabulary, {bound}", field=field)


def fit_to_context(params: SamplingParams, *, num_prompt_tokens: int, max_model_len: int, field: str) -> SamplingParams:
    """`params` with max_tokens limited to the room that the prompt leaves in the context.

    Raises:
        InvalidRequest: the prompt is empty.
        RequestTooLong: the prompt leaves no room for a token.
    """
    if num_prompt_tokens == 0:
        raise InvalidRequest(f"{field} is empty: the decoder prompt cannot be empty", field=field)
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise RequestTooLong(too_long(str(num_prompt_tokens), max_model_len), field=field)
    max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
    if params.min_tokens > max_tokens:
        message = f"min_tokens must be at most max_tokens ({max_tokens}), got {params.min_tokens}"
        raise InvalidRequest(message, field="min_tokens")
    return params.with_changes(max_tokens=max_tokens)


def too_long(num_tokens: str, max_model_len: int) -> str:
    """A message that clients such as LiteLLM recognize as a full context."""
    return (
        f"This model's maximum context length is {max_model_len} tokens, but the prompt has {num_tokens} tokens "
        f"and at least one must be left for the output."
    )
