"""Checks users' prompts and turns them into token ids, before anything is submitted."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NotRequired, TypeAlias, TypedDict

from pagoda.v1 import types_pb2
from pagoda_common.errors import InvalidRequest, RequestTooLong
from pagoda_common.params.logprobs_bound import exceeds_max_logprobs
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_common.params.truncation import truncation_of
from pagoda_common.text.tokenizer import Tokenizer


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    """Their text, for the output alone."""
    cache_salt: NotRequired[str]


NOT_TEXT = frozenset({"multi_modal_data", "multi_modal_uuids", "prompt_embeds", "encoder_prompt"})
"""Keys of vLLM's prompts that ask for what models of text cannot read."""

TOKENIZATION = ("add_special_tokens", "truncate_prompt_tokens")
"""Keys of tokenization_kwargs."""

PromptInput: TypeAlias = str | list[int] | TextPrompt | TokensPrompt
PromptType: TypeAlias = PromptInput
"""vLLM's name for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A prompt ready to be submitted."""

    text: str | None
    """None for a prompt of token ids without their text."""
    token_ids: list[int]
    cache_salt: str = ""


def _is_token_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def as_prompt_list(prompts: PromptInput | Sequence[PromptInput]) -> list[PromptInput]:
    """One prompt, or several, as a list."""
    if isinstance(prompts, str | Mapping) or _is_token_ids(prompts):
        return [prompts]  # type: ignore[list-item]  # a list of numbers is one prompt
    if not isinstance(prompts, Sequence):
        raise InvalidRequest(f"prompts must be a prompt or a list of prompts, got {prompts!r}", field="prompts")
    return list(prompts)  # type: ignore[arg-type]  # each is checked where it is used


