"""The part of FlashAttention-3 that Pagoda calls, with its signature, in PyTorch: from nothing but what it is given.

What the package refuses is refused here, too. Written after hopper/flash_attn_interface.py and flash_api.cpp of
Dao-AILab/flash-attention.
"""

from types import ModuleType

import torch
from torch import Tensor

from tests.fakes.paged_softmax import paged_softmax


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor:
    """[num_tokens, num_heads, head_dim] over a paged cache."""
    assert page_table is not None, "the stand-in knows no other cache"
    assert cu_seqlens_q is not None, "nor any other query"
    assert isinstance(cache_seqlens, Tensor)
    for column in (cu_seqlens_q, cache_seqlens, page_table):
        assert column.dtype == torch.int32
        assert column.is_contiguous()
        assert column.device == q.device
    batch_size, num_pages = page_table.shape
    assert q.shape[0] == int(cu_seqlens_q[-1])
    assert cu_seqlens_q.numel() == batch_size + 1
    assert cache_seqlens.numel() == batch_size
    assert max_seqlen_q == int(cu_seqlens_q.diff().max())
    assert q.dtype == k_cache.dtype == v_cache.dtype
    assert q.stride(-1) == k_cache.stride(-1) == v_cache.stride(-1) == 1
    assert k_cache.shape == v_cache.shape
    assert q.shape[2] == k_cache.shape[3]
    assert q.shape[2] % 8 == 0
    assert window_size[1] in (-1, 0), "the stand-in knows no other"
    page_size = k_cache.shape[1]
    out = q.new_full(q.shape, torch.nan)
    for row, num_keys in enumerate(cache_seqlens.tolist()):
        assert num_keys <= num_pages * page_size
        pages = page_table[row, : -(-num_keys // page_size)].long()
        span = slice(int(cu_seqlens_q[row]), int(cu_seqlens_q[row + 1]))
        out[span] = paged_softmax(
            q[span],
            k_cache[pages].flatten(0, 1),
            v_cache[pages].flatten(0, 1),
            num_keys,
            scale=q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale,
            causal=causal,
            left=window_size[0],
            softcap=softcap,
        )
    return out


def flash_attn_module() -> ModuleType:
    """What `import flash_attn_interface` should find."""
    module = ModuleType("flash_attn_interface")
    module.flash_attn_with_kvcache = flash_attn_with_kvcache  # type: ignore[attr-defined]  # a module made by hand
    return module
