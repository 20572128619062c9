"""Truncates prompts that are too long, by truncate_prompt_tokens. No engine, no HTTP."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from pagoda_common.errors import InvalidRequest

Side: TypeAlias = Literal["left", "right"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Truncation:
    """How much of a prompt is kept."""

    num_tokens: int
    """Most tokens that are kept."""
    side: Side = "left"
    """Where tokens are dropped; left keeps the end."""

    def apply(self, token_ids: list[int]) -> list[int]:
        """The kept part of `token_ids`."""
        if len(token_ids) <= self.num_tokens:
            return token_ids
        return token_ids[len(token_ids) - self.num_tokens :] if self.side == "left" else token_ids[: self.num_tokens]


def truncation_of(
    truncate_prompt_tokens: int | None, side: Side | None, *, max_tokens: int | None, max_model_len: int
) -> Truncation | None:
    """The truncation that a request asks for; None when it asks for none.

    Args:
        truncate_prompt_tokens: tokens to keep; -1 is what `max_tokens` leaves of the context.
        max_tokens: output tokens asked for; None leaves room for one, 0 for none.

    Raises:
        InvalidRequest: a bound is broken; `field` names the field.
    """
    name = "truncate_prompt_tokens"
    if truncate_prompt_tokens is None:
        return None
    room = max_model_len - (1 if max_tokens is None else max_tokens)
    if room < 1:
        message = f"max_tokens must be less than the model's maximum context length ({max_model_len}) with {name}"
        raise InvalidRequest(f"{message}, got {max_tokens}", field="max_tokens")
    if truncate_prompt_tokens < -1:
        raise InvalidRequest(f"{name} must be at least -1, got {truncate_prompt_tokens}", field=name)
    if truncate_prompt_tokens > room:
        message = f"{name} must be at most {room} (the context without max_tokens), got {truncate_prompt_tokens}"
        message += ". Please request a smaller truncation size."
        raise InvalidRequest(message, field=name)
    return Truncation(num_tokens=room if truncate_prompt_tokens == -1 else truncate_prompt_tokens, side=side or "left")
