"""Log probabilities in OpenAI's two shapes: parallel lists for completions, one object per token for conversations."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pagoda_common.errors import InvalidRequest
from pagoda_common.params.logprobs_bound import exceeds_max_logprobs
from pagoda_common.params.outputs import TokenLogprobs
from pagoda_common.text.tokenizer import Tokenizer
from pagoda_frontend.openai.mapped import Mapped
from pagoda_frontend.openai.protocol import ChatBody, GenerationBody

LEAST_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON cannot write."""


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) and logprob > LEAST_LOGPROB else LEAST_LOGPROB


def _top(position: TokenLogprobs, num_top: int) -> list[tuple[int, float]]:
    """The likeliest tokens, at most `num_top` (-1: all), each once."""
    unique = dict(zip(position.token_ids, position.logprobs, strict=True))
    ranked = sorted(unique.items(), key=lambda item: -item[1])
    return ranked if num_top == -1 else ranked[:num_top]


def prompt_logprobs_by_id(positions: Sequence[TokenLogprobs | None] | None, tokenizer: Tokenizer) -> Mapped | None:
    """vLLM's shape of prompt_logprobs: one object per prompt token, from token id (as text) to logprob, rank and
    decoded token.

    null for a token without a distribution (the first), and instead of the list when none is requested.
    """

    def shown(position: TokenLogprobs | None) -> dict[str, dict[str, Any]] | None:
        if position is None:
            return None
        entries: dict[str, dict[str, Any]] = {}
        for rank, (token_id, logprob) in enumerate(zip(position.token_ids, position.logprobs, strict=True)):
            if str(token_id) not in entries:
                entries[str(token_id)] = {
                    "logprob": _finite(logprob),
                    "rank": rank or position.sampled_rank,
                    "decoded_token": tokenizer.token_text(token_id),
                }
        return entries

    return None if positions is None else Mapped(shown, positions)


@dataclass(frozen=True, kw_only=True, slots=True)
class LogprobWriter:
    """Writes the log probabilities of one request."""

    tokenizer: Tokenizer
    num_top: int
    """Number of tokens per position besides the sampled one; -1 is all."""
    as_token_ids: bool = False
    """Write tokens as "token_id:123" instead of their text."""

    def _text(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self.as_token_ids else self.tokenizer.token_text(token_id)

    def _distinct(self, token_id: int) -> str:
        """A name for a token whose text another token shares: the bytes of a partial character, else the id."""
        raw = self.tokenizer.token_bytes(token_id) or b""
        if raw.decode(errors="replace").encode() == raw:
            return f"token_id:{token_id}"
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def for_completion(self, positions: Sequence[TokenLogprobs | None], text_offsets: Sequence[int]) -> dict[str, Any]:
        """tokens, token_logprobs, top_logprobs (the sampled token included) and text_offset.

        Where a position is None (only for `for_prompt`, which gives `tokens`), token_logprobs and top_logprobs have
        null.
        """
        return {
            "text_offset": list(text_offsets),
            "token_logprobs": Mapped(lambda one: None if one is None else _finite(one.logprobs[0]), positions),
            "tokens": Mapped(lambda one: self._text(one.token_ids[0]), positions),
            "top_logprobs": Mapped(self._named, positions),
        }

    def for_prompt(
        self, token_ids: Sequence[int], positions: Sequence[TokenLogprobs | None], text_offsets: Sequence[int]
    ) -> dict[str, Any]:
        """As `for_completion`, for an echoed prompt: a token without a distribution (the first) has null."""
        return self.for_completion(positions, text_offsets) | {"tokens": Mapped(self._text, token_ids)}

    def for_chat(self, positions: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """content: one object per token with its bytes and the likeliest tokens."""
        return {"content": Mapped(self._with_top, positions), "refusal": None}

    def _named(self, position: TokenLogprobs | None) -> dict[str, float] | None:
        """Log probabilities by token name."""
        if position is None:
            return None
        sampled = (position.token_ids[0], position.logprobs[0])
        entries = dict([sampled, *_top(position, self.num_top)])
        named: dict[str, float] = {}
        for token_id, value in entries.items():
            name = self._text(token_id)
            named[self._distinct(token_id) if name in named else name] = _finite(value)
        return named

    def _with_top(self, position: TokenLogprobs) -> dict[str, Any]:
        entry = self._entry(position.token_ids[0], position.logprobs[0])
        entry["top_logprobs"] = [self._entry(*item) for item in _top(position, self.num_top)]
        return entry

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._text(token_id)
        raw = self.tokenizer.token_bytes(token_id)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode() if raw is None else raw)}


def logprob_writer(
    body: GenerationBody, tokenizer: Tokenizer, num_top: int | None, *, as_token_ids: bool
) -> LogprobWriter | None:
    """The writer of the requested log probabilities; None when none are requested.

    Args:
        as_token_ids: write tokens as token_id:N unless the body says otherwise.
    """
    if num_top is None:
        return None
    if body.return_tokens_as_token_ids is not None:
        as_token_ids = body.return_tokens_as_token_ids
    if body.logprob_token_ids:
        num_top = -1  # all that come are those asked for
    return LogprobWriter(tokenizer=tokenizer, num_top=num_top, as_token_ids=as_token_ids)


def num_top_logprobs(body: ChatBody, *, max_logprobs: int, vocab_size: int) -> int | None:
    """Top log probabilities per token of a conversation; None when no log probabilities are requested.

    Raises:
        InvalidRequest: more are requested than `max_logprobs` allows (-1 means no bound); a request of -1 means
        `vocab_size`.
    """
    top = body.top_logprobs
    if top is not None:
        if top < -1:
            raise InvalidRequest(f"top_logprobs must be at least 0, got {top}", field="top_logprobs")
        if exceeds_max_logprobs(top, max_logprobs=max_logprobs, vocab_size=vocab_size):
            raise InvalidRequest(f"top_logprobs must be at most {max_logprobs}, got {top}", field="top_logprobs")
        if top and not body.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs=true", field="top_logprobs")
    return (top or 0) if body.logprobs else None
