"""Penalties on tokens that a sequence has already used."""

import torch
from torch import Tensor


def apply_token_penalties(
    logits: Tensor,
    tokens: Tensor,
    num_prompt_tokens: Tensor,
    num_tokens: Tensor,
    *,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
) -> Tensor:
    """Repetition (prompt and output), then frequency and presence (output only).

    logit -> (logit / r if logit > 0 else logit * r) for tokens used; then - frequency * count - presence * (count > 0).

    Args:
        logits: [n, vocab_size] float32.
        tokens: [n, longest] int64 prompt and output of each sequence; what lies behind num_tokens is not read.
        num_prompt_tokens, num_tokens: [n] int64.
        presence, frequency, repetition: [n] float32.
    Source: presence and frequency from the OpenAI API; repetition from Keskar et al. 2019 (arXiv 1909.05858).
    """
    if logits.shape[0] != tokens.shape[0]:
        raise ValueError(f"{logits.shape[0]} rows of logits, {tokens.shape[0]} of tokens")
    return apply_token_penalties_reference(
        logits, tokens, num_prompt_tokens, num_tokens, presence=presence, frequency=frequency, repetition=repetition
    )


def apply_token_penalties_reference(
    logits: Tensor,
    tokens: Tensor,
    num_prompt_tokens: Tensor,
    num_tokens: Tensor,
    *,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
) -> Tensor:
    """The specification of `apply_token_penalties`."""
    place = torch.arange(tokens.shape[1], device=tokens.device)
    is_token = place < num_tokens[:, None]
    is_output = is_token & (place >= num_prompt_tokens[:, None])
    ids = tokens.where(is_token, 0)
    used, counts = torch.zeros_like(logits), torch.zeros_like(logits)
    used.scatter_add_(1, ids, is_token.to(logits.dtype))
    counts.scatter_add_(1, ids, is_output.to(logits.dtype))
    factor = torch.where(used > 0, repetition[:, None], 1.0)
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    return logits - frequency[:, None] * counts - presence[:, None] * (counts > 0)
