"""`rope_store` into an int8 cache: rounded to the data type of `qkv` as in any other cache, and then quantized."""

import torch
from torch import Tensor

from pagoda_kernels.attention.rope_store import HeadNorms, rope_store
from pagoda_kernels.attention.store_kv_cache import store_kv_cache
from pagoda_kernels.selection import TRITON_DTYPES, triton_kernel


def rope_store_int8(
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    head_dim: int,
    rotary: tuple[Tensor, Tensor] | None = None,
    is_interleaved: bool = False,
    norms: HeadNorms | None = None,
    has_skips: bool = True,
) -> Tensor:
    """As `rope_store`.

    Args:
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, cache_width(head_dim)] int8 rows of `quantized_cache`.
        head_dim: of queries, keys and values; the rows do not tell it.

    Returns:
        Queries, [num_tokens, num_heads, head_dim].
    """
    kernel = triton_kernel("rope_store", qkv)
    if (
        kernel is not None
        and qkv.dtype in TRITON_DTYPES
        and qkv.stride(1) == k_cache.stride(3) == v_cache.stride(3) == 1
    ):
        stored: Tensor = kernel(
            qkv,
            k_cache,
            v_cache,
            slot_mapping,
            head_dim=head_dim,
            rotary=rotary,
            is_interleaved=is_interleaved,
            norms=norms,
        )
        return stored
    num_tokens = qkv.shape[0]
    key, value = qkv.new_empty(2, num_tokens, 1, k_cache.shape[2], head_dim)
    query = rope_store(
        qkv,
        key,
        value,
        torch.arange(num_tokens, device=qkv.device),
        rotary=rotary,
        is_interleaved=is_interleaved,
        norms=norms,
        has_skips=False,
    )
    store_kv_cache(key[:, 0], value[:, 0], k_cache, v_cache, slot_mapping, has_skips=has_skips)
    return query
