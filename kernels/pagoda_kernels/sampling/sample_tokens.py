"""Sampling from filtered distributions by a race of exponential clocks (the Gumbel-max trick).

Not by the inverse distribution function: there every token's boundary moves with the rounding of all tokens before it,
so a recomputed KV cache changed about one sampled token in a thousand. Here only a dead heat of the first two does.
"""

import torch
from torch import Tensor

from pagoda_kernels.native.library import native
from pagoda_kernels.sampling.token_exponentials import token_exponentials, token_exponentials_reference
from pagoda_kernels.selection import triton_kernel

CANDIDATES = (128, 2048)
"""Likeliest tokens that are looked at, first few, then more: they decide the filters of nearly every row without a sort
of the vocabulary (which at 3072 tokens takes 180 us a row on one CPU core, and at 128 candidates 10)."""


def sample_tokens(
    logits: Tensor,
    keys: Tensor,
    *,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
) -> Tensor:
    """The kept token with the greatest probability / exponential(key, token): distributed as the kept probabilities.

    A row's result depends on that row alone. Probabilities are float32, their sums float64.

    Args:
        logits: [n, vocab_size] float32, each row with a finite maximum.
        keys: [n] int64 random bits.
        temperature: [n] float32 greater than 0, what logits are divided by; None: nothing.
        top_k: [n] int64, keep the k likeliest tokens (ties: lower token id); 0 keeps all.
        top_p: [n] float32, then keep the smallest set of likeliest tokens with at least this share of the mass.
        min_p: [n] float32, before both keep tokens at least this many times as likely as the likeliest.

    Returns:
        [n] int64 token ids.
    Source: Gumbel-max trick, Maddison et al. 2014 (arXiv 1411.0030); nucleus sampling, Holtzman et al. 2019
    (arXiv 1904.09751); min-p, Nguyen et al. 2024 (arXiv 2407.01082).
    """
    if keys.shape[0] != logits.shape[0]:
        raise ValueError(f"{keys.shape[0]} keys for {logits.shape[0]} rows")
    kernel = triton_kernel("sample_tokens", logits)
    if kernel is not None and logits.dtype == torch.float32 and logits.stride(1) == 1:
        tokens: Tensor = kernel(logits, keys, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        return tokens
    if temperature is not None:
        logits = logits / temperature[:, None]
    probs = logits.softmax(dim=-1)
    if min_p is not None:
        floor = probs.amax(dim=-1) * min_p
        probs = probs.masked_fill(probs < floor[:, None], 0.0)
    if top_k is None and top_p is None:
        return _race(probs, keys)
    n, vocab_size = probs.shape
    k = torch.zeros(n, dtype=torch.int64, device=probs.device) if top_k is None else top_k
    k = torch.where((k > 0) & (k < vocab_size), k, vocab_size)
    p = torch.ones(n, dtype=torch.float64, device=probs.device) if top_p is None else top_p.double()
    is_filtered = (k < vocab_size) | (p < 1)
    result = torch.empty(n, dtype=torch.int64, device=probs.device)
    plain, rows = (~is_filtered).nonzero().squeeze(1), is_filtered.nonzero().squeeze(1)
    if plain.numel():
        result[plain] = _race(probs[plain], keys[plain])
    for width in CANDIDATES:
        if rows.numel() and 2 * width < vocab_size:
            tokens, is_decided = _sample_candidates(probs[rows], k[rows], p[rows], keys[rows], width)
            result[rows] = tokens
            rows = rows[~is_decided]
    if rows.numel():
        part = probs[rows]
        ranked = part.sort(dim=-1, descending=True).values
        kept = _kept(ranked, part.sum(dim=-1, dtype=torch.float64), k[rows], p[rows])
        result[rows] = _choose(part, *kept, keys[rows])
    return result


def filter_logits(
    logits: Tensor, *, top_k: Tensor | None = None, top_p: Tensor | None = None, min_p: Tensor | None = None
) -> Tensor:
    """`logits` with -inf where `sample_tokens` would never choose; arguments as there."""
    probs = logits.softmax(dim=-1)
    n, vocab_size = probs.shape
    is_kept = torch.ones_like(probs, dtype=torch.bool)
    if min_p is not None:
        is_kept = probs >= (probs.amax(dim=-1) * min_p)[:, None]
        probs = probs.masked_fill(~is_kept, 0.0)
    if top_k is not None or top_p is not None:
        k = torch.zeros(n, dtype=torch.int64, device=probs.device) if top_k is None else top_k
        k = k.masked_fill((k <= 0) | (k > vocab_size), vocab_size)
        p = torch.ones(n, dtype=torch.float64, device=probs.device) if top_p is None else top_p.double()
        ranked = probs.sort(dim=-1, descending=True).values
        is_filtered = (k < vocab_size) | (p < 1)
        num_kept, least = _kept(ranked, probs.sum(dim=-1, dtype=torch.float64), k, p)
        is_kept &= _is_kept(probs, num_kept, least) | ~is_filtered[:, None]
    return logits.masked_fill(~is_kept, float("-inf"))


def _sample_candidates(probs: Tensor, k: Tensor, p: Tensor, keys: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Tokens from the `width` likeliest, and for which rows that was enough."""
    values, ids = probs.topk(width, dim=-1)
    num_kept, least = _kept(values, probs.sum(dim=-1, dtype=torch.float64), k, p)
    # Decided if the least likely kept token is likelier than some candidate: then its ties are all among them. With a k
    # beyond the candidates the mass that top-p shares is not known.
    is_decided = (least > values[:, -1]) & ((k <= width) | (k == probs.shape[1]))
    ids, order = ids.sort(dim=-1)
    return _choose(values.gather(1, order), num_kept, least, keys, ids), is_decided


def _kept(ranked: Tensor, mass: Tensor, k: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """How many of the falling probabilities `ranked` top-k and top-p keep, and the least of them."""
    width = ranked.shape[1]
    up_to = ranked.cumsum(dim=-1, dtype=torch.float64)
    last = up_to.gather(1, (k.clamp(max=width) - 1)[:, None]).squeeze(1)
    bound = p * torch.where(k <= width, last, mass)
    # A token stays when what is likelier has not reached the bound: the set is never empty.
    is_kept = (up_to - ranked) < bound[:, None]
    is_kept |= (p >= 1)[:, None]
    is_kept &= torch.arange(width, device=ranked.device) < k[:, None]
    num_kept = is_kept.sum(dim=-1).clamp(min=1)
    return num_kept, ranked.gather(1, (num_kept - 1)[:, None]).squeeze(1)


def _choose(probs: Tensor, num_kept: Tensor, least: Tensor, keys: Tensor, ids: Tensor | None = None) -> Tensor:
    """Tokens from the `num_kept` likeliest columns of `probs`, which are in order of token id."""
    return _race(probs.masked_fill(~_is_kept(probs, num_kept, least), 0.0), keys, ids)


def _is_kept(probs: Tensor, num_kept: Tensor, least: Tensor) -> Tensor:
    """The `num_kept` likeliest columns of each row; of those as likely as the last one, the first."""
    is_more, is_tied = probs > least[:, None], probs == least[:, None]
    num_tied = num_kept - is_more.sum(dim=-1)
    return is_more | (is_tied & (is_tied.cumsum(dim=-1) <= num_tied[:, None]))


def _race(probs: Tensor, keys: Tensor, ids: Tensor | None = None) -> Tensor:
    """The token that comes first when each rings at its probability's rate. `ids` name the columns."""
    kernel = native("race") if ids is None and probs.is_cpu else None
    if kernel is not None:
        winners = torch.empty_like(keys)
        kernel(probs, keys, winners)
        is_open = winners < 0  # nearly a dead heat: the exact logarithms decide
        if bool(is_open.any()):
            winners[is_open] = _race_exactly(probs[is_open], keys[is_open], torch.arange(probs.shape[1]))
        return winners
    if ids is None:
        return _race_exactly(probs, keys, torch.arange(probs.shape[1], device=probs.device))
    return ids.gather(1, _race_exactly(probs, keys, ids)[:, None]).squeeze(1)


def _race_exactly(probs: Tensor, keys: Tensor, ids: Tensor) -> Tensor:
    """Columns that win."""
    return (probs / token_exponentials(keys, ids)).argmax(dim=-1)


def sample_tokens_reference(
    logits: Tensor,
    keys: Tensor,
    *,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
) -> Tensor:
    """The specification of `sample_tokens`: one row at a time, tokens ranked by (probability, lower id)."""
    tokens = []
    for row, probs in enumerate(logits.softmax(dim=-1)):
        kept = probs.double()
        if min_p is not None:
            kept = kept.where(probs >= probs.max() * min_p[row], 0.0)
        ranking = kept.sort(descending=True, stable=True).indices
        if top_k is not None and top_k[row] > 0:
            kept[ranking[int(top_k[row]) :]] = 0.0
        if top_p is not None and top_p[row] < 1:
            ranked = kept[ranking]
            before = ranked.cumsum(0) - ranked
            kept[ranking[before >= top_p[row].double() * kept.sum()]] = 0.0
        clocks = token_exponentials_reference(keys[row : row + 1], torch.arange(kept.numel()))[0]
        tokens.append(int((kept.float() / clocks.to(kept.device)).argmax()))
    return torch.tensor(tokens, dtype=torch.int64, device=logits.device)
