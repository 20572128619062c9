"""SamplingParams: the user's sampling options, validated on construction. Names and defaults are vLLM's."""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from pagoda_common.errors import InvalidRequest
from pagoda_common.params.fields import (
    EVERYWHERE,
    FINITE,
    UNSIGNED_32,
    check_integer,
    check_number,
    flag,
    integer,
    number,
    other,
    table_of,
    texts,
    token_ids,
)
from pagoda_common.params.structured_outputs import StructuredOutputsParams

MAX_N = 16384
MAX_STOP_STRINGS = 128
"""OpenAI allows 4, its clients of other servers send more; each costs a comparison for each piece of text."""
MAX_LOGPROB_TOKEN_IDS = 128
MAX_STOP_TOKEN_IDS = 1024
MAX_ALLOWED_TOKEN_IDS = 16_384
MAX_BAD_WORDS = 128
"""Token sequences of bad words; a word may be two, with and without a space before it."""
MAX_BAD_WORD_TOKENS = 256
"""Tokens of one of them."""
INT64 = range(-(2**63), 2**63)
MAX_JSON_DEPTH = 64
"""Levels of objects and lists in extra_args."""
MAX_EXTRA_ARGS_BYTES = 32 * 1024
"""Size of extra_args as JSON: scheduler and worker hold it, and each sequence of a request takes it to the worker."""
MAX_EXTRA_ARGS_VALUES = 4096
MAX_LOGIT_BIASES = 1024
"""Tokens with a bias; OpenAI allows 300. Each sequence takes them to the worker."""
MAX_STOP_BYTES = 4096
"""Size of a stop string, in UTF-8."""
MAX_BAD_WORD_BYTES = 4096
"""Size of a bad word, in UTF-8: it is tokenized twice."""
MIN_TEMPERATURE = 0.01
"""Positive temperatures below this are raised to it: the logits would overflow."""
GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this are greedy."""


class _JsonCheck:
    """Whether a value is made of what JSON can carry with its type unchanged, and small; ends as soon as it is not."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._num_bytes = 0
        self._num_values = 0

    def check(self, value: Any, depth: int = 0) -> None:
        """Raises InvalidRequest."""
        name = self._name
        if depth > MAX_JSON_DEPTH:
            raise self._refuse(f"must be nested at most {MAX_JSON_DEPTH} levels deep")
        self._count(value)
        if isinstance(value, Mapping):
            for key, item in value.items():
                if not isinstance(key, str):
                    raise self._refuse(f"must have strings as keys, got {key!r}"[:300])
                self._num_bytes += len(key)
                self.check(item, depth + 1)
        elif isinstance(value, list | tuple):
            for item in value:
                self.check(item, depth + 1)
        elif isinstance(value, int) and not isinstance(value, bool):
            if value not in INT64:
                raise InvalidRequest(f"{name}: integers must fit 64 bits, got {value}"[:300], field=name)
        elif isinstance(value, float):
            if not math.isfinite(value):
                raise InvalidRequest(f"{name}: numbers must be finite, got {value}", field=name)
        elif value is not None and not isinstance(value, str | bool):
            raise InvalidRequest(f"{name}: values must be of JSON's types, got {value!r}"[:300], field=name)

    def _count(self, value: Any) -> None:
        self._num_values += 1
        self._num_bytes += len(value) * (1 if value.isascii() else 4) if isinstance(value, str) else 2
        if self._num_values > MAX_EXTRA_ARGS_VALUES:
            raise self._refuse(f"must have at most {MAX_EXTRA_ARGS_VALUES} values, got more")
        if self._num_bytes > MAX_EXTRA_ARGS_BYTES:
            raise self._refuse(f"must have at most {MAX_EXTRA_ARGS_BYTES} bytes, got more")

    def _refuse(self, fault: str) -> InvalidRequest:
        return InvalidRequest(f"{self._name} {fault}", field=self._name)


