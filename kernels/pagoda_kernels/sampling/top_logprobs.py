"""Log probabilities of one token a row, with its rank, and of the row's likeliest tokens."""

import torch
from torch import Tensor

from pagoda_kernels.selection import triton_kernel


def top_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """log_softmax of the logits where it is asked for.

    The Triton kernel never holds the log probabilities of all tokens.

    Args:
        logits: [n, vocab_size] float32, each row with a finite maximum.
        token_ids: [n] int64.
        num_top: at most vocab_size.

    Returns:
        [n] log probability of token_ids; [n] int64 its rank, 1 is the likeliest, ties share the best; [n, num_top] the
        greatest log probabilities, falling; [n, num_top] int64 their tokens.
    """
    kernel = triton_kernel("top_logprobs", logits)
    if kernel is not None and logits.dtype == torch.float32 and logits.stride(1) == 1:
        found: tuple[Tensor, Tensor, Tensor, Tensor] = kernel(logits, token_ids, num_top)
        return found
    return top_logprobs_reference(logits, token_ids, num_top)


def top_logprobs_reference(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The specification of `top_logprobs`."""
    values = logits.log_softmax(dim=-1)
    own = values.gather(1, token_ids[:, None])
    ranks = (values > own).sum(dim=-1) + 1
    top_values, top_ids = values.topk(num_top, dim=-1)
    return own.squeeze(1), ranks, top_values, top_ids
