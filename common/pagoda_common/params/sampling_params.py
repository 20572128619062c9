"""SamplingParams: what a user may ask of sampling, validated on construction. Names and defaults are vLLM's."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from pagoda_common.errors import InvalidRequest
from pagoda_common.params.structured_outputs import StructuredOutputsParams

MAX_N = 16384
MAX_STOP_STRINGS = 4
MAX_LOGPROB_TOKEN_IDS = 128
MAX_BAD_WORDS = 128
"""Token sequences of bad words; a word may be two, with and without a space before it."""
MAX_BAD_WORD_TOKENS = 256
"""Tokens of one of them."""
INT64 = range(-(2**63), 2**63)
MAX_JSON_DEPTH = 64
"""Levels of objects and lists in extra_args."""
MIN_TEMPERATURE = 0.01
"""Positive temperatures below this are raised to it: the logits would overflow."""
GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this are greedy."""


def _number(name: str, value: Any, bound: str, low: float, high: float, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(f"{name} must be a number, got {value!r}", field=name)
    inside = (low < value if open_low else low <= value) and value <= high
    if not (math.isfinite(value) and inside):
        raise InvalidRequest(f"{name} must be {bound}, got {value}", field=name)


def _integer(name: str, value: Any, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} must be an integer, got {value!r}", field=name)
    if value < low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"between {low} and {high}"
        raise InvalidRequest(f"{name} must be {bound}, got {value}", field=name)


def _token_ids(name: str, ids: Any) -> tuple[int, ...]:
    if isinstance(ids, str) or not isinstance(ids, Sequence):
        raise InvalidRequest(f"{name} must be a list of token ids, got {ids!r}", field=name)
    for token_id in ids:
        _integer(name, token_id, 0, 2**32 - 1)
    return tuple(dict.fromkeys(ids))


def _check_json(name: str, value: Any, depth: int = 0) -> None:
    """Raises InvalidRequest unless `value` is made of what JSON can carry with its type unchanged."""
    if depth > MAX_JSON_DEPTH:
        raise InvalidRequest(f"{name} must be nested at most {MAX_JSON_DEPTH} levels deep", field=name)
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise InvalidRequest(f"{name} must have strings as keys, got {list(value)[:8]!r}", field=name)
        for item in value.values():
            _check_json(name, item, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            _check_json(name, item, depth + 1)
    elif isinstance(value, int) and not isinstance(value, bool):
        if value not in INT64:
            raise InvalidRequest(f"{name}: integers must fit 64 bits, got {value}", field=name)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise InvalidRequest(f"{name}: numbers must be finite, got {value}", field=name)
    elif value is not None and not isinstance(value, str | bool):
        raise InvalidRequest(f"{name}: values must be of JSON's types, got {value!r}", field=name)


class RequestOutputKind(Enum):
    """How much each item of an asynchronous generation holds (the values are vLLM's)."""

    CUMULATIVE = 0
    """All output so far."""
    DELTA = 1
    """What is new."""
    FINAL_ONLY = 2
    """One item, at the end."""


@dataclass(kw_only=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when a sequence ends.

    Raises:
        InvalidRequest: a value is out of its bounds; `field` names it.
    """

    n: int = 1
    """Number of sequences to generate from the prompt."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token already in the output; in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time it is in the output; in [-2, 2]."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output; > 0, 1 is off."""
    temperature: float = 1.0
    """Softmax temperature in [0, 2]; 0 is greedy."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probabilities sum to at least this; in (0, 1]."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 or -1 is off."""
    min_p: float = 0.0
    """Keep tokens at least this many times as likely as the likeliest; in [0, 1]."""
    seed: int | None = None
    """Seed of the counter-based generator; None or -1 draws one."""
    stop: str | Sequence[str] | None = None
    """At most 4 strings that end the sequence; stored as a list."""
    stop_token_ids: Sequence[int] | None = None
    """Token ids that end the sequence; stored as a list."""
    ignore_eos: bool = False
    """Do not end at the model's end-of-sequence tokens."""
    max_tokens: int | None = 16
    """Most tokens to generate; None is up to the context."""
    min_tokens: int = 0
    """End tokens may not be sampled before this many tokens."""
    logprobs: int | None = None
    """Top log probabilities per output token; -1 is the vocabulary."""
    prompt_logprobs: int | None = None
    """The same for prompt tokens."""
    detokenize: bool = True
    """Make text of the tokens."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    spaces_between_special_tokens: bool = True
    """Without effect, as in transformers: fast tokenizers decide this themselves."""
    include_stop_str_in_output: bool = False
    """Keep the stop string in the text."""
    logit_bias: dict[int, float] | None = None
    """Added to logits by token id; values are clipped to [-100, 100]."""
    allowed_token_ids: Sequence[int] | None = None
    """If given, only these tokens may be sampled; stored as a tuple."""
    bad_words_token_ids: Sequence[Sequence[int]] = field(default=(), repr=False)
    """Token sequences that may not be completed (made from bad words by whoever knows the tokenizer)."""
    bad_words: Sequence[str] | None = None
    """Words that may not be written, at most 128 with and without a space before them; stored as a list."""
    logprob_token_ids: Sequence[int] | None = None
    """Log probabilities of exactly these tokens instead of the likeliest ones, at most 128; stored as a tuple."""
    truncate_prompt_tokens: int | None = None
    """Keep this many tokens of the prompt's end; -1 is as many as the context leaves beside max_tokens."""
    structured_outputs: StructuredOutputsParams | None = None
    """What the output must match; None is anything."""
    extra_args: dict[str, Any] | None = None
    """Arguments of logits processors, of JSON's types."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """What each item of an asynchronous generation holds."""
    logits_processors: None = None
    """Not per request: load a class with `logits_processors` of LLM, or --logits-processors."""

    def __post_init__(self) -> None:
        _integer("n", self.n, 1, MAX_N)
        _number("presence_penalty", self.presence_penalty, "in [-2, 2]", -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, "in [-2, 2]", -2.0, 2.0)
        bound = "finite and greater than 0"
        _number("repetition_penalty", self.repetition_penalty, bound, 0.0, math.inf, open_low=True)
        _number("temperature", self.temperature, "in [0, 2]", 0.0, 2.0)
        _number("top_p", self.top_p, "in (0, 1]", 0.0, 1.0, open_low=True)
        _integer("top_k", self.top_k, -1, 2**31 - 1)
        _number("min_p", self.min_p, "in [0, 1]", 0.0, 1.0)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}", field="min_tokens"
            )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), -1)
        self._check_ending()
        self._check_bias()
        self._check_logprob_token_ids()
        self._check_extras()
        self._normalise()

    def _check_ending(self) -> None:
        stop: Any = [] if self.stop is None else [self.stop] if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, Sequence) or not all(isinstance(text, str) for text in stop):
            raise InvalidRequest(f"stop must be a string or a list of strings, got {self.stop!r}", field="stop")
        if len(stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"stop must have at most {MAX_STOP_STRINGS} strings, got {len(stop)}", field="stop")
        if not all(stop):
            raise InvalidRequest("stop must not contain an empty string", field="stop")
        if stop and not self.detokenize:
            raise InvalidRequest("stop strings need detokenize=True", field="stop")
        self.stop = list(stop)
        self.stop_token_ids = list(_token_ids("stop_token_ids", self.stop_token_ids or ()))

    def _check_bias(self) -> None:
        if self.logit_bias is not None:
            for token_id, value in self.logit_bias.items():
                _integer("logit_bias", token_id, 0, 2**32 - 1)
                _number("logit_bias", value, "finite", -math.inf, math.inf)
            self.logit_bias = {token_id: max(-100.0, min(100.0, value)) for token_id, value in self.logit_bias.items()}
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise InvalidRequest("allowed_token_ids must not be empty", field="allowed_token_ids")

    def _check_logprob_token_ids(self) -> None:
        self.logprob_token_ids = _token_ids("logprob_token_ids", self.logprob_token_ids or ())
        num_ids = len(self.logprob_token_ids)
        if num_ids > MAX_LOGPROB_TOKEN_IDS:
            message = f"logprob_token_ids must have at most {MAX_LOGPROB_TOKEN_IDS} token ids, got {num_ids}"
            raise InvalidRequest(message, field="logprob_token_ids")
        if num_ids:
            if self.logprobs not in (None, 0, num_ids):
                message = f"logprobs must be the number of logprob_token_ids ({num_ids}), got {self.logprobs}"
                raise InvalidRequest(message, field="logprobs")
            self.logprobs = 0

    def _check_extras(self) -> None:
        words: Any = [] if self.bad_words is None else self.bad_words
        if isinstance(words, str) or not isinstance(words, Sequence) or not all(isinstance(w, str) for w in words):
            raise InvalidRequest(f"bad_words must be a list of strings, got {words!r}", field="bad_words")
        if not all(word.strip() for word in words):
            raise InvalidRequest("bad_words must not contain an empty string", field="bad_words")
        for num_words in (len(words), len(self.bad_words_token_ids)):
            if num_words > MAX_BAD_WORDS:
                message = f"bad_words must be at most {MAX_BAD_WORDS} token sequences, got {num_words}"
                raise InvalidRequest(message, field="bad_words")
        for token_ids in self.bad_words_token_ids:
            if len(token_ids) > MAX_BAD_WORD_TOKENS:
                message = f"bad_words must have at most {MAX_BAD_WORD_TOKENS} tokens each, got {len(token_ids)}"
                raise InvalidRequest(message, field="bad_words")
        self.bad_words = list(words)
        if self.truncate_prompt_tokens is not None:
            _integer("truncate_prompt_tokens", self.truncate_prompt_tokens, -1, 2**31 - 1)
        if self.extra_args is not None:
            if not isinstance(self.extra_args, Mapping):
                raise InvalidRequest(f"extra_args must be an object, got {self.extra_args!r}", field="extra_args")
            _check_json("extra_args", self.extra_args)
        if self.structured_outputs is not None and not isinstance(self.structured_outputs, StructuredOutputsParams):
            raise InvalidRequest(
                f"structured_outputs must be StructuredOutputsParams, got {self.structured_outputs!r}"[:300],
                field="structured_outputs",
            )
        if self.logits_processors is not None:
            raise InvalidRequest(
                "logits_processors are not per request: load a class with --logits-processors (or logits_processors of "
                "LLM) and give its arguments in extra_args",
                field="logits_processors",
            )

    def _normalise(self) -> None:
        if self.seed == -1:
            self.seed = None
        elif self.seed is not None:
            self.seed %= 2**64
        if self.temperature < GREEDY_TEMPERATURE:
            if self.n > 1:
                raise InvalidRequest(f"n must be 1 when temperature is 0 (greedy), got {self.n}", field="n")
            self.temperature, self.top_p, self.top_k, self.min_p = 0.0, 1.0, 0, 0.0
        else:
            self.temperature = max(self.temperature, MIN_TEMPERATURE)
        self.top_k = max(self.top_k, 0)

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0.0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return tuple(self.stop or ())
