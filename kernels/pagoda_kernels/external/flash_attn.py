"""Paged attention of FlashAttention-3 (package flash_attn_3, module flash_attn_interface, for compute capability 9.0).

`flash_attn_with_kvcache` reads the cache through a table of pages of any size, the lengths and the table on the device:
what our own kernel reads. Nothing is copied and nothing planned on the host.

FlashAttention-2 (package flash-attn) has the table as well, but only for pages of a multiple of 256 tokens; our blocks
have 16. So it is no candidate.

Not run on a GPU yet; written after hopper/flash_attn_interface.py and flash_api.cpp of Dao-AILab/flash-attention.
Source of the idea: Shah et al. 2024 (arXiv 2407.08608).
"""

import importlib
from typing import Any

import torch
from torch import Tensor

from pagoda_kernels.attention.plan import AttentionPlan
from pagoda_kernels.external.adapter import Adapter, AttentionNeeds, plain_refusal

CAPABILITY = (9, 0)
MAX_HEAD_DIM = 256
HEAD_DIM_STEP = 8


class FlashAttention(Adapter):
    """FlashAttention-3 over a paged cache."""

    name = "flash_attn"
    module = "flash_attn_interface"
    distribution = "flash_attn_3"

    @classmethod
    def refusal(cls, needs: AttentionNeeds) -> str | None:
        if needs.capability != CAPABILITY:
            mine, asked = (".".join(map(str, pair)) for pair in (needs.capability, CAPABILITY))
            return f"the device has compute capability {mine}, must be {asked}"
        if needs.head_dim > MAX_HEAD_DIM or needs.head_dim % HEAD_DIM_STEP:
            return f"head_dim is {needs.head_dim}, must be a multiple of {HEAD_DIM_STEP} up to {MAX_HEAD_DIM}"
        return plain_refusal(needs)

    def __init__(self, *, needs: AttentionNeeds, device: torch.device) -> None:
        self._attend: Any = importlib.import_module(self.module).flash_attn_with_kvcache

    def __call__(
        self,
        query: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        plan: AttentionPlan,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        tables = plan.tables()
        attended: Tensor = self._attend(
            query,
            k_cache,
            v_cache,
            cache_seqlens=tables.seq_lens,
            page_table=tables.block_table,
            cu_seqlens_q=tables.query_start_loc,
            max_seqlen_q=tables.max_query_len,
            softmax_scale=scale,
            causal=True,
            window_size=(-1, -1) if window is None else (window - 1, 0),  # without the query's own key
            softcap=0.0 if softcap is None else softcap,
        )
        return attended.flatten(1)
