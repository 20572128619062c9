"""Log probabilities in OpenAI's two shapes: parallel lists for completions, one object a token for conversations."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pagoda_common.errors import InvalidRequest
from pagoda_common.params.logprobs_bound import exceeds_max_logprobs
from pagoda_common.params.outputs import TokenLogprobs
from pagoda_common.text.tokenizer import Tokenizer
from pagoda_frontend.openai.protocol import ChatBody, GenerationBody

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot write."""


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) and logprob > LEAST_LOGPROB else LEAST_LOGPROB


def _top(position: TokenLogprobs, num_top: int) -> list[tuple[int, float]]:
    """The likeliest tokens, at most `num_top` (-1: all there are), each once."""
    unique = dict(zip(position.token_ids, position.logprobs, strict=True))
    ranked = sorted(unique.items(), key=lambda item: -item[1])
    return ranked if num_top == -1 else ranked[:num_top]


def prompt_logprobs_by_id(
    positions: Sequence[TokenLogprobs | None] | None, tokenizer: Tokenizer
) -> list[dict[str, dict[str, Any]] | None] | None:
    """vLLM's shape of prompt_logprobs: one object per prompt token, from token ids (as text) to what is known of each.

    null for a token without a distribution (the first), and in place of the list when none was asked for.
    """
    if positions is None:
        return None
    shown: list[dict[str, dict[str, Any]] | None] = []
    for position in positions:
        if position is None:
            shown.append(None)
            continue
        entries: dict[str, dict[str, Any]] = {}
        for rank, (token_id, logprob) in enumerate(zip(position.token_ids, position.logprobs, strict=True)):
            if str(token_id) not in entries:
                entries[str(token_id)] = {
                    "logprob": _finite(logprob),
                    "rank": rank or position.sampled_rank,
                    "decoded_token": tokenizer.token_text(token_id),
                }
        shown.append(entries)
    return shown


@dataclass(frozen=True, kw_only=True, slots=True)
class LogprobWriter:
    """Writes the log probabilities of one request."""

    tokenizer: Tokenizer
    num_top: int
    """Tokens per position besides the sampled one; -1 is all."""
    as_token_ids: bool = False
    """Write tokens as "token_id:123" instead of their text."""

    def _text(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self.as_token_ids else self.tokenizer.token_text(token_id)

    def _distinct(self, token_id: int) -> str:
        """A name for a token whose text another one has: the bytes of a part of a character, else the id."""
        raw = self.tokenizer.token_bytes(token_id) or b""
        if raw.decode(errors="replace").encode() == raw:
            return f"token_id:{token_id}"
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def for_completion(self, positions: Sequence[TokenLogprobs], text_offsets: Sequence[int]) -> dict[str, Any]:
        """tokens, token_logprobs, top_logprobs (the sampled token included) and text_offset."""
        top_logprobs = []
        for position in positions:
            sampled = (position.token_ids[0], position.logprobs[0])
            entries = dict([sampled, *_top(position, self.num_top)])
            named: dict[str, float] = {}
            for token_id, value in entries.items():
                name = self._text(token_id)
                named[self._distinct(token_id) if name in named else name] = _finite(value)
            top_logprobs.append(named)
        return {
            "text_offset": list(text_offsets),
            "token_logprobs": [_finite(position.logprobs[0]) for position in positions],
            "tokens": [self._text(position.token_ids[0]) for position in positions],
            "top_logprobs": top_logprobs,
        }

    def for_prompt(
        self, token_ids: Sequence[int], positions: Sequence[TokenLogprobs | None], text_offsets: Sequence[int]
    ) -> dict[str, Any]:
        """As `for_completion`, of an echoed prompt: a token without a distribution (the first) has null."""
        lists = self.for_completion([position for position in positions if position is not None], text_offsets)
        lists["tokens"] = [self._text(token_id) for token_id in token_ids]
        for place, position in enumerate(positions):
            if position is None:
                lists["token_logprobs"].insert(place, None)
                lists["top_logprobs"].insert(place, None)
        return lists

    def for_chat(self, positions: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """content: one object per token with its bytes and the likeliest tokens."""
        content = []
        for position in positions:
            entry = self._entry(position.token_ids[0], position.logprobs[0])
            entry["top_logprobs"] = [self._entry(*item) for item in _top(position, self.num_top)]
            content.append(entry)
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._text(token_id)
        raw = self.tokenizer.token_bytes(token_id)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode() if raw is None else raw)}


def logprob_writer(
    body: GenerationBody, tokenizer: Tokenizer, num_top: int | None, *, as_token_ids: bool
) -> LogprobWriter | None:
    """The writer of the log probabilities asked for; None when none are.

    Args:
        as_token_ids: write tokens as token_id:N where the body does not say.
    """
    if num_top is None:
        return None
    if body.return_tokens_as_token_ids is not None:
        as_token_ids = body.return_tokens_as_token_ids
    if body.logprob_token_ids:
        num_top = -1  # all that come are those asked for
    return LogprobWriter(tokenizer=tokenizer, num_top=num_top, as_token_ids=as_token_ids)


def num_top_logprobs(body: ChatBody, *, max_logprobs: int, vocab_size: int) -> int | None:
    """Top log probabilities per token of a conversation; None when no log probabilities are asked for.

    Raises:
        InvalidRequest: more are asked for than `max_logprobs`; -1 of them is `vocab_size`, a bound of -1 is none.
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