def _check_texts(name: str, texts: Sequence[str], max_bytes: int) -> None:
    """Raises InvalidRequest when one of `texts` has more than `max_bytes` bytes in UTF-8."""
    for text in texts:
        if len(text) > max_bytes // 4 and len(text.encode(errors="surrogatepass")) > max_bytes:
            message = f"{name} must have at most {max_bytes} bytes each, got {len(text.encode(errors='surrogatepass'))}"
            raise InvalidRequest(message, field=name)


class RequestOutputKind(Enum):
    """How much each item of an asynchronous generation holds (the values are vLLM's)."""

    CUMULATIVE = 0
    """All output so far."""
    DELTA = 1
    """Each output has the new part."""
    FINAL_ONLY = 2
    """One item, at the end."""


@dataclass(kw_only=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when a sequence ends.

    Raises:
        InvalidRequest: a value is out of its bounds; `field` names it.
    """

    n: int = integer(1, low=1, high=MAX_N, apis=("chat", "completions"), proto="n")
    """Number of sequences to generate from the prompt."""
    presence_penalty: float = number(0.0, low=-2.0, high=2.0, proto="presence_penalty", search="refused")
    """Subtracted from the logit of every token in the output."""
    frequency_penalty: float = number(0.0, low=-2.0, high=2.0, proto="frequency_penalty", search="refused")
    """Subtracted from a token's logit for each time in the output."""
    repetition_penalty: float = number(
        1.0,
        low=0.0,
        is_low_open=True,
        proto="repetition_penalty",
        generation_config="repetition_penalty",
        search="refused",
    )
    """Divides positive and multiplies negative logits of tokens in prompt or output; 1 is off."""
    temperature: float = number(
        1.0, low=0.0, high=2.0, proto="temperature", generation_config="temperature", search="ignored"
    )
    """Softmax temperature; 0 is greedy."""
    top_p: float = number(
        1.0, low=0.0, high=1.0, is_low_open=True, proto="top_p", generation_config="top_p", search="ignored"
    )
    """Keep the smallest set of tokens whose probabilities sum to this; 1 is off."""
    top_k: int = integer(0, low=-1, proto="top_k", generation_config="top_k", search="ignored", column="int64")
    """Keep the k most likely tokens; 0 or -1 is off."""
    min_p: float = number(0.0, low=0.0, high=1.0, proto="min_p", generation_config="min_p", search="ignored")
    """Keep tokens with at least this fraction of the likeliest token's probability; 0 is off."""
    seed: int | None = integer(None, low=-(2**63), high=2**64 - 1, proto="seed")
    """Seed of the counter-based generator; None or -1 draws one."""
    stop: str | Sequence[str] | None = texts(names={"messages": "stop_sequences"})
    """At most 4 strings that end the sequence; stored as a list."""
    stop_token_ids: Sequence[int] | None = token_ids(max_items=MAX_STOP_TOKEN_IDS, proto="stop_token_ids")
    """Token ids that end the sequence; stored as a list."""
    ignore_eos: bool = flag(False, proto="ignore_eos")
    """Do not end at the model's end-of-sequence tokens."""
    max_tokens: int | None = integer(
        16,
        low=1,
        is_optional=True,
        names={"responses": "max_output_tokens"},
        proto="max_tokens",
        generation_config="max_new_tokens",
    )
    """Maximum number of tokens to generate; None is up to the context."""
    min_tokens: int = integer(0, low=0, proto="min_tokens", search="refused", column="int64")
    """End tokens may not be sampled before this many tokens."""
    logprobs: int | None = integer(
        None,
        low=-1,
        high=None,
        apis=("chat", "completions", "responses"),
        names={"chat": "top_logprobs", "responses": "top_logprobs"},
        proto="logprobs",
    )
    """Top log probabilities per output token; -1 is the vocabulary."""
    prompt_logprobs: int | None = integer(
        None, low=-1, high=None, apis=("chat", "completions"), proto="prompt_logprobs", search="refused"
    )
    """Top log probabilities per prompt token; -1 is the vocabulary."""
    detokenize: bool = flag(True, apis=("chat", "completions"))
    """Convert the tokens to text."""
    skip_special_tokens: bool = flag(True)
    """Omit special tokens from the text."""
    spaces_between_special_tokens: bool = flag(True, apis=("chat", "completions", "responses"))
    """Without effect, as in transformers; fast tokenizers decide this themselves."""
    include_stop_str_in_output: bool = flag(False)
    """Keep the stop string in the text."""
    logit_bias: dict[int, float] | None = other(apis=EVERYWHERE, proto="logit_bias", search="refused")
    """Added to logits by token id; values are clipped to [-100, 100]."""
    allowed_token_ids: Sequence[int] | None = token_ids(
        max_items=MAX_ALLOWED_TOKEN_IDS, is_optional=True, proto="allowed_token_ids", search="refused"
    )
    """If given, only these tokens may be sampled; stored as a tuple."""
    bad_words_token_ids: Sequence[Sequence[int]] = other(
        (), is_shown=False, proto="bad_words_token_ids", search="refused"
    )
    """Token sequences that may not be completed; the side with the tokenizer makes them of bad words."""
    bad_words: Sequence[str] | None = texts(search="refused")
    """Words that may not occur in the output; at most 128 with and without a space before them, stored as a list."""
    logprob_token_ids: Sequence[int] | None = token_ids(
        max_items=MAX_LOGPROB_TOKEN_IDS, apis=("chat", "completions"), proto="logprob_token_ids", search="refused"
    )
    """Log probabilities of these tokens instead of the likeliest ones; stored as a tuple."""
    truncate_prompt_tokens: int | None = integer(
        None, low=-1, apis=("chat", "completions", "responses"), names={"responses": "truncation"}
    )
    """Keep this many tokens at the end of the prompt; -1 is as many as the context leaves beside max_tokens."""
    structured_outputs: StructuredOutputsParams | None = other(apis=EVERYWHERE, proto="structured_output")
    """Constraint on the output; None: none."""
    extra_args: dict[str, Any] | None = other(
        apis=EVERYWHERE, names=dict.fromkeys(EVERYWHERE, "vllm_xargs"), proto="extra_args_json", search="refused"
    )
    """Arguments of logits processors, as JSON values."""
    output_kind: RequestOutputKind = other(RequestOutputKind.CUMULATIVE)
    """Content of each item of an asynchronous generation."""
    logits_processors: None = other()
    """Not per request; load a class with `logits_processors` of LLM, or --logits-processors."""

    def __post_init__(self) -> None:
        for name, default, row in _CHECKED:
            value = getattr(self, name)
            if value is not default:
                setattr(self, name, row.checked(value))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}", field="min_tokens"
            )
        self._check_ending()
        self._check_bias()
        self._check_logprob_token_ids()
        self._check_extras()
        self._normalise()

    def _check_ending(self) -> None:
        stop: Any = [] if self.stop is None else [self.stop] if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, Sequence) or not all(isinstance(text, str) for text in stop):
            raise InvalidRequest(f"stop must be a string or a list of strings, got {self.stop!r}"[:300], field="stop")
        if len(stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"stop must have at most {MAX_STOP_STRINGS} strings, got {len(stop)}", field="stop")
        if not all(stop):
            raise InvalidRequest("stop must not contain an empty string", field="stop")
        _check_texts("stop", stop, MAX_STOP_BYTES)
        if stop and not self.detokenize:
            raise InvalidRequest("stop strings need detokenize=True", field="stop")
        self.stop = list(stop)
        self.stop_token_ids = list(self.stop_token_ids or ())

    def _check_bias(self) -> None:
        if self.logit_bias is not None:
            if len(self.logit_bias) > MAX_LOGIT_BIASES:
                message = f"logit_bias must have at most {MAX_LOGIT_BIASES} entries, got {len(self.logit_bias)}"
                raise InvalidRequest(message, field="logit_bias")
            for token_id, value in self.logit_bias.items():
                check_integer("logit_bias", token_id, UNSIGNED_32)
                check_number("logit_bias", value, FINITE)
            self.logit_bias = {token_id: max(-100.0, min(100.0, value)) for token_id, value in self.logit_bias.items()}
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequest("allowed_token_ids must not be empty", field="allowed_token_ids")

    def _check_logprob_token_ids(self) -> None:
        self.logprob_token_ids = self.logprob_token_ids or ()
        num_ids = len(self.logprob_token_ids)
        if num_ids:
            if self.logprobs not in (None, 0, num_ids):
                message = f"logprobs must be the number of logprob_token_ids ({num_ids}), got {self.logprobs}"
                raise InvalidRequest(message, field="logprobs")
            self.logprobs = 0

    def _check_extras(self) -> None:
        words: Any = [] if self.bad_words is None else self.bad_words
        if isinstance(words, str) or not isinstance(words, Sequence) or not all(isinstance(w, str) for w in words):
            raise InvalidRequest(f"bad_words must be a list of strings, got {words!r}"[:300], field="bad_words")
        for num_words in (len(words), len(self.bad_words_token_ids)):
            if num_words > MAX_BAD_WORDS:
                message = f"bad_words must be at most {MAX_BAD_WORDS} token sequences, got {num_words}"
                raise InvalidRequest(message, field="bad_words")
        _check_texts("bad_words", words, MAX_BAD_WORD_BYTES)
        if not all(word.strip() for word in words):
            raise InvalidRequest("bad_words must not contain an empty string", field="bad_words")
        for ids in self.bad_words_token_ids:
            if len(ids) > MAX_BAD_WORD_TOKENS:
                message = f"bad_words must have at most {MAX_BAD_WORD_TOKENS} tokens each, got {len(ids)}"
                raise InvalidRequest(message, field="bad_words")
        self.bad_words = list(words)
        if self.extra_args is not None:
            if not isinstance(self.extra_args, Mapping):
                raise InvalidRequest(f"extra_args must be an object, got {self.extra_args!r}"[:300], field="extra_args")
            _JsonCheck("extra_args").check(self.extra_args)
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
            self.temperature = 0.0
            for name, default in _FILTERS:
                setattr(self, name, default)
        else:
            self.temperature = max(self.temperature, MIN_TEMPERATURE)
        self.top_k = max(self.top_k, 0)

    def with_changes(self, **values: Any) -> "SamplingParams":
        """A copy with other values that the caller vouches for: nothing is checked again, whose cost would be that of
        all fields for each sequence of a request. What is not changed is shared."""
        changed = copy.copy(self)
        for name, value in values.items():
            setattr(changed, name, value)
        return changed

    @property
    def num_bytes(self) -> int:
        """About the size of what is large: the constraint, extra_args, biases and bad words."""
        size = 0 if self.structured_outputs is None else self.structured_outputs.num_bytes
        size += MAX_EXTRA_ARGS_BYTES if self.extra_args else 0
        size += 12 * len(self.logit_bias or ()) + 4 * len(self.allowed_token_ids or ())
        return size + 4 * sum(map(len, self.bad_words_token_ids))

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0.0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return tuple(self.stop or ())


SAMPLING_FIELDS = table_of(SamplingParams)
"""The table of sampling fields: what HTTP bodies, messages, defaults, docs and the worker's columns are made from."""
_CHECKED = [
    (row.name, row.default, row) for row in SAMPLING_FIELDS.values() if row.kind in ("number", "integer", "token_ids")
]
_FILTERS = [
    (row.name, row.default) for row in SAMPLING_FIELDS.values() if row.search == "ignored" and row.name != "temperature"
]
"""Fields that choose among tokens, with the defaults that turn them off."""
