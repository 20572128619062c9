"""Write keys and values into the paged KV cache."""

import torch
from torch import Tensor

from pagoda_kernels.attention.quantized_cache import FP8, cache_width, holds, quantize_rows, to_fp8
from pagoda_kernels.native.library import NATIVE_DTYPES, native
from pagoda_kernels.selection import TRITON_DTYPES, triton_kernel


def store_kv_cache(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, *, has_skips: bool = True
) -> None:
    """Write this step's keys and values into their slots, in place.

    Args:
        key, value: [num_tokens, num_kv_heads, head_dim], contiguous in the last dimension.
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], same dtype as key; or rows of
            `quantized_cache` in int8 or FP8, contiguous.
        slot_mapping: [num_tokens] int64; slot = block_id * block_size + offset; -1 skips the token.
        has_skips: False promises that no slot is -1, and saves the search for them (a wait on an accelerator).
    Source: paged KV cache, Kwon et al. 2023 (arXiv 2309.06180), section 4.
    """
    width = cache_width(key.shape[2], k_cache.dtype)
    if key.shape != value.shape or (key.shape[1], width) != k_cache.shape[2:]:
        raise ValueError(f"key {tuple(key.shape)} and value {tuple(value.shape)} do not fit {tuple(k_cache.shape)}")
    if slot_mapping.shape[0] != key.shape[0]:
        raise ValueError(f"slot_mapping has {slot_mapping.shape[0]} entries for {key.shape[0]} tokens")
    kernel = triton_kernel("store_kv_cache", key)
    is_known = (
        key.dtype == value.dtype in TRITON_DTYPES and k_cache.dtype == v_cache.dtype and holds(k_cache, key.dtype)
    )
    if kernel is not None and is_known:
        kernel(key, value, k_cache, v_cache, slot_mapping)
        return
    kernel = native("store_int8") if key.is_cpu and k_cache.dtype == torch.int8 else None
    if kernel is not None and key.dtype == value.dtype in NATIVE_DTYPES and _has_rows(key) and _has_rows(value):
        kernel(key, value, slot_mapping, k_cache, v_cache)
        return
    store_kv_cache_reference(key, value, k_cache, v_cache, slot_mapping, has_skips=has_skips)


def _has_rows(x: Tensor) -> bool:
    """Whether each token's heads lie one after the other."""
    return x.stride(2) == 1 and x.stride(1) == x.shape[2]


def store_kv_cache_reference(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, *, has_skips: bool = True
) -> None:
    """The specification of `store_kv_cache`."""
    if has_skips:
        kept = slot_mapping >= 0
        key, value, slot_mapping = key[kept], value[kept], slot_mapping[kept]
    if k_cache.dtype == torch.int8:
        key, value = quantize_rows(key), quantize_rows(value)
    elif k_cache.dtype == FP8:  # which torch does not copy by index
        key, value = to_fp8(key).view(torch.uint8), to_fp8(value).view(torch.uint8)
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    k_cache.flatten(0, 1).index_copy_(0, slot_mapping, key)
    v_cache.flatten(0, 1).index_copy_(0, slot_mapping, value)
