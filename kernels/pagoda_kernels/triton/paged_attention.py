"""Paged attention in Triton: prompts, chunks and decodes; long decodes are split along their keys.

Queries that share a KV head stand in one tile, so its keys are read once for all of them. Softmax is online, in powers
of two. Keys and values of 8 bits are taken to the queries' data type in registers: FP8 as it is (devices convert it
from compute capability 8.9 on), int8 values with their scales, int8 keys without: the scores take theirs.

Source: FlashAttention-2, Dao 2023 (arXiv 2307.08691); splitting of keys as in Flash-Decoding, Dao et al. 2023.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagoda_kernels.attention.quantized_cache import scales_of
from pagoda_kernels.attention.tables import AttentionTables
from pagoda_kernels.triton.launch import is_interpreted, num_multiprocessors

MAX_HEAD_DIM = 256
LOG2E = math.log2(math.e)
MIN_KEYS_A_SPLIT = 256
MAX_SPLITS = 64
SINGLES, SPLIT_SINGLES = (64, 2, 3), (128, 4, 2)
"""Keys of a tile, warps and stages where a sequence has one query token: the fastest of those that were measured on an
H200 with head_dim 128 and four heads a KV head."""


def paged_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tables: AttentionTables,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """`pagoda_kernels.attention.paged_attention.paged_attention`, whose arguments these are.

    Args:
        num_splits: parts that the keys of sequences with one query token are divided into; None chooses.

    Returns:
        [num_tokens, num_heads * head_dim], contiguous.
    """
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if not query.shape[0]:
        return output.flatten(1)
    if query.stride(2) != 1 or k_cache.stride(3) != 1 or v_cache.stride(3) != 1:
        raise ValueError("query and cache must be contiguous in their last dimension")
    scoring = _Scoring(scale, window, softcap, alibi_slopes, sinks)
    num_seqs, num_kv_heads = tables.seq_lens.shape[0], k_cache.shape[2]
    group = query.shape[1] // num_kv_heads
    if tables.num_singles:
        if num_splits is None:
            num_splits = _num_splits(tables.num_singles * num_kv_heads, tables.max_single_len, query.device)
        _attend_singles(query, k_cache, v_cache, output, tables, scoring, num_splits)
    if tables.max_query_len > 1:
        is_wide = query.shape[2] > 128 or query.dtype == torch.float32
        block_m = max(64 if is_wide else 128, triton.next_power_of_2(group))
        if is_interpreted(_paged_attention_kernel):
            block_m = max(16, triton.next_power_of_2(group))  # small cases should still need several tiles
        grid = (query.shape[0] // (block_m // group) + num_seqs, num_kv_heads, 1)
        _launch(grid, query, k_cache, v_cache, (output, output, output), tables, scoring, block_m=block_m)
    return output.flatten(1)


class _Scoring(NamedTuple):
    """How scores are made of queries and keys, and weights of scores."""

    scale: float
    window: int | None
    softcap: float | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None


def _num_splits(num_programs: int, num_keys: int, device: torch.device) -> int:
    """Enough to keep all multiprocessors busy, as a power of two: each is a kernel of its own."""
    wanted = triton.cdiv(2 * num_multiprocessors(device), num_programs)
    splits = max(1, min(wanted, num_keys // MIN_KEYS_A_SPLIT, MAX_SPLITS))
    return 1 << (splits.bit_length() - 1)


def _attend_singles(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    output: Tensor,
    tables: AttentionTables,
    scoring: _Scoring,
    num_splits: int,
) -> None:
    """Sequences with one query token; the others' rows of the output stay as they are."""
    num_seqs, num_kv_heads = tables.seq_lens.shape[0], k_cache.shape[2]
    num_heads, head_dim = query.shape[1:]
    block_m = max(16, triton.next_power_of_2(num_heads // num_kv_heads))
    grid = (num_seqs, num_kv_heads, num_splits)
    if num_splits == 1:
        outputs = (output, output, output)
        _launch(grid, query, k_cache, v_cache, outputs, tables, scoring, block_m=block_m, is_single=True)
        return
    partial = torch.empty((num_seqs, num_heads, num_splits, head_dim), dtype=torch.float32, device=query.device)
    weights = torch.empty((num_seqs, num_heads, num_splits), dtype=torch.float32, device=query.device)
    outputs = (output, partial, weights)
    _launch(grid, query, k_cache, v_cache, outputs, tables, scoring, block_m=block_m, is_single=True)
    _join_splits_kernel[(num_seqs, num_heads)](
        partial,
        weights,
        output,
        tables.query_start_loc,
        output.stride(0),
        output.stride(1),
        HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        NUM_SPLITS=num_splits,
    )


def _launch(
    grid: tuple[int, int, int],
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    outputs: tuple[Tensor, Tensor, Tensor],
    tables: AttentionTables,
    scoring: _Scoring,
    *,
    block_m: int,
    is_single: bool = False,
) -> None:
    """The kernel over `grid`, whose last dimension is the splits. `outputs`: whole, of the splits, weights of these."""
    num_heads, head_dim = query.shape[1:]
    group = num_heads // k_cache.shape[2]
    scale, window, softcap, alibi_slopes, sinks = scoring
    block_d = max(16, triton.next_power_of_2(head_dim))
    is_wide = query.dtype == torch.float32 or block_d > 128
    interpreted = is_interpreted(_paged_attention_kernel)
    has_scales = k_cache.dtype == torch.int8
    block_n, num_warps, num_stages = (32, 4, 2) if is_wide else (64, 4, 3)
    if is_single and not is_wide and k_cache.dtype == query.dtype:
        block_n, num_warps, num_stages = SINGLES if grid[2] == 1 else SPLIT_SINGLES
    elif block_m >= 128:
        num_warps = 8
    _paged_attention_kernel[grid](
        query,
        k_cache,
        v_cache,
        scales_of(k_cache) if has_scales else None,
        scales_of(v_cache) if has_scales else None,
        *outputs,
        tables.query_start_loc,
        tables.seq_lens,
        tables.block_table,
        alibi_slopes,
        sinks,
        tables.seq_lens.shape[0],
        scale * LOG2E if softcap is None else scale / softcap,
        0.0 if softcap is None else softcap * LOG2E,
        0 if window is None else window,
        query.stride(0),
        query.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        v_cache.stride(0),
        v_cache.stride(1),
        v_cache.stride(2),
        tables.block_table.stride(0),
        outputs[0].stride(0),
        outputs[0].stride(1),
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=k_cache.shape[1],
        BLOCK_D=block_d,
        BLOCK_Q=1 if is_single else block_m // group,
        BLOCK_M=block_m,
        BLOCK_N=64 if interpreted else block_n,
        NUM_SPLITS=grid[2],
        IS_SINGLE=is_single,
        HAS_WINDOW=window is not None,
        HAS_SOFTCAP=softcap is not None,
        HAS_SLOPES=alibi_slopes is not None,
        HAS_SINKS=sinks is not None,
        HAS_SCALES=has_scales,
        IS_WIDENED=interpreted,
        num_warps=num_warps,
        num_stages=num_stages,
    )


@triton.jit
def _paged_attention_kernel(
    query_ptr, k_cache_ptr, v_cache_ptr, k_scales_ptr, v_scales_ptr, output_ptr, partial_ptr, weights_ptr,
    query_start_loc_ptr, seq_lens_ptr, block_table_ptr, slopes_ptr, sinks_ptr,
    num_seqs, scale, softcap, window,
    query_token_stride, query_head_stride,
    k_block_stride, k_slot_stride, k_head_stride, v_block_stride, v_slot_stride, v_head_stride,
    table_stride, output_token_stride, output_head_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    NUM_SPLITS: tl.constexpr, IS_SINGLE: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_SCALES: tl.constexpr, IS_WIDENED: tl.constexpr,
):  # fmt: skip
    """Program (i, kv_head, split): rows are BLOCK_Q query tokens of one sequence times GROUP heads.

    IS_SINGLE: i is a sequence, left to others unless it has one token. Else i counts tiles of BLOCK_Q tokens, of which
    sequence s owns those from query_start_loc[s] // BLOCK_Q + s on: never too few, and known without a list.
    """
    # Backwards: the last tiles of a prompt have the most keys, and should not start last.
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    if IS_SINGLE:
        seq = index
        tile = index * 0
    else:
        low = index * 0
        high = num_seqs + index * 0
        while low < high:
            middle = (low + high) // 2
            if tl.load(query_start_loc_ptr + middle) // BLOCK_Q + middle <= index:
                low = middle + 1
            else:
                high = middle
        seq = low - 1
        tile = index - (tl.load(query_start_loc_ptr + seq) // BLOCK_Q + seq)
    query_start = tl.load(query_start_loc_ptr + seq)
    query_len = tl.load(query_start_loc_ptr + seq + 1) - query_start
    if IS_SINGLE:
        if query_len != 1:
            return
    else:
        if (query_len <= 1) | (tile * BLOCK_Q >= query_len):
            return
    seq_len = tl.load(seq_lens_ptr + seq)

    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    tokens = tile * BLOCK_Q + rows // GROUP  # [M] of the sequence
    heads = kv_head * GROUP + rows % GROUP
    is_row = (rows < BLOCK_Q * GROUP) & (tokens < query_len)
    is_dim = dims < HEAD_DIM
    first = seq_len - query_len + tile * BLOCK_Q  # position of the first row
    positions = seq_len - query_len + tokens
    query_rows = (query_start + tokens).to(tl.int64)
    q = tl.load(
        query_ptr + query_rows[:, None] * query_token_stride + heads[:, None] * query_head_stride + dims[None, :],
        mask=is_row[:, None] & is_dim[None, :],
        other=0.0,
    )  # [M, D]
    if IS_WIDENED:
        q = q.to(tl.float32)
    slopes = tl.zeros([BLOCK_M], dtype=tl.float32)
    if HAS_SLOPES:
        slopes = tl.load(slopes_ptr + heads, mask=is_row, other=0.0) * 1.4426950408889634
    top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    if HAS_SINKS:
        # A key of the first split that every row sees, whose value is zero.
        sinks = tl.load(sinks_ptr + heads, mask=is_row, other=0.0).to(tl.float32) * 1.4426950408889634
        top = tl.where(split == 0, sinks, top)
        total = tl.where(split == 0, total + 1.0, total)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)

    # Keys begin … end - 1 are seen by some row, those before `plain_end` by all of them.
    end = tl.minimum(first + BLOCK_Q, seq_len)
    begin = end * 0
    if HAS_WINDOW:
        begin = tl.maximum(first - window + 1, 0) // BLOCK_N * BLOCK_N
    if NUM_SPLITS > 1:
        share = tl.cdiv(tl.cdiv(end - begin, BLOCK_N), NUM_SPLITS) * BLOCK_N
        begin += split * share
        end = tl.minimum(end, begin + share)
    plain_end = begin
    if not HAS_WINDOW:
        plain_end = begin + tl.maximum(tl.minimum(first + 1, end) - begin, 0) // BLOCK_N * BLOCK_N
    table_ptr = block_table_ptr + seq.to(tl.int64) * table_stride
    k_head, v_head = kv_head * k_head_stride, kv_head * v_head_stride
    if HAS_SCALES:
        k_head, v_head = tl.multiple_of(k_head, 4), tl.multiple_of(v_head, 4)
        k_scales_ptr += k_head // 4
        v_scales_ptr += v_head // 4
    k_ptr = k_cache_ptr + k_head
    v_ptr = v_cache_ptr + v_head
    if not HAS_WINDOW:
        acc, top, total = _attend(
            acc, top, total, q, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr, begin, plain_end,
            positions, slopes, scale, softcap, window,
            k_block_stride, k_slot_stride, v_block_stride, v_slot_stride,
            HEAD_DIM, BLOCK_SIZE, BLOCK_D, BLOCK_N, False, False, HAS_SOFTCAP, HAS_SLOPES, HAS_SCALES,
        )  # fmt: skip
    acc, top, total = _attend(
        acc, top, total, q, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr, plain_end, end,
        positions, slopes, scale, softcap, window,
        k_block_stride, k_slot_stride, v_block_stride, v_slot_stride,
        HEAD_DIM, BLOCK_SIZE, BLOCK_D, BLOCK_N, True, HAS_WINDOW, HAS_SOFTCAP, HAS_SLOPES, HAS_SCALES,
    )  # fmt: skip

    is_seen = total > 0.0
    acc = acc / tl.where(is_seen, total, 1.0)[:, None]
    is_stored = is_row[:, None] & is_dim[None, :]
    output_rows = query_rows * output_token_stride + heads * output_head_stride
    if NUM_SPLITS > 1:
        places = (seq.to(tl.int64) * tl.num_programs(1) * GROUP + heads) * NUM_SPLITS + split
        weights = tl.where(is_seen, top + tl.log2(tl.where(is_seen, total, 1.0)), float("-inf"))
        tl.store(weights_ptr + places, weights, mask=is_row)
        tl.store(partial_ptr + places[:, None] * HEAD_DIM + dims[None, :], acc, mask=is_stored)
    else:
        tl.store(
            output_ptr + output_rows[:, None] + dims[None, :],
            acc.to(output_ptr.dtype.element_ty),
            mask=is_stored,
        )


@triton.jit
def _attend(
    acc, top, total, q, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr, begin, end,
    positions, slopes, scale, softcap, window,
    k_block_stride, k_slot_stride, v_block_stride, v_slot_stride,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SLOPES: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):  # fmt: skip
    """Fold the keys begin … end - 1 into the running output, maximum and sum. Not IS_MASKED: all rows see all keys."""
    dims = tl.arange(0, BLOCK_D)
    is_dim = dims < HEAD_DIM
    lowest = begin * 0
    if HAS_WINDOW:
        lowest = tl.min(positions, axis=0) - window + 1
    for start in range(begin, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        # What no row sees is not read: another sequence may have left a NaN there.
        is_key = (keys < end) & (keys >= lowest) if IS_MASKED else keys >= 0
        blocks = tl.load(table_ptr + keys // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        offsets = keys % BLOCK_SIZE
        k_rows = blocks * k_block_stride + offsets * k_slot_stride
        v_rows = blocks * v_block_stride + offsets * v_slot_stride
        if HAS_SCALES:  # rows are aligned to their scales, if to no more
            k_rows, v_rows = tl.multiple_of(k_rows, 4), tl.multiple_of(v_rows, 4)
        k = tl.load(
            k_ptr + k_rows[None, :] + dims[:, None], mask=is_key[None, :] & is_dim[:, None], other=0.0
        )  # [D, N]
        v = tl.load(
            v_ptr + v_rows[:, None] + dims[None, :], mask=is_key[:, None] & is_dim[None, :], other=0.0
        )  # [N, D]
        if HAS_SCALES:
            v_scales = tl.load(v_scales_ptr + v_rows // 4, mask=is_key, other=0.0)
            v = v.to(tl.float32) * v_scales[:, None]
        k = k.to(q.dtype)
        v = v.to(q.dtype)
        scores = tl.dot(q, k, input_precision="ieee") * scale  # [M, N]
        if HAS_SCALES:
            scores *= tl.load(k_scales_ptr + k_rows // 4, mask=is_key, other=0.0)[None, :]
        if HAS_SOFTCAP:
            scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores) + 1.0))
        if HAS_SLOPES:
            scores -= slopes[:, None] * (positions[:, None] - keys[None, :]).to(tl.float32)
        if IS_MASKED:
            is_seen = is_key[None, :] & (keys[None, :] <= positions[:, None])
            if HAS_WINDOW:
                is_seen &= keys[None, :] > positions[:, None] - window
            scores = tl.where(is_seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        shares = tl.exp2(scores - base[:, None])  # [M, N]
        rescale = tl.exp2(top - base)
        total = total * rescale + tl.sum(shares, axis=1)
        acc = tl.dot(shares.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
        top = new_top
    return acc, top, total


@triton.jit
def _join_splits_kernel(
    partial_ptr, weights_ptr, output_ptr, query_start_loc_ptr, output_token_stride, output_head_stride,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, NUM_SPLITS: tl.constexpr,
):  # fmt: skip
    """Program (sequence, head): the mean of the splits' outputs, weighted with two to the power of their weights."""
    seq, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = tl.load(query_start_loc_ptr + seq)
    if tl.load(query_start_loc_ptr + seq + 1) - token != 1:
        return
    splits, dims = tl.arange(0, NUM_SPLITS), tl.arange(0, BLOCK_D)
    places = (seq * tl.num_programs(1) + head) * NUM_SPLITS + splits
    weights = tl.load(weights_ptr + places)
    is_used = weights > float("-inf")
    shares = tl.where(is_used, tl.exp2(weights - tl.max(weights, axis=0)), 0.0)
    is_read = is_used[:, None] & (dims < HEAD_DIM)[None, :]
    parts = tl.load(partial_ptr + places[:, None] * HEAD_DIM + dims[None, :], mask=is_read, other=0.0)  # [S, D]
    joined = tl.sum(parts * shares[:, None], axis=0) / tl.sum(shares, axis=0)
    place = token.to(tl.int64) * output_token_stride + head * output_head_stride
    tl.store(output_ptr + place + dims, joined.to(output_ptr.dtype.element_ty), mask=dims < HEAD_DIM)
