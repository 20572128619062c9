"""Head norms, rotation and cache writes in one Triton kernel: a head of a token a program."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagoda_kernels.attention.quantized_cache import FP8, aligned, scales_of
from pagoda_kernels.attention.rope_store import HeadNorms


def rope_store(
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    head_dim: int | None = None,
    rotary: tuple[Tensor, Tensor] | None = None,
    is_interleaved: bool = False,
    norms: HeadNorms | None = None,
) -> Tensor:
    """`pagoda_kernels.attention.rope_store.rope_store`; qkv's rows and the caches' heads contiguous. Keeps qkv.

    Args:
        head_dim: None is the width of the caches' rows, which int8 rows are wider than.
    """
    num_kv_heads, width = k_cache.shape[2:]
    head_dim = width if head_dim is None else head_dim
    heads = qkv.view(qkv.shape[0], qkv.shape[1] // head_dim, head_dim)
    num_heads = heads.shape[1] - 2 * num_kv_heads
    if rotary is None and norms is None:
        launch_store(None, heads[:, num_heads:-num_kv_heads], heads[:, -num_kv_heads:], k_cache, v_cache, slot_mapping)
        return heads[:, :num_heads]
    query = launch_store(
        heads[:, :num_heads],
        heads[:, num_heads:-num_kv_heads],
        heads[:, -num_kv_heads:],
        k_cache,
        v_cache,
        slot_mapping,
        rotary=rotary,
        is_interleaved=is_interleaved,
        norms=norms,
    )
    assert query is not None, "there are queries"
    return query


def launch_store(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    rotary: tuple[Tensor, Tensor] | None = None,
    is_interleaved: bool = False,
    norms: HeadNorms | None = None,
) -> Tensor | None:
    """Write keys and values, and give the queries; all [num_tokens, heads, head_dim], contiguous in the last.

    The caches are as key and value, or rows of `quantized_cache` in int8 or FP8.
    """
    num_tokens, num_kv_heads, head_dim = key.shape
    num_heads = 0 if query is None else query.shape[1]
    rotated = None if query is None else torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if not num_tokens:
        return rotated
    # Without queries, keys stand in for them: no program reads them there.
    queries, outputs = (key, key) if query is None or rotated is None else (query, rotated)
    cos, sin = (key, key) if rotary is None else (rotary[0].contiguous(), rotary[1].contiguous())
    kind = {torch.int8: "int8", FP8: "fp8"}.get(k_cache.dtype, "float")
    k_scales, v_scales = (scales_of(k_cache), scales_of(v_cache)) if kind == "int8" else (key, key)
    if kind == "fp8":
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    _store_kernel[(num_tokens, num_heads + num_kv_heads)](
        queries,
        key,
        value,
        k_cache,
        v_cache,
        k_scales,
        v_scales,
        outputs,
        slot_mapping,
        cos,
        sin,
        key if norms is None else norms.q_weight,
        key if norms is None else norms.k_weight,
        0.0 if norms is None else norms.eps,
        0.0 if norms is None else norms.weight_offset,
        num_heads,
        k_cache.shape[1],
        queries.stride(0),
        queries.stride(1),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        v_cache.stride(0),
        v_cache.stride(1),
        v_cache.stride(2),
        HEAD_DIM=head_dim,
        ROTARY_DIM=0 if rotary is None else 2 * cos.shape[-1],
        IS_INTERLEAVED=is_interleaved,
        HAS_NORMS=norms is not None,
        NORMS_LAST=norms is not None and norms.is_last,
        CACHE=kind,
        ALIGNED=aligned(head_dim) if kind == "int8" else head_dim,
        BLOCK_D=triton.next_power_of_2(aligned(head_dim)),
        num_warps=1,
    )
    return rotated


@triton.jit
def _store_kernel(
    query_ptr, key_ptr, value_ptr, k_cache_ptr, v_cache_ptr, k_scales_ptr, v_scales_ptr, output_ptr,
    slot_mapping_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr, eps, weight_offset, num_heads, block_size,
    query_token_stride, query_head_stride, key_token_stride, key_head_stride, value_token_stride, value_head_stride,
    k_block_stride, k_slot_stride, k_head_stride, v_block_stride, v_slot_stride, v_head_stride,
    HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, IS_INTERLEAVED: tl.constexpr, HAS_NORMS: tl.constexpr,
    NORMS_LAST: tl.constexpr, CACHE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (token, head): the first num_heads are queries, the others keys with their values."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    is_dim = dims < HEAD_DIM
    if head < num_heads:
        source = query_ptr + token * query_token_stride + head * query_head_stride
        x = _turned(
            source, q_weight_ptr, cos_ptr, sin_ptr, token, eps, weight_offset,
            HEAD_DIM, ROTARY_DIM, IS_INTERLEAVED, HAS_NORMS, NORMS_LAST, BLOCK_D,
        )  # fmt: skip
        target = output_ptr + (token * num_heads + head) * HEAD_DIM
        tl.store(target + dims, x.to(output_ptr.dtype.element_ty), mask=is_dim)
    else:
        slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
        if slot >= 0:
            kv_head = head - num_heads
            block = slot // block_size
            offset = slot % block_size
            source = key_ptr + token * key_token_stride + kv_head * key_head_stride
            x = _turned(
                source, k_weight_ptr, cos_ptr, sin_ptr, token, eps, weight_offset,
                HEAD_DIM, ROTARY_DIM, IS_INTERLEAVED, HAS_NORMS, NORMS_LAST, BLOCK_D,
            )  # fmt: skip
            # As it would be read from a cache of floats.
            x = x.to(key_ptr.dtype.element_ty).to(tl.float32)
            place = block * k_block_stride + offset * k_slot_stride + kv_head * k_head_stride
            _store_row(x, k_cache_ptr + place, k_scales_ptr + place // 4, dims, ALIGNED, CACHE)
            source = value_ptr + token * value_token_stride + kv_head * value_head_stride
            x = tl.load(source + dims, mask=is_dim, other=0.0).to(tl.float32)
            place = block * v_block_stride + offset * v_slot_stride + kv_head * v_head_stride
            _store_row(x, v_cache_ptr + place, v_scales_ptr + place // 4, dims, ALIGNED, CACHE)


@triton.jit
def _store_row(x, row_ptr, scale_ptr, dims, ALIGNED: tl.constexpr, CACHE: tl.constexpr):
    """x: [BLOCK_D] float32, zero after the head. In 8 bits as `quantized_cache` does, to the bit (NaNs may differ)."""
    ROUND: tl.constexpr = 12582912.0  # 1.5 * 2^23: adding it leaves no place for fractions
    if CACHE == "int8":
        is_nan = tl.max((x != x).to(tl.int32), axis=0) > 0
        scale = tl.where(is_nan, float("nan"), tl.div_rn(tl.max(tl.abs(x), axis=0), 127.0))
        ratios = tl.div_rn(x, tl.zeros_like(x) + scale)
        codes = tl.minimum(tl.maximum((ratios + ROUND) - ROUND, -127.0), 127.0)
        codes = tl.where(ratios == ratios, codes, 0.0)
        tl.store(row_ptr + dims, codes.to(tl.int8), mask=dims < ALIGNED)
        tl.store(scale_ptr, scale)
    elif CACHE == "fp8":
        # By hand: older devices have no instruction for it, and the interpreter's has other roundings.
        magnitudes = tl.minimum(tl.abs(x), 448.0)
        bits = magnitudes.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960  # the exponent's bias is 7 instead of 127
        small = ((magnitudes * 512.0 + ROUND) - ROUND).to(tl.int32)
        codes = tl.where(magnitudes < 0.015625, small, normal)
        codes = tl.where(tl.abs(x) < float("inf"), codes, 127) | ((x.to(tl.int32, bitcast=True) >> 24) & 128)
        tl.store(row_ptr + dims, codes.to(tl.uint8), mask=dims < ALIGNED)
    else:
        tl.store(row_ptr + dims, x.to(row_ptr.dtype.element_ty), mask=dims < ALIGNED)


@triton.jit
def _turned(
    x_ptr, weight_ptr, cos_ptr, sin_ptr, token, eps, weight_offset,
    HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, IS_INTERLEAVED: tl.constexpr, HAS_NORMS: tl.constexpr,
    NORMS_LAST: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """[BLOCK_D] float32: one head, its norm taken, its first ROTARY_DIM values rotated, before the norm or after it."""
    dims = tl.arange(0, BLOCK_D)
    is_dim = dims < HEAD_DIM
    x = tl.load(x_ptr + dims, mask=is_dim, other=0.0).to(tl.float32)
    scale = 1.0
    if HAS_NORMS and not NORMS_LAST:
        scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / HEAD_DIM + eps)
        x = x * scale * (tl.load(weight_ptr + dims, mask=is_dim, other=0.0).to(tl.float32) + weight_offset)
    if ROTARY_DIM > 0:
        HALF: tl.constexpr = ROTARY_DIM // 2
        is_rotated = dims < ROTARY_DIM
        if IS_INTERLEAVED:
            pair = dims // 2
            is_first = dims % 2 == 0
            partner = tl.where(is_first, dims + 1, dims - 1)
        else:
            pair = dims % HALF
            is_first = dims < HALF
            partner = tl.where(is_first, dims + HALF, dims - HALF)
        cos = tl.load(cos_ptr + token * HALF + pair, mask=is_rotated, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + token * HALF + pair, mask=is_rotated, other=0.0).to(tl.float32)
        other = tl.load(x_ptr + partner, mask=is_rotated, other=0.0).to(tl.float32)
        if HAS_NORMS and not NORMS_LAST:
            weight = tl.load(weight_ptr + partner, mask=is_rotated, other=0.0).to(tl.float32)
            other = other * scale * (weight + weight_offset)
        x = tl.where(is_rotated, x * cos + tl.where(is_first, -other, other) * sin, x)
    if NORMS_LAST:
        scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / HEAD_DIM + eps)
        x = x * scale * (tl.load(weight_ptr + dims, mask=is_dim, other=0.0).to(tl.float32) + weight_offset)
    return x
