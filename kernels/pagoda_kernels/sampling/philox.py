"""The counter-based random numbers of sampling: one key per token, a pure function of (seed, offset)."""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

UInt64Array: TypeAlias = npt.NDArray[np.uint64]

_ROUNDS = 10
_MASK = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_KEY_STEPS = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)


def philox_keys(seeds: UInt64Array, offsets: UInt64Array) -> npt.NDArray[np.int64]:
    """64 random bits for each pair (seed, offset), whatever the other pairs are.

    Args:
        seeds: [n] uint64, the Philox key.
        offsets: [n] uint64, the low half of the Philox counter (the output token's index in its sequence).
    """
    words = philox4x32(seeds, offsets)
    keys: npt.NDArray[np.int64] = (words[0] | (words[1] << _SHIFT)).view(np.int64)
    return keys


def philox4x32(seeds: UInt64Array, offsets: UInt64Array) -> UInt64Array:
    """Philox4x32-10 with counter (offset, 0) and key seed: [4, n] words below 2^32.

    The same numbers as Triton's tl.philox(seed, offset, offset >> 32, 0, 0).
    Source: Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3.
    """
    if seeds.shape != offsets.shape:
        raise ValueError(f"{seeds.shape[0]} seeds for {offsets.shape[0]} offsets")
    # Rows: counter words 0 and 2 are multiplied in a round, words 1 and 3 are mixed in.
    multiplied = np.stack([offsets & _MASK, np.zeros_like(offsets)])
    mixed = np.stack([offsets >> _SHIFT, np.zeros_like(offsets)])
    key = np.stack([seeds & _MASK, seeds >> _SHIFT])
    for _ in range(_ROUNDS):
        product = multiplied * _MULTIPLIERS
        multiplied = (product[::-1] >> _SHIFT) ^ mixed ^ key
        mixed = product[::-1] & _MASK
        key = (key + _KEY_STEPS) & _MASK
    return np.stack([multiplied[0], mixed[0], multiplied[1], mixed[1]])
