"""Penalties on tokens that a sequence has already used, and the counts they are made of."""

import torch
from torch import Tensor

from pagoda_kernels.selection import triton_kernel


def count_tokens(
    tokens: Tensor, num_prompt_tokens: Tensor, num_tokens: Tensor, *, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Which tokens are in each prompt, and how often each is in the output.

    Args:
        tokens: [n, longest] int64 prompt and output of each sequence; what lies after num_tokens is not read.
        num_prompt_tokens, num_tokens: [n] int64.

    Returns:
        [n, vocab_size] bool, and [n, vocab_size] float32 counts.
    """
    place = torch.arange(tokens.shape[1], device=tokens.device)
    is_prompt = place < num_prompt_tokens[:, None]
    is_output = (place < num_tokens[:, None]) & ~is_prompt
    ids = tokens.masked_fill(~(is_prompt | is_output), 0)
    shape = (tokens.shape[0], vocab_size)
    in_prompt = torch.zeros(shape, dtype=torch.float32, device=tokens.device)
    counts = torch.zeros(shape, dtype=torch.float32, device=tokens.device)
    in_prompt.scatter_add_(1, ids, is_prompt.float())
    counts.scatter_add_(1, ids, is_output.float())
    return in_prompt > 0, counts


def apply_token_penalties(
    logits: Tensor, in_prompt: Tensor, counts: Tensor, *, presence: Tensor, frequency: Tensor, repetition: Tensor
) -> Tensor:
    """Repetition (prompt and output), then frequency and presence (output only).

    logit -> (logit / r if logit > 0 else logit * r) for tokens used; then - frequency * count - presence * (count > 0).

    Args:
        logits: [n, vocab_size] float32; not changed.
        in_prompt, counts: [n, vocab_size] as from `count_tokens`.
        presence, frequency, repetition: [n] float32.
    Source: presence and frequency from the OpenAI API; repetition from Keskar et al. 2019 (arXiv 1909.05858).
    """
    if logits.shape != counts.shape:
        raise ValueError(f"logits of shape {tuple(logits.shape)}, counts of {tuple(counts.shape)}")
    kernel = triton_kernel("apply_token_penalties", logits)
    if kernel is not None and logits.dtype == counts.dtype == torch.float32:
        penalised: Tensor = kernel(
            logits, in_prompt, counts, presence=presence, frequency=frequency, repetition=repetition
        )
        return penalised
    return apply_token_penalties_reference(
        logits, in_prompt, counts, presence=presence, frequency=frequency, repetition=repetition
    )


def apply_token_penalties_reference(
    logits: Tensor, in_prompt: Tensor, counts: Tensor, *, presence: Tensor, frequency: Tensor, repetition: Tensor
) -> Tensor:
    """The specification of `apply_token_penalties`."""
    is_output = counts > 0
    factor = torch.where(in_prompt | is_output, repetition[:, None], 1.0)
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    return logits - frequency[:, None] * counts - presence[:, None] * is_output
