"""The operations between the projection to queries, keys and values and attention: norms, rotation, cache writes."""

from typing import NamedTuple

import torch
from torch import Tensor

from pagoda_kernels.attention.quantized_cache import FP8
from pagoda_kernels.attention.rotary_embedding import rotary_embedding
from pagoda_kernels.attention.store_kv_cache import store_kv_cache
from pagoda_kernels.layers.rms_norm import rms_norm
from pagoda_kernels.native.library import NATIVE_DTYPES, native
from pagoda_kernels.selection import TRITON_DTYPES, triton_kernel

MAX_HEAD_DIM = 1024
"""Largest head of the C++ kernel."""


class HeadNorms(NamedTuple):
    """Root-mean-square norms of each head of queries and keys."""

    q_weight: Tensor
    """[head_dim]."""
    k_weight: Tensor
    eps: float
    weight_offset: float = 0.0
    """Added to both weights."""
    is_last: bool = False
    """They are of rotated queries and keys (Hunyuan); else the rotation is of normed ones."""


def rope_store(
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    rotary: tuple[Tensor, Tensor] | None = None,
    is_interleaved: bool = False,
    norms: HeadNorms | None = None,
    has_skips: bool = True,
) -> Tensor:
    """Norm and rotate queries and keys, and write keys and values into the paged cache, in one pass over `qkv`.

    Args:
        qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], queries, keys, values; its queries may be changed.
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], same dtype as qkv or `quantized_cache.FP8`.
        slot_mapping: [num_tokens] int64; slot = block_id * block_size + offset; -1 skips the token.
        rotary: cosines and sines as `rotary_embedding` takes them; None rotates nothing.
        is_interleaved: as `rotary_embedding`.
        norms: of queries and keys, before the rotation or after it.
        has_skips: False promises that no slot is -1.

    Returns:
        Queries, [num_tokens, num_heads, head_dim]; a view of `qkv` from the C++ kernel.
    """
    num_kv_heads, head_dim = k_cache.shape[2:]
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    if num_heads < 1 or qkv.shape[1] % head_dim:
        raise ValueError(f"qkv {tuple(qkv.shape)} does not fit a cache of {tuple(k_cache.shape)}")
    if slot_mapping.shape[0] != qkv.shape[0]:
        raise ValueError(f"slot_mapping has {slot_mapping.shape[0]} entries for {qkv.shape[0]} tokens")
    if rotary is not None and rotary[0].shape[-1] * 2 > head_dim:
        raise ValueError(f"head_dim is {head_dim}, cos has {rotary[0].shape[-1]} angles")
    kernel = triton_kernel("rope_store", qkv)
    is_contiguous = qkv.stride(1) == k_cache.stride(3) == v_cache.stride(3) == 1
    is_known = qkv.dtype in TRITON_DTYPES and k_cache.dtype == v_cache.dtype and k_cache.dtype in (qkv.dtype, FP8)
    if kernel is not None and is_contiguous and is_known:
        query: Tensor = kernel(
            qkv, k_cache, v_cache, slot_mapping, rotary=rotary, is_interleaved=is_interleaved, norms=norms
        )
        return query
    kernel = native("rope_store") if qkv.is_cpu else None
    if kernel is not None and _is_native(qkv, k_cache, v_cache, norms):
        cos, sin = (None, None) if rotary is None else rotary
        weights = (None, None, 0.0, 0.0, False) if norms is None else norms
        kernel(qkv, k_cache, v_cache, slot_mapping, num_heads, cos, sin, is_interleaved, *weights)
        return qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, head_dim)[:, :num_heads]
    return _composed(
        qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, head_dim),
        k_cache,
        v_cache,
        slot_mapping,
        rotary=rotary,
        is_interleaved=is_interleaved,
        norms=norms,
        has_skips=has_skips,
    )


def _is_native(qkv: Tensor, k_cache: Tensor, v_cache: Tensor, norms: HeadNorms | None) -> bool:
    return (
        qkv.dtype in NATIVE_DTYPES
        and qkv.dtype == k_cache.dtype == v_cache.dtype
        and qkv.stride(1) == k_cache.stride(3) == v_cache.stride(3) == 1
        and k_cache.shape[3] <= MAX_HEAD_DIM
        and (norms is None or norms.q_weight.dtype == norms.k_weight.dtype == qkv.dtype)
    )


def _composed(
    heads: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    rotary: tuple[Tensor, Tensor] | None,
    is_interleaved: bool,
    norms: HeadNorms | None,
    has_skips: bool,
) -> Tensor:
    """One operation after the other. `heads`: [num_tokens, all heads, head_dim]."""
    num_kv_heads = k_cache.shape[2]
    rotated, value = heads[:, :-num_kv_heads], heads[:, -num_kv_heads:]
    if norms is not None and not norms.is_last:
        rotated = _normed(rotated, num_kv_heads, norms)
    if rotary is not None:
        rotated = rotary_embedding(rotated, *rotary, is_interleaved=is_interleaved)
    if norms is not None and norms.is_last:
        rotated = _normed(rotated, num_kv_heads, norms)
    key = rotated[:, -num_kv_heads:]
    store_kv_cache(key, value, k_cache, v_cache, slot_mapping, has_skips=has_skips)
    return rotated[:, :-num_kv_heads]


def _normed(heads: Tensor, num_kv_heads: int, norms: HeadNorms) -> Tensor:
    """Queries, then keys, [num_tokens, num_heads + num_kv_heads, head_dim]."""
    query, key = heads[:, :-num_kv_heads], heads[:, -num_kv_heads:]
    normed = (
        rms_norm(x, weight, norms.eps, weight_offset=norms.weight_offset)
        for x, weight in ((query, norms.q_weight), (key, norms.k_weight))
    )
    return torch.cat(tuple(normed), dim=1)


def rope_store_reference(
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    rotary: tuple[Tensor, Tensor] | None = None,
    is_interleaved: bool = False,
    norms: HeadNorms | None = None,
) -> Tensor:
    """The specification of `rope_store`: in float32, rounded once; `qkv` is left as it was."""
    head_dim, num_kv_heads = k_cache.shape[3], k_cache.shape[2]
    wide = qkv.float().view(qkv.shape[0], qkv.shape[1] // head_dim, head_dim)
    num_rotated = wide.shape[1] - num_kv_heads
    query, key, value = (
        wide[:, : num_rotated - num_kv_heads],
        wide[:, num_rotated - num_kv_heads : num_rotated],
        wide[:, num_rotated:],
    )
    if norms is not None and not norms.is_last:
        query, key = _normed_reference(query, key, norms)
    if rotary is not None:
        query = rotary_embedding(query, *rotary, is_interleaved=is_interleaved)
        key = rotary_embedding(key, *rotary, is_interleaved=is_interleaved)
    if norms is not None and norms.is_last:
        query, key = _normed_reference(query, key, norms)
    store_kv_cache(key.to(qkv.dtype), value.to(qkv.dtype), k_cache, v_cache, slot_mapping)
    return query.to(qkv.dtype)


def _normed_reference(query: Tensor, key: Tensor, norms: HeadNorms) -> tuple[Tensor, Tensor]:
    scaled = [x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norms.eps) for x in (query, key)]
    weights = [weight.float() + norms.weight_offset for weight in (norms.q_weight, norms.k_weight)]
    return scaled[0] * weights[0], scaled[1] * weights[1]
