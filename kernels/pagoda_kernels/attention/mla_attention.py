"""Attention over a paged cache of latents: one vector a token, which the keys and values of all heads are made of."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda_kernels.attention.paged_attention import gather_blocks, paged_attention
from pagoda_kernels.attention.plan import AttentionPlan
from pagoda_kernels.attention.quantized_cache import cache_width, dequantize_rows, holds
from pagoda_kernels.selection import TRITON_DTYPES, triton_kernel

MAX_ABSORBED_TOKENS = 16
"""Query tokens of a sequence up to which the Triton kernel meets latents with each of them."""
MAX_EXPANDED_BYTES = 1 << 28
"""Keys and values that are made of latents at once; more goes by groups of heads."""


class _Up(NamedTuple):
    """Weights that compute keys and values from latents."""

    keys: Tensor
    """[num_heads, key_dim, rank]."""
    values: Tensor
    """[num_heads, value_dim, rank]."""

    @property
    def rank(self) -> int:
        return self.keys.shape[2]

    def of_heads(self, first: int, end: int) -> "_Up":
        return _Up(self.keys[first:end], self.values[first:end])


def mla_attention(
    query: Tensor, cache: Tensor, plan: AttentionPlan, *, key_up: Tensor, value_up: Tensor, scale: float
) -> Tensor:
    """softmax(q k^T * scale) v for every query token over the keys of its own sequence up to itself.

    A token's keys are k = (key_up c, r) and its values v = value_up c, where (c, r) is its row of the cache. The cache
    must hold the rows of the query tokens already.

    Args:
        query: [num_tokens, num_heads, key_dim + rotary_dim], the sequences of `plan` one after the other.
        cache: [num_blocks, block_size, 1, rank + rotary_dim], same dtype as query, or rows of `quantized_cache`.
        plan: lengths and block tables of the batch.
        key_up: [num_heads, key_dim, rank], of the query's data type.
        value_up: [num_heads, value_dim, rank].

    Returns:
        [num_tokens, num_heads * value_dim].

    Queries of sequences with few query tokens are multiplied with key_up, and meet the latents as they lie there; what
    they sum is multiplied with value_up. So a decode reads rank + rotary_dim numbers a token, whatever the number of
    heads. A prompt's chunk would compute more than it saves: its keys and values are made, some heads at a time, and
    go to `paged_attention`. On the CPU the C++ kernel of `paged_attention` reads latents as the only KV head, each
    tile as keys and then, out of the core's cache, as values.

    Source: DeepSeek-AI 2024 (arXiv 2405.04434), section 2.1 and its appendix on absorption.
    """
    num_tokens, num_heads, head_dim = query.shape
    up = _Up(key_up, value_up)
    width = up.rank + head_dim - key_up.shape[1]
    if (key_up.shape[0], value_up.shape[0], value_up.shape[2]) != (num_heads, num_heads, up.rank):
        raise ValueError(f"key_up {tuple(key_up.shape)}, value_up {tuple(value_up.shape)} do not fit {num_heads} heads")
    if tuple(cache.shape[1:]) != (plan.block_size, 1, cache_width(width, cache.dtype)):
        raise ValueError(f"latents of {width} in blocks of {plan.block_size} do not fit a cache {tuple(cache.shape)}")
    short, long = plan.parts(_max_absorbed(query, up))
    if long is None:
        return (
            query.new_empty(0, num_heads * value_up.shape[1])
            if short is None
            else _absorbed(query, cache, plan, up, scale)
        )
    if short is None:
        return _expanded(query, cache, plan, up, scale)
    output = query.new_empty(num_tokens, num_heads * value_up.shape[1])
    for part, attend in ((short, _absorbed), (long, _expanded)):
        assert part.rows is not None, "there are others"
        output[part.rows] = attend(query.index_select(0, part.rows), cache, part.plan, up, scale)
    return output


def _max_absorbed(query: Tensor, up: _Up) -> int:
    """Query tokens of a sequence up to which absorbing takes fewer operations than making keys and values."""
    made, rank = up.keys.shape[1] + up.values.shape[1], up.rank
    if 2 * rank <= made:
        return 1 << 30
    fewest = max(1, made * rank // (2 * rank - made))
    return fewest if triton_kernel("mla_attention", query) is None else min(fewest, MAX_ABSORBED_TOKENS)


def _absorbed(query: Tensor, cache: Tensor, plan: AttentionPlan, up: _Up, scale: float) -> Tensor:
    """[num_tokens, num_heads * value_dim], out of latents as they lie there."""
    key_dim = up.keys.shape[1]
    narrow = torch.bmm(query[..., :key_dim].transpose(0, 1), up.keys).transpose(0, 1)  # [T, H, rank]
    latents = _attend_latents(torch.cat((narrow, query[..., key_dim:]), dim=-1), cache, plan, up.rank, scale)
    return torch.bmm(latents.transpose(0, 1), up.values.transpose(1, 2)).transpose(0, 1).flatten(1)


def _attend_latents(query: Tensor, cache: Tensor, plan: AttentionPlan, rank: int, scale: float) -> Tensor:
    """[num_tokens, num_heads, rank] sums of latents. query: [num_tokens, num_heads, rank + rotary_dim], contiguous."""
    kernel = triton_kernel("mla_attention", query)
    if kernel is not None and query.dtype in TRITON_DTYPES and holds(cache, query.dtype):
        summed: Tensor = kernel(query, cache, plan.tables(), rank=rank, scale=scale)
        return summed
    return paged_attention(query, cache, cache, plan, scale=scale).view(query.shape)[..., :rank]


def _expanded(query: Tensor, cache: Tensor, plan: AttentionPlan, up: _Up, scale: float) -> Tensor:
    """[num_tokens, num_heads * value_dim], over keys and values that are made of latents."""
    gathered, key_dim = plan.gathered(), up.keys.shape[1]
    width = up.rank + query.shape[2] - key_dim
    rows = gather_blocks(cache, gathered.block_ids, head_dim=width, dtype=query.dtype)  # [n, block_size, 1, width]
    key_bytes = 2 * max(query.shape[2], up.values.shape[1]) * query.element_size() * rows.shape[:2].numel()
    size = max(1, MAX_EXPANDED_BYTES // max(key_bytes, 1))
    parts = [
        _attend_heads(query[:, first : first + size], rows, gathered.plan, up.of_heads(first, first + size), scale)
        for first in range(0, query.shape[1], size)
    ]
    return torch.cat(parts, dim=1).flatten(1)


def _attend_heads(query: Tensor, rows: Tensor, plan: AttentionPlan, up: _Up, scale: float) -> Tensor:
    """[num_tokens, heads, value_dim] of some heads.

    Args:
        rows: [num_blocks, block_size, 1, rank + rotary_dim].
    """
    num_heads, key_dim, rank = up.keys.shape
    head_dim, value_dim = query.shape[2], up.values.shape[1]
    width = max(head_dim, value_dim)  # `paged_attention` knows one size; what a head lacks is zeros
    latents = rows[..., 0, :rank]
    key, value = rows.new_zeros(2, *rows.shape[:2], num_heads, width)
    key[..., :key_dim] = F.linear(latents, up.keys.flatten(0, 1)).view(*key.shape[:3], key_dim)
    key[..., key_dim:head_dim] = rows[..., rank:]
    value[..., :value_dim] = F.linear(latents, up.values.flatten(0, 1)).view(*value.shape[:3], value_dim)
    attended = paged_attention(F.pad(query, (0, width - head_dim)).contiguous(), key, value, plan, scale=scale)
    return attended.view(-1, num_heads, width)[..., :value_dim]


def mla_attention_reference(
    query: Tensor, cache: Tensor, plan: AttentionPlan, *, key_up: Tensor, value_up: Tensor, scale: float
) -> Tensor:
    """The specification of `mla_attention`: one query token at a time, in float32."""
    key_dim, rank = key_up.shape[1:]
    width = rank + query.shape[2] - key_dim
    output = query.new_zeros(query.shape[0], query.shape[1] * value_up.shape[1])
    token = 0
    for row, (query_len, seq_len) in enumerate(zip(plan.query_lens.tolist(), plan.seq_lens.tolist(), strict=True)):
        for position in range(seq_len - query_len, seq_len):
            seen = torch.arange(position + 1)
            blocks = torch.from_numpy(plan.block_table[row])[seen // plan.block_size].long().to(query.device)
            rows = cache[blocks, (seen % plan.block_size).to(query.device), 0]  # [L, width]
            rows = dequantize_rows(rows, width, torch.float32) if rows.dtype == torch.int8 else rows.float()
            key = torch.einsum("lr,hdr->lhd", rows[:, :rank], key_up.float())
            value = torch.einsum("lr,hdr->lhd", rows[:, :rank], value_up.float())
            wide = query[token].float()
            scores = torch.einsum("hd,lhd->hl", wide[:, :key_dim], key) + wide[:, key_dim:] @ rows[:, rank:].t()
            attended = torch.einsum("hl,lhd->hd", (scores * scale).softmax(dim=-1), value)
            output[token] = attended.flatten().to(query.dtype)
            token += 1
    return output
