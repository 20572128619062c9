"""One exponential random number for every pair of a random key and a token."""

import torch
from torch import Tensor

# The finalizer of SplitMix64 (Steele, Lea and Flood 2014); constants as signed 64-bit integers.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64
_BELOW_ONE = 1.0 - 2.0**-24
"""The greatest float32 below 1. The highest random number would be rounded to 1, and let a token without
probability win with 0 / 0."""


def token_exponentials(keys: Tensor, token_ids: Tensor) -> Tensor:
    """-log(u) with u uniform in (0, 1), a pure function of (key, token id).

    Args:
        keys: [n] int64, random bits of each row.
        token_ids: [m] or [n, m] int64.

    Returns:
        [n, m] float32, positive; u has 24 bits.
    """
    bits = keys[:, None] + (token_ids + 1) * _GOLDEN  # wraps, as it should
    bits = (bits ^ _shifted(bits, 30)) * _FIRST
    bits = (bits ^ _shifted(bits, 27)) * _SECOND
    bits = bits ^ _shifted(bits, 31)
    return -torch.log(((_shifted(bits, 40).float() + 0.5) * 2.0**-24).clamp(max=_BELOW_ONE))


def _shifted(bits: Tensor, count: int) -> Tensor:
    """Logical shift right of signed integers."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def token_exponentials_reference(keys: Tensor, token_ids: Tensor) -> Tensor:
    """The specification of `token_exponentials`, in Python's integers. `token_ids`: [m]."""
    mask = 2**64 - 1
    rows = []
    for key in keys.tolist():
        row = []
        for token_id in token_ids.tolist():
            bits = (key + (token_id + 1) * (_GOLDEN + 2**64)) & mask
            bits = ((bits ^ (bits >> 30)) * (_FIRST + 2**64)) & mask
            bits = ((bits ^ (bits >> 27)) * (_SECOND + 2**64)) & mask
            bits ^= bits >> 31
            row.append(min(((bits >> 40) + 0.5) * 2.0**-24, _BELOW_ONE))
        rows.append(row)
    return -torch.log(torch.tensor(rows, dtype=torch.float32))
