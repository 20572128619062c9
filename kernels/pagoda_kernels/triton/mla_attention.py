"""Attention over paged latents in Triton: queries that have met key_up, one token and some heads a program, and long
contexts split along their keys.

A latent is read once for all heads of a program: as their key, and as what they sum. Softmax is online, in powers of
two. Int8 latents are multiplied as whole numbers; the scores and the weights of the sum take their scales.

Source: DeepSeek-AI 2024 (arXiv 2405.04434); splitting of keys as in Flash-Decoding, Dao et al. 2023.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagoda_kernels.attention.quantized_cache import scales_of
from pagoda_kernels.attention.tables import AttentionTables
from pagoda_kernels.triton.launch import is_interpreted, num_multiprocessors

LOG2E = math.log2(math.e)
MIN_KEYS_A_SPLIT = 256
MAX_SPLITS = 32


def mla_attention(
    query: Tensor, cache: Tensor, tables: AttentionTables, *, rank: int, scale: float, num_splits: int | None = None
) -> Tensor:
    """Sums of latents, weighted with the softmax of what queries have in common with them.

    Args:
        query: [num_tokens, num_heads, rank + rotary_dim], contiguous in the last dimension.
        cache: as in `pagoda_kernels.attention.mla_attention.mla_attention`.
        tables: of the batch, of which sequences should have few query tokens: each of these reads the latents.
        num_splits: parts that the keys of each token are divided into; None chooses.

    Returns:
        [num_tokens, num_heads, rank], contiguous.
    """
    num_tokens, num_heads, width = query.shape
    output = torch.empty((num_tokens, num_heads, rank), dtype=query.dtype, device=query.device)
    if not num_tokens:
        return output
    if query.stride(2) != 1 or cache.stride(3) != 1:
        raise ValueError("query and cache must be contiguous in their last dimension")
    is_wide, has_scales = query.dtype == torch.float32, cache.dtype == torch.int8
    block_h = 16 if is_wide or num_heads <= 16 else 32
    num_tiles = triton.cdiv(num_heads, block_h)
    if num_splits is None:
        max_keys = tables.block_table.shape[1] * cache.shape[1]
        num_splits = _num_splits(num_tokens * num_tiles, max_keys, query.device)
    partial = weights = output
    if num_splits > 1:
        shape = (num_tokens, num_heads, num_splits)
        partial = torch.empty((*shape, rank), dtype=torch.float32, device=query.device)
        weights = torch.empty(shape, dtype=torch.float32, device=query.device)
    block_r = max(16, triton.next_power_of_2(rank))
    _mla_attention_kernel[(num_tokens, num_tiles, num_splits)](
        query,
        cache,
        scales_of(cache) if has_scales else None,
        output,
        partial,
        weights,
        tables.query_start_loc,
        tables.seq_lens,
        tables.block_table,
        tables.seq_lens.shape[0],
        num_heads,
        scale * LOG2E,
        query.stride(0),
        query.stride(1),
        cache.stride(0),
        cache.stride(1),
        tables.block_table.stride(0),
        RANK=rank,
        ROTARY_DIM=width - rank,
        BLOCK_SIZE=cache.shape[1],
        BLOCK_R=block_r,
        BLOCK_P=max(16, triton.next_power_of_2(width - rank)),
        BLOCK_H=block_h,
        BLOCK_N=16 if is_wide else 32,
        NUM_SPLITS=num_splits,
        HAS_SCALES=has_scales,
        IS_WIDENED=is_interpreted(_mla_attention_kernel),
        num_warps=8 if block_h > 16 or is_wide else 4,
        num_stages=1 if is_wide else 2,
    )
    if num_splits > 1:
        _join_latents_kernel[(num_tokens, num_heads)](
            partial, weights, output, RANK=rank, BLOCK_R=block_r, NUM_SPLITS=num_splits
        )
    return output


def _num_splits(num_programs: int, num_keys: int, device: torch.device) -> int:
    """Enough to keep all multiprocessors busy, as a power of two: each is a kernel of its own."""
    wanted = triton.cdiv(2 * num_multiprocessors(device), num_programs)
    splits = max(1, min(wanted, num_keys // MIN_KEYS_A_SPLIT, MAX_SPLITS))
    return 1 << (splits.bit_length() - 1)


@triton.jit
def _mla_attention_kernel(
    query_ptr, cache_ptr, scales_ptr, output_ptr, partial_ptr, weights_ptr,
    query_start_loc_ptr, seq_lens_ptr, block_table_ptr, num_seqs, num_heads, scale,
    query_token_stride, query_head_stride, block_stride, slot_stride, table_stride,
    RANK: tl.constexpr, ROTARY_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
    NUM_SPLITS: tl.constexpr, HAS_SCALES: tl.constexpr, IS_WIDENED: tl.constexpr,
):  # fmt: skip
    """Program (token, tile of heads, split)."""
    token = tl.program_id(0)
    split = tl.program_id(2)
    low = token * 0
    high = num_seqs + low
    while low < high:  # the first sequence that ends after the token
        middle = (low + high) // 2
        if tl.load(query_start_loc_ptr + middle + 1) <= token:
            low = middle + 1
        else:
            high = middle
    if low >= num_seqs:
        return  # padding
    seq = low.to(tl.int64)
    query_end = tl.load(query_start_loc_ptr + seq + 1)
    end = tl.load(seq_lens_ptr + seq) - (query_end - token) + 1  # keys that the token sees

    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head = heads < num_heads
    ranks = tl.arange(0, BLOCK_R)
    dims = tl.arange(0, BLOCK_P)
    is_rank = ranks < RANK
    is_dim = dims < ROTARY_DIM
    query_rows = query_ptr + token.to(tl.int64) * query_token_stride + heads[:, None] * query_head_stride
    q = tl.load(query_rows + ranks[None, :], mask=is_head[:, None] & is_rank[None, :], other=0.0)  # [H, R]
    turned = tl.load(query_rows + RANK + dims[None, :], mask=is_head[:, None] & is_dim[None, :], other=0.0)  # [H, P]
    if IS_WIDENED:
        q = q.to(tl.float32)
        turned = turned.to(tl.float32)

    begin = end * 0
    if NUM_SPLITS > 1:
        share = tl.cdiv(tl.cdiv(end, BLOCK_N), NUM_SPLITS) * BLOCK_N
        begin = split * share
        end = tl.minimum(end, begin + share)
    table_ptr = block_table_ptr + seq * table_stride
    top = tl.full([BLOCK_H], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_H], dtype=tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_R], dtype=tl.float32)
    for start in range(begin, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        # What the token does not see is not read: another sequence may have left a NaN there.
        is_key = keys < end
        blocks = tl.load(table_ptr + keys // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        rows = blocks * block_stride + (keys % BLOCK_SIZE) * slot_stride
        if HAS_SCALES:
            rows = tl.multiple_of(rows, 4)
        places = cache_ptr + rows[:, None]
        latents = tl.load(places + ranks[None, :], mask=is_key[:, None] & is_rank[None, :], other=0.0)  # [N, R]
        rotated = tl.load(places + RANK + dims[None, :], mask=is_key[:, None] & is_dim[None, :], other=0.0)  # [N, P]
        latents = latents.to(q.dtype)
        rotated = rotated.to(q.dtype)
        scores = tl.dot(q, tl.trans(latents), input_precision="ieee")  # [H, N]
        scores = tl.dot(turned, tl.trans(rotated), scores, input_precision="ieee") * scale
        if HAS_SCALES:
            scales = tl.load(scales_ptr + rows // 4, mask=is_key, other=0.0)
            scores *= scales[None, :]
        scores = tl.where(is_key[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        shares = tl.exp2(scores - new_top[:, None])
        rescale = tl.exp2(top - new_top)
        total = total * rescale + tl.sum(shares, axis=1)
        if HAS_SCALES:
            shares *= scales[None, :]
        acc = tl.dot(shares.to(latents.dtype), latents, acc * rescale[:, None], input_precision="ieee")
        top = new_top

    is_seen = total > 0.0
    acc = acc / tl.where(is_seen, total, 1.0)[:, None]
    is_stored = is_head[:, None] & is_rank[None, :]
    places = token.to(tl.int64) * num_heads + heads
    if NUM_SPLITS > 1:
        places = places * NUM_SPLITS + split
        weights = tl.where(is_seen, top + tl.log2(tl.where(is_seen, total, 1.0)), float("-inf"))
        tl.store(weights_ptr + places, weights, mask=is_head)
        tl.store(partial_ptr + places[:, None] * RANK + ranks[None, :], acc, mask=is_stored)
    else:
        tl.store(
            output_ptr + places[:, None] * RANK + ranks[None, :], acc.to(output_ptr.dtype.element_ty), mask=is_stored
        )


@triton.jit
def _join_latents_kernel(
    partial_ptr, weights_ptr, output_ptr, RANK: tl.constexpr, BLOCK_R: tl.constexpr, NUM_SPLITS: tl.constexpr
):  # fmt: skip
    """Program (token, head): the mean of the splits' sums, weighted with two to the power of their weights. What it
    makes of padding is in its own row and means nothing."""
    place = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    splits, ranks = tl.arange(0, NUM_SPLITS), tl.arange(0, BLOCK_R)
    places = place * NUM_SPLITS + splits
    weights = tl.load(weights_ptr + places)
    is_used = weights > float("-inf")
    shares = tl.where(is_used, tl.exp2(weights - tl.max(weights, axis=0)), 0.0)
    is_read = is_used[:, None] & (ranks < RANK)[None, :]
    parts = tl.load(partial_ptr + places[:, None] * RANK + ranks[None, :], mask=is_read, other=0.0)  # [S, R]
    joined = tl.sum(parts * shares[:, None], axis=0) / tl.sum(shares, axis=0)
    tl.store(output_ptr + place * RANK + ranks, joined.to(output_ptr.dtype.element_ty), mask=ranks < RANK)
