"""Causal attention of a ragged batch over the paged KV cache."""

import functools
import logging
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda_kernels.attention.plan import AttentionPlan, DecodeGroup, PrefillRow
from pagoda_kernels.attention.quantized_cache import FP8, cache_width, dequantize_rows, holds
from pagoda_kernels.native.library import NATIVE_DTYPES, native
from pagoda_kernels.selection import TRITON_DTYPES, triton_kernel

logger = logging.getLogger(__name__)

MAX_SCORES = 1 << 25
"""Scores that are held at once where there is no fused operation (soft caps, biases): 128 MiB of float32."""


MAX_TRITON_HEAD_DIM = 256
"""Wider heads do not fit a tile of the Triton kernel."""


class _Scoring(NamedTuple):
    """How scores are made of queries and keys."""

    scale: float
    softcap: float | None
    slopes: Tensor | None
    """[num_kv_heads, group, 1]."""
    sinks: Tensor | None
    """[num_kv_heads, group]."""


def paged_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(q k^T * scale) v for every query token over the keys of its own sequence up to itself.

    The cache must hold the keys and values of the query tokens already.

    Args:
        query: [num_tokens, num_heads, head_dim], the sequences of `plan` one after the other.
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], same dtype as query, or rows of
            `quantized_cache` in int8 or FP8; num_heads is a multiple of num_kv_heads, and consecutive heads share a KV
            head.
        plan: lengths and block tables of the batch, and who computes it where that is another package.
        window: keys that a query sees, its own included; None sees all. Blocks that no query sees are not read.
        softcap: scores s become softcap * tanh(s / softcap) before the softmax; None leaves them.
        alibi_slopes: [num_heads] float32; what is taken from a score for each token between query and key.
        sinks: [num_heads] float32; a score of each head for a key that every query sees, whose value is zero
            (Xiao et al. 2023, arXiv 2309.17453, as learned in gpt-oss).

    Returns:
        [num_tokens, num_heads * head_dim].

    On the CPU, float32 and bfloat16 go to csrc/attention/paged_attention.cpp. There, an output is a function of its own
    sequence's tokens alone, bit for bit: neither the rest of the batch, nor the number of threads, nor how a prompt was
    cut into chunks changes it. In bfloat16, softmax weights are rounded to bfloat16 before the values are summed up.
    Sequences of few query tokens whose block tables begin alike have the keys that they share packed once for all of
    them (csrc/attention/shared_prefixes.cpp), unless a window hides some: 32 decodes that share 1,024 tokens and have
    60 of their own (12 heads of 64, bfloat16) take a quarter of the processor time, 1.4 ms of a thread instead of 5.8.

    Measured on 2 cores with AVX512-bf16 that read 26 GB/s (benchmarks/cpu/kernels/attention.py), against PyTorch,
    same run: 12 heads of 64, 32 decodes at 512 tokens 26.9 GB/s of keys and values against 2.1, one at 2,048 tokens
    23.1 against 3.8, a prompt of 2,048 tokens 412 GFLOP/s (15.7 ms) against 119. 16 heads over 8 of 128: 26.2 GB/s,
    23.3 GB/s and 499 GFLOP/s. An int8 cache of the first shape: 14.8 GB/s and 13.0 GB/s of nearly half the bytes.

    Source: paged attention, Kwon et al. 2023 (arXiv 2309.06180); grouped queries, Ainslie et al. 2023
    (arXiv 2305.13245); linear biases, Press et al. 2021 (arXiv 2108.12409); queries over a shared prefix together,
    Juravsky et al. 2024 (arXiv 2402.05099).
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = k_cache.shape[2]
    if num_heads % num_kv_heads or cache_width(head_dim, k_cache.dtype) != k_cache.shape[3]:
        raise ValueError(f"query {tuple(query.shape)} does not fit a cache of {tuple(k_cache.shape)}")
    if k_cache.shape[1] != plan.block_size:
        raise ValueError(f"the cache has blocks of {k_cache.shape[1]} tokens, the plan of {plan.block_size}")
    if plan.backend is not None and alibi_slopes is None and sinks is None:
        return plan.backend(query, k_cache, v_cache, plan, scale=scale, window=window, softcap=softcap)
    kernel = triton_kernel("paged_attention", query)
    is_known = query.dtype in TRITON_DTYPES and k_cache.dtype == v_cache.dtype and holds(k_cache, query.dtype)
    if kernel is not None and is_known:
        if head_dim <= MAX_TRITON_HEAD_DIM:
            attended: Tensor = kernel(
                query,
                k_cache,
                v_cache,
                plan.tables(),
                scale=scale,
                window=window,
                softcap=softcap,
                alibi_slopes=alibi_slopes,
                sinks=sinks,
            )
            return attended
        _warn_of_head_dim(head_dim)
    kernel = native("paged_attention") if query.is_cpu else None
    if kernel is not None and query.dtype in NATIVE_DTYPES and _is_native(query, k_cache, v_cache):
        output = query.new_empty(num_tokens, num_heads * head_dim)
        options = (scale, window or 0, softcap or 0.0, alibi_slopes, sinks)
        kernel(query, k_cache, v_cache, *plan.columns(), *options, output)
        return output
    parts = plan.window(window)
    slopes = None if alibi_slopes is None else alibi_slopes.view(num_kv_heads, -1, 1)
    sinks = None if sinks is None else sinks.view(num_kv_heads, -1)
    scoring = _Scoring(scale, softcap, slopes, sinks)
    grouped = query.view(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    if not parts.prefills and len(parts.decodes) == 1 and parts.decodes[0].query_rows is None:
        return _decode(grouped, k_cache, v_cache, parts.decodes[0], scoring).flatten(1)
    output = torch.empty_like(grouped)
    for group in parts.decodes:
        if group.query_rows is None:
            output = _decode(grouped, k_cache, v_cache, group, scoring)
        else:
            rows = grouped.index_select(0, group.query_rows)
            output.index_copy_(0, group.query_rows, _decode(rows, k_cache, v_cache, group, scoring))
    for row in parts.prefills:
        span = slice(row.query_start, row.query_start + row.query_len)
        output[span] = _prefill(grouped[span], k_cache, v_cache, row, scoring)
    return output.flatten(1)


@functools.cache
def _warn_of_head_dim(head_dim: int) -> None:
    logger.warning("head_dim is %d, more than %d: attention runs as plain PyTorch", head_dim, MAX_TRITON_HEAD_DIM)


def _is_native(query: Tensor, k_cache: Tensor, v_cache: Tensor) -> bool:
    has_rows = query.stride(2) == 1 and query.stride(1) == query.shape[2]
    is_dense = k_cache.is_contiguous() and v_cache.is_contiguous()
    return has_rows and is_dense and k_cache.dtype == v_cache.dtype and k_cache.dtype in (query.dtype, torch.int8)


def gather_blocks(cache: Tensor, block_ids: Tensor, *, head_dim: int, dtype: torch.dtype) -> Tensor:
    """[n, block_size, num_kv_heads, head_dim] of `dtype`, of a cache of it or of 8 bits."""
    if cache.dtype == FP8:  # which torch does not select from on every device
        return cache.view(torch.uint8).index_select(0, block_ids).view(FP8).to(dtype)
    blocks = cache.index_select(0, block_ids)
    return dequantize_rows(blocks, head_dim, dtype) if cache.dtype == torch.int8 else blocks


def _decode(query: Tensor, k_cache: Tensor, v_cache: Tensor, group: DecodeGroup, scoring: _Scoring) -> Tensor:
    """[n, num_kv_heads, group, head_dim] for n sequences with one query each."""
    n, num_kv_heads, _, head_dim = query.shape
    shape = (n, -1, num_kv_heads, head_dim)
    rows: dict[str, Any] = {"head_dim": head_dim, "dtype": query.dtype}
    key = gather_blocks(k_cache, group.block_ids, **rows).view(shape).transpose(1, 2)  # [n, Hkv, L, D]
    value = gather_blocks(v_cache, group.block_ids, **rows).view(shape).transpose(1, 2)
    # The heads of one KV head stand where the query tokens would: grouped queries without a copy of the keys.
    bias = None
    if scoring.slopes is not None:
        distances = torch.from_numpy(group.distances).to(query.device, torch.float32)
        bias = scoring.slopes * distances[:, None, None]  # [n, Hkv, group, L]
    sinks = None if scoring.sinks is None else scoring.sinks[:, :, None]  # [Hkv, group, 1]
    return _attend(query, key, value, group.mask, scoring, bias, sinks)


def _prefill(query: Tensor, k_cache: Tensor, v_cache: Tensor, row: PrefillRow, scoring: _Scoring) -> Tensor:
    """[query_len, num_kv_heads, group, head_dim] for one sequence."""
    num_heads = query.shape[2]
    keys = slice(row.first, row.first + row.num_keys)
    rows: dict[str, Any] = {"head_dim": query.shape[-1], "dtype": query.dtype}
    key = gather_blocks(k_cache, row.block_ids, **rows).flatten(0, 1)[keys].transpose(0, 1)  # [Hkv, L, D]
    value = gather_blocks(v_cache, row.block_ids, **rows).flatten(0, 1)[keys].transpose(0, 1)
    bias = None
    if scoring.slopes is not None:
        # Distances to the last query: to all scores of another one they add the same, which the softmax forgets.
        distances = torch.arange(1 - row.num_keys, 1, device=query.device, dtype=torch.float32)
        bias = (scoring.slopes * distances)[:, :, None]  # [Hkv, group, 1, L]
    attended = _attend(
        query.permute(1, 2, 0, 3),  # [Hkv, group, query_len, D]
        key[:, None].expand(-1, num_heads, -1, -1),
        value[:, None].expand(-1, num_heads, -1, -1),
        row.mask,
        scoring,
        bias,
        None if scoring.sinks is None else scoring.sinks[:, :, None, None],
    )
    return attended.permute(2, 0, 1, 3)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scoring: _Scoring,
    bias: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:
    """[*, query_len, D] queries over [*, L, D] keys; no mask is plain causal with query_len == L. `sinks`: as long as
    the scores but for the last two dimensions, which may be 1."""
    scale, softcap = scoring.scale, scoring.softcap
    if softcap is None and bias is None and sinks is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale)
    num_queries, num_keys = query.shape[-2], key.shape[-2]
    if mask is None:
        mask = torch.full((num_queries, num_keys), float("-inf"), dtype=query.dtype, device=query.device).triu(1)
    mask = mask.expand(*mask.shape[:-2], num_queries, num_keys)
    if bias is not None:
        bias = bias.expand(*bias.shape[:-2], num_queries, num_keys)
    size = max(1, MAX_SCORES // (query.shape[:-2].numel() * num_keys))
    parts = []
    for start in range(0, num_queries, size):
        scores = (query[..., start : start + size, :] @ key.transpose(-1, -2)).float() * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if bias is not None:
            scores = scores + bias[..., start : start + size, :]
        scores = scores + mask[..., start : start + size, :]
        if sinks is not None:
            sink = sinks.to(scores).expand(*scores.shape[:-1], 1)
            shares = torch.cat((scores, sink), dim=-1).softmax(dim=-1)[..., :-1]
        else:
            shares = scores.softmax(dim=-1)
        parts.append(shares.to(value.dtype) @ value)
    return torch.cat(parts, dim=-2)


def paged_attention_reference(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The specification of `paged_attention`: one query token at a time.

    Args:
        sinks: [num_heads].
    """
    group = query.shape[1] // k_cache.shape[2]
    output = torch.zeros_like(query)
    if k_cache.dtype == FP8:
        k_cache, v_cache = k_cache.float(), v_cache.float()
    token = 0
    for row, (query_len, seq_len) in enumerate(zip(plan.query_lens.tolist(), plan.seq_lens.tolist(), strict=True)):
        for position in range(seq_len - query_len, seq_len):
            first = 0 if window is None else max(position - window + 1, 0)
            seen = torch.arange(first, position + 1)
            blocks = torch.from_numpy(plan.block_table[row])[seen // plan.block_size].long().to(query.device)
            offsets = (seen % plan.block_size).to(query.device)
            key, value = k_cache[blocks, offsets], v_cache[blocks, offsets]
            if key.dtype == torch.int8:
                key, value = (dequantize_rows(rows, query.shape[2], torch.float32) for rows in (key, value))
            key = key.float().repeat_interleave(group, dim=1)  # [L, H, D]
            value = value.float().repeat_interleave(group, dim=1)
            scores = torch.einsum("hd,lhd->hl", query[token].float(), key) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if alibi_slopes is not None:
                scores = scores - alibi_slopes[:, None] * (position - seen).to(scores)
            if sinks is not None:
                scores = torch.cat((scores, sinks[:, None].to(scores)), dim=-1)
            shares = scores.softmax(dim=-1)[:, : seen.numel()]
            output[token] = torch.einsum("hl,lhd->hd", shares, value).to(query.dtype)
            token += 1
    return output.flatten(1)
