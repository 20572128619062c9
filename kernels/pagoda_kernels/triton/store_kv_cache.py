"""Cache writes in Triton: those of `rope_store`, without norms and rotation."""

from torch import Tensor

from pagoda_kernels.triton.rope_store import launch_store


def store_kv_cache(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """`pagoda_kernels.attention.store_kv_cache.store_kv_cache`; contiguous in the last dimension."""
    launch_store(None, key, value, k_cache, v_cache, slot_mapping)
