"""Sampling in Triton: a row a program, which reads its logits a few times and sorts nothing.

The race is run among all tokens first. Its winner is looked up: how many tokens are likelier, and what is their mass?
If the filters keep it, it has won among the kept ones too. If not, nothing as likely or less is kept, and the race is
run again among the likelier ones; with top-p 0.95 that happens about once in twenty rows. Top-k's bound is found by the
digits of the probabilities, eight bits at a time, because top-p needs the mass of what top-k keeps.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_BLOCK = 4096


def sample_tokens(
    logits: Tensor,
    keys: Tensor,
    *,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
) -> Tensor:
    """`pagoda_kernels.sampling.sample_tokens.sample_tokens`; contiguous rows."""
    n, vocab_size = logits.shape
    tokens = torch.empty(n, dtype=torch.int64, device=logits.device)
    if n:
        _sample_tokens_kernel[(n,)](
            logits,
            keys.contiguous(),
            logits if temperature is None else temperature.contiguous(),
            keys if top_k is None else top_k.contiguous(),
            logits if top_p is None else top_p.contiguous(),
            logits if min_p is None else min_p.contiguous(),
            tokens,
            vocab_size,
            logits.stride(0),
            HAS_TEMPERATURE=temperature is not None,
            HAS_TOP_K=top_k is not None,
            HAS_TOP_P=top_p is not None,
            HAS_MIN_P=min_p is not None,
            BLOCK=min(MAX_BLOCK, triton.next_power_of_2(vocab_size)),
            num_warps=8,
        )
    return tokens


@triton.jit
def _sample_tokens_kernel(
    logits_ptr, keys_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, tokens_ptr, vocab_size, row_stride,
    HAS_TEMPERATURE: tl.constexpr, HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr, HAS_MIN_P: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program: one row. Weights are probabilities times what makes the greatest one 1."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    lanes = tl.arange(0, BLOCK)
    zero = row.to(tl.int32) * 0  # what changes in a branch or loop must be a tensor before
    temperature = 1.0
    if HAS_TEMPERATURE:
        temperature = tl.load(temperature_ptr + row)
    floor = 0.0
    if HAS_MIN_P:
        floor = tl.load(min_p_ptr + row)
    tops = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    for start in range(0, vocab_size, BLOCK):
        ids = start + lanes
        tops = tl.maximum(tops, tl.load(logits_ptr + ids, mask=ids < vocab_size, other=float("-inf")) / temperature)
    top = tl.max(tops, axis=0)

    # Top-k keeps the weights above `least`, and the first `num_tied` of those that equal it.
    k = zero + vocab_size
    least = top * 0.0
    num_tied = zero + vocab_size
    if HAS_TOP_K:
        k = tl.load(top_k_ptr + row).to(tl.int32)
        k = tl.where((k > 0) & (k < vocab_size), k, vocab_size)
        if k < vocab_size:
            prefix = zero
            num_tied = k
            for level in tl.static_range(4):
                shift = 24 - 8 * level
                counts = tl.zeros([256], dtype=tl.int32)
                for start in range(0, vocab_size, BLOCK):
                    ids = start + lanes
                    weights = _weights(logits_ptr, ids, vocab_size, top, temperature, floor)
                    bits = weights.to(tl.int32, bitcast=True)  # of weights >= 0: in the same order
                    is_counted = ids < vocab_size
                    if level > 0:
                        is_counted &= (bits >> (shift + 8)) == prefix
                    counts += tl.histogram((bits >> shift) & 255, 256, mask=is_counted)
                digits = tl.arange(0, 256)
                # How many have this digit, or a higher one.
                num_from = tl.sum(counts, axis=0) - tl.cumsum(counts, axis=0) + counts
                digit = tl.max(tl.where(num_from >= num_tied, digits, 0), axis=0)
                num_tied -= tl.sum(tl.where(digits > digit, counts, 0), axis=0)
                prefix = prefix * 256 + digit
            least = prefix.to(tl.float32, bitcast=True)

    share = top * 0.0 + 1.0
    bound = tl.sum(tl.zeros([BLOCK], dtype=tl.float64), axis=0)
    if HAS_TOP_P:
        share = tl.load(top_p_ptr + row)
        if share < 1.0:
            mass = tl.zeros([BLOCK], dtype=tl.float64)
            for start in range(0, vocab_size, BLOCK):
                weights = _weights(logits_ptr, start + lanes, vocab_size, top, temperature, floor)
                if HAS_TOP_K:
                    weights = tl.where((weights > least) | (k == vocab_size), weights, 0.0)
                mass += weights.to(tl.float64)
            bound = tl.sum(mass, axis=0)
            if HAS_TOP_K:
                bound += tl.where(k == vocab_size, 0.0, num_tied * least).to(tl.float64)
            bound *= share.to(tl.float64)

    key = tl.load(keys_ptr + row).to(tl.uint64)
    winner = zero
    limit = top * 0.0 - 1.0  # who has lost: weights below it, and at it the ids from `limit_id` on
    limit_id = zero
    is_open = zero == 0
    while is_open:
        best = tl.full([BLOCK], -1.0, dtype=tl.float32)
        best_ids = tl.zeros([BLOCK], dtype=tl.int32)
        best_weights = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(0, vocab_size, BLOCK):
            ids = start + lanes
            weights = _weights(logits_ptr, ids, vocab_size, top, temperature, floor)
            is_in = (ids < vocab_size) & (weights > 0.0)
            if HAS_TOP_K:
                is_in &= weights >= least
            if HAS_TOP_K or HAS_TOP_P:
                is_in &= (weights > limit) | ((weights == limit) & (ids < limit_id))
            speeds = tl.where(is_in, weights / _exponentials(key, ids), -1.0)
            is_better = speeds > best
            best = tl.where(is_better, speeds, best)
            best_ids = tl.where(is_better, ids, best_ids)
            best_weights = tl.where(is_better, weights, best_weights)
        fastest = tl.max(best, axis=0)
        winner = tl.min(tl.where(best == fastest, best_ids, vocab_size), axis=0)
        is_open = winner < 0  # closed
        if HAS_TOP_K or HAS_TOP_P:
            weight = tl.max(tl.where((best == fastest) & (best_ids == winner), best_weights, 0.0), axis=0)
            if (weight > 0.0) & ((k < vocab_size) | (share < 1.0)):
                above = tl.zeros([BLOCK], dtype=tl.float64)
                num_above = tl.zeros([BLOCK], dtype=tl.int32)
                num_before = tl.zeros([BLOCK], dtype=tl.int32)
                for start in range(0, vocab_size, BLOCK):
                    ids = start + lanes
                    weights = _weights(logits_ptr, ids, vocab_size, top, temperature, floor)
                    is_above = weights > weight
                    above += tl.where(is_above, weights, 0.0).to(tl.float64)
                    num_above += is_above.to(tl.int32)
                    num_before += ((weights == weight) & (ids < winner)).to(tl.int32)
                ties = tl.sum(num_before, axis=0)
                is_kept = tl.sum(num_above, axis=0) + ties < k
                mass_before = tl.sum(above, axis=0) + ties.to(tl.float64) * weight.to(tl.float64)
                is_kept &= (share >= 1.0) | (mass_before < bound)
                is_open = is_kept == 0
                limit = weight
                limit_id = winner
    tl.store(tokens_ptr + row, winner.to(tl.int64))


@triton.jit
def _weights(logits_ptr, ids, vocab_size, top, temperature, floor):
    """[BLOCK] exp(logit - greatest); 0 below `floor`, and after the row."""
    logits = tl.load(logits_ptr + ids, mask=ids < vocab_size, other=float("-inf")) / temperature
    weights = tl.exp(logits - top)
    return tl.where(weights >= floor, weights, 0.0)


@triton.jit
def _exponentials(key, ids):
    """[BLOCK] `token_exponentials`, to the last place of float32 or two: the smallest ones win, and the hardware's
    logarithm is coarse near 1."""
    bits = key + (ids + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
    bits = bits ^ (bits >> 31)
    uniform = ((bits >> 40).to(tl.int32).to(tl.float32) + 0.5) * 5.960464477539063e-08
    uniform = tl.minimum(uniform, 0.9999999403953552)
    # log(2^e * m) with m near 1: the series of log((1 + s) / (1 - s)), its coefficients from fdlibm's e_logf.c.
    whole = uniform.to(tl.int32, bitcast=True)
    exponent = (whole - 0x3F3504F3) >> 23
    f = (whole - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    s = f / (2.0 + f)
    z = s * s
    w = z * z
    rest = z * (0.66666662693 + w * 0.28498786688) + w * (0.40000972152 + w * 0.24279078841)
    half = 0.5 * f * f
    e = exponent.to(tl.float32)
    return -(s * (half + rest) + e * 9.0580006145e-06 - half + f + e * 0.69313812256)
