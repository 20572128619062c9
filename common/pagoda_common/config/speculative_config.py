"""The options of --speculative-config, with vLLM's keys: how a worker drafts tokens. Knows no request's state."""

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from pagoda_common.config.checkpoint.generation_config import parse_object
from pagoda_common.errors import ConfigError
from pagoda_common.params.sampling_params import SamplingParams

CAPABILITY = "speculation"
"""Capability of a worker that makes and verifies drafts."""
METHODS = ("ngram",)
MAX_DRAFT_TOKENS = 64
MAX_NGRAM = 32
_FIELD = "speculative_config"
_OF_DRAFT_MODELS = ("model", "draft_tensor_parallel_size", "draft_model_config", "quantization", "revision")
"""Keys of vLLM that describe a model which makes drafts."""
_NGRAM_MODELS = ("ngram", "[ngram]")
"""Names of no model: drafts come from the text itself."""
_OTHER_METHODS = ("draft_model", "eagle", "eagle3", "medusa", "mlp_speculator", "mtp", "suffix", "ngram_gpu")
"""Methods of vLLM."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculativeConfig:
    """Speculative decoding by prompt lookup: what followed the last tokens where they stood before is tried again."""

    method: str = "ngram"
    """How drafts are made; ``ngram`` is prompt lookup."""
    num_speculative_tokens: int = 0
    """Most draft tokens of a sequence in a step; 0 turns speculation off."""
    prompt_lookup_max: int = 5
    """Most last tokens that are looked for."""
    prompt_lookup_min: int = 5
    """Fewest; a match of more tokens goes before one of fewer."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(f"{_FIELD}: method is {self.method!r}, must be one of {', '.join(METHODS)}", field=_FIELD)
        _check("num_speculative_tokens", self.num_speculative_tokens, 0, MAX_DRAFT_TOKENS)
        _check("prompt_lookup_max", self.prompt_lookup_max, 1, MAX_NGRAM)
        _check("prompt_lookup_min", self.prompt_lookup_min, 1, MAX_NGRAM)
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"{_FIELD}: prompt_lookup_min is {self.prompt_lookup_min}, must be at most prompt_lookup_max "
                f"({self.prompt_lookup_max})",
                field=_FIELD,
            )

    @property
    def is_on(self) -> bool:
        """Whether there are any drafts."""
        return self.num_speculative_tokens > 0

    def to_json(self) -> str:
        """Text that `speculative_config` reads; empty when speculation is off."""
        return json.dumps(asdict(self)) if self.is_on else ""


def _check(name: str, value: object, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(f"{_FIELD}: {name} is {value!r}, must be between {least} and {most}", field=_FIELD)


def speculative_config(given: str | dict[str, Any] | None) -> SpeculativeConfig:
    """The config in a JSON object, or in its text; off for nothing. Of prompt_lookup_max and _min, one is the other's
    default, as in vLLM.

    Raises:
        ConfigError: it is no such object; `field` is speculative_config.
    """
    values = parse_object(given, field=_FIELD) if isinstance(given, str) else dict(given or {})
    if not values:
        return SpeculativeConfig()
    if values.get("model") in _NGRAM_MODELS:  # vLLM's older way to say it
        values = {"method": "ngram", **values}
        del values["model"]
    method = values.get("method")
    if any(values.get(name) for name in _OF_DRAFT_MODELS) or (isinstance(method, str) and method in _OTHER_METHODS):
        asked = method if method in _OTHER_METHODS else "a draft model"
        message = f"{_FIELD}: {asked} is not supported: drafts come from the text itself (method ngram)"
        raise ConfigError(message, field=_FIELD)
    known = [each.name for each in fields(SpeculativeConfig)]
    for name in values:
        if name not in known:
            raise ConfigError(f"{_FIELD}: unknown key {name!r}, must be one of {', '.join(known)}", field=_FIELD)
    for name, other in (("prompt_lookup_max", "prompt_lookup_min"), ("prompt_lookup_min", "prompt_lookup_max")):
        if values.get(name) is None:
            values.pop(name, None)
            values |= {name: values[other]} if values.get(other) is not None else {}
    number = values.get("num_speculative_tokens")
    _check("num_speculative_tokens", number, 1, MAX_DRAFT_TOKENS)
    return SpeculativeConfig(**values)


def takes_drafts(params: SamplingParams) -> bool:
    """Whether drafts can be verified for a sequence with these parameters: what is sampled must depend on nothing that
    is kept from token to token. The others are decoded token by token."""
    return (
        params.structured_outputs is None
        and not params.extra_args  # a logits processor may want it
        and params.presence_penalty == 0
        and params.frequency_penalty == 0
        and params.repetition_penalty == 1
        and not params.min_tokens
        and not params.logit_bias
        and not params.allowed_token_ids
        and not params.bad_words_token_ids
    )
