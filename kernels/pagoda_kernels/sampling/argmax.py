"""The greatest value of each row, and where it is: greedy sampling."""

import torch
from torch import Tensor

from pagoda_kernels.native.library import native


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's greatest value and the first index that has it.

    Args:
        logits: [n, vocab_size] float32, vocab_size at least 1.

    Returns:
        [n] float32, NaN where a logit is; [n] int64.
    """
    kernel = native("argmax") if logits.is_cpu else None
    if kernel is not None and logits.dtype == torch.float32 and logits.stride(1) == 1:
        values = logits.new_empty(logits.shape[0])
        indices = torch.empty(logits.shape[0], dtype=torch.int64)
        kernel(logits, values, indices)
        return values, indices
    return argmax_reference(logits)


def argmax_reference(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The specification of `argmax`."""
    values, indices = logits.max(dim=-1)
    return values, indices