def tokenization_options(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The tokenization_kwargs of a call.

    Raises:
        InvalidRequest: a key is unknown.
    """
    options = dict(given or {})
    for name in options:
        if name not in TOKENIZATION:
            told = f"tokenization_kwargs has {name!r}, must be {' and '.join(TOKENIZATION)}"
            raise InvalidRequest(told, field="tokenization_kwargs")
    return options


def with_truncation(params: SamplingParams, options: Mapping[str, Any]) -> SamplingParams:
    """`params` with the truncate_prompt_tokens of tokenization_kwargs, where these have it."""
    if "truncate_prompt_tokens" not in options:
        return params
    return replace(params, truncate_prompt_tokens=options["truncate_prompt_tokens"])


def read_prompts(
    prompts: Sequence[PromptInput],
    *,
    tokenizer: Tokenizer,
    model_info: types_pb2.ModelInfo,
    add_special_tokens: bool = True,
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    num_output_tokens: int = 1,
) -> list[Prompt]:
    """Check, encode and truncate `prompts`.

    Args:
        params: one for all, or one per prompt; they say how prompts are truncated.
        num_output_tokens: there must be room for so many.
        add_special_tokens: False for rendered conversations, whose template wrote them.

    Raises:
        InvalidRequest: one is empty, too long or not a prompt; `field` says which, such as "prompts[3]".
    """
    texts, ids_of, salts = [], {}, []
    for place, prompt in enumerate(prompts):
        text, ids, salt = read_prompt(prompt, f"prompts[{place}]")
        salts.append(salt)
        texts.append(text)
        if ids is not None:
            ids_of[place] = ids
    places = [place for place in range(len(prompts)) if place not in ids_of]
    encoded = tokenizer.encode_batch([texts[place] or "" for place in places], add_special_tokens=add_special_tokens)
    ids_of |= dict(zip(places, encoded, strict=True))
    for place in range(len(prompts)):
        own = params[place] if isinstance(params, Sequence) and place < len(params) else params
        if isinstance(own, SamplingParams) and own.truncate_prompt_tokens is not None:
            ids_of[place] = _truncated(ids_of[place], own, model_info)
        _check_token_ids(ids_of[place], model_info, f"prompts[{place}]", num_output_tokens)
    return [
        Prompt(text=text, token_ids=ids_of[place], cache_salt=salt)
        for place, (text, salt) in enumerate(zip(texts, salts, strict=True))
    ]


def _truncated(token_ids: list[int], params: SamplingParams, model_info: types_pb2.ModelInfo) -> list[int]:
    truncation = truncation_of(
        params.truncate_prompt_tokens, "left", max_tokens=params.max_tokens, max_model_len=model_info.max_model_len
    )
    return token_ids if truncation is None else truncation.apply(token_ids)


def read_prompt(prompt: Any, field: str) -> tuple[str | None, list[int] | None, str]:
    """Text if there is one, token ids if they are given, and the cache salt."""
    text, salt = None, ""
    if isinstance(prompt, Mapping):
        for name in prompt.keys() & NOT_TEXT:
            if prompt[name]:
                raise InvalidRequest(f"{name} is not supported: models take text only", field=field)
        salt = prompt.get("cache_salt") or ""
        if prompt.get("prompt_token_ids") is not None:
            text, prompt = prompt.get("prompt"), prompt["prompt_token_ids"]
        else:
            prompt = prompt.get("prompt")
    if isinstance(prompt, str):
        if not prompt:
            raise InvalidRequest("prompt is empty: the decoder prompt cannot be empty", field=field)
        return prompt, None, salt
    if isinstance(prompt, Sequence):
        return text, [_plain_int(token_id) for token_id in prompt], salt
    raise InvalidRequest(f"a prompt must be a text or a list of token ids, got {prompt!r}", field=field)


def _plain_int(token_id: Any) -> Any:
    """numpy's integers as Python's; anything else as it is, to be refused with its name."""
    return token_id if isinstance(token_id, bool) or not hasattr(token_id, "__index__") else token_id.__index__()


def _check_token_ids(token_ids: list[Any], model_info: types_pb2.ModelInfo, field: str, num_output_tokens: int) -> None:
    if not token_ids:
        raise InvalidRequest("prompt is empty: the decoder prompt cannot be empty", field=field)
    for token_id in token_ids:
        if type(token_id) is not int or not 0 <= token_id < model_info.vocab_size:
            bound = f"must be a token id from 0 to {model_info.vocab_size - 1}"
            fault = "out of vocabulary" if type(token_id) is int else "no token id"
            raise InvalidRequest(f"prompt has token {token_id!r}, which is {fault}: it {bound}", field=field)
    num_tokens, bound_tokens = len(token_ids), model_info.max_model_len
    bound = f"This model's maximum context length is {bound_tokens} tokens"
    if num_tokens > bound_tokens:
        raise RequestTooLong(f"{bound}, but the prompt has {num_tokens} tokens.", field=field)
    if num_tokens + num_output_tokens > bound_tokens:
        rest = "and at least one must be left for the output"
        raise RequestTooLong(f"{bound}, but the prompt has {num_tokens} tokens {rest}.", field=field)


def check_params(params: SamplingParams, *, model_info: types_pb2.ModelInfo, max_logprobs: int | None) -> None:
    """Check what needs the model to be known.

    Args:
        max_logprobs: bound on logprobs; None leaves it to the engine, -1 is none.

    Raises:
        InvalidRequest: `field` names the parameter.
    """
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        bound = -1 if max_logprobs is None else max_logprobs
        if exceeds_max_logprobs(value, max_logprobs=bound, vocab_size=model_info.vocab_size):
            raise InvalidRequest(f"{name} is {value}, max_logprobs is {max_logprobs}", field=name)
    for name in ("allowed_token_ids", "logit_bias", "logprob_token_ids", "stop_token_ids"):
        largest = max(getattr(params, name) or (0,))
        if largest >= model_info.vocab_size:
            raise InvalidRequest(f"{name} has token {largest}, the vocabulary has {model_info.vocab_size}", field=name)
