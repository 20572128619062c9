"""The part of FlashInfer that Pagoda calls, with its signatures, in PyTorch: computed from what it is given, no more.

What the package refuses is refused here, too. Written after prefill.py of flashinfer-python 0.3.0 and 0.7.2: keyword
arguments that the older one does not have are not there.
"""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tests.fakes.paged_softmax import paged_softmax


class BatchPrefillWithPagedKVCacheWrapper:
    """Plans a batch on the host, then attends over the pages that the plan names."""

    num_plans = 0
    """Of all wrappers."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert float_workspace_buffer.numel() >= 128 << 20
        assert float_workspace_buffer.data_ptr() % 16 == 0
        assert kv_layout == "NHD", "the stand-in knows no other"
        assert not use_cuda_graph
        self._planned: dict[str, Any] = {}

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        block_tables: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
    ) -> None:
        columns = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert all(column.dtype == torch.int32 and column.dim() == 1 and column.is_cpu for column in columns)
        batch_size = qo_indptr.numel() - 1
        assert paged_kv_indptr.numel() == batch_size + 1
        assert paged_kv_last_page_len.numel() == batch_size
        assert paged_kv_indices.numel() == int(paged_kv_indptr[-1])
        assert int(qo_indptr[0]) == int(paged_kv_indptr[0]) == 0
        assert bool((qo_indptr.diff() >= 0).all())
        assert bool((paged_kv_indptr.diff() >= 1).all())
        assert bool(((paged_kv_last_page_len >= 1) & (paged_kv_last_page_len <= page_size)).all())
        assert num_qo_heads % num_kv_heads == 0
        assert max_token_per_sequence is None, "0.3.0 forgets to count the rows then"
        assert max_sequence_kv is None, "and the keys"
        assert pos_encoding_mode == "NONE"
        type(self).num_plans += 1
        self._planned = {
            "columns": [column.clone() for column in columns],
            "heads": (num_qo_heads, num_kv_heads, head_dim_qk),
            "page_size": page_size,
            "causal": causal,
            "scale": head_dim_qk**-0.5 if sm_scale is None else sm_scale,
            "window_left": window_left,
            "softcap": logits_soft_cap or 0.0,
            "dtypes": (q_data_type, q_data_type if kv_data_type is None else kv_data_type),
        }

    def run(
        self,
        q: Tensor,
        paged_kv_cache: Tensor | tuple[Tensor, Tensor],
        *args: Any,
        q_scale: float | Tensor | None = None,
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        assert isinstance(paged_kv_cache, tuple)
        k_cache, v_cache = paged_kv_cache
        planned = self._planned
        assert planned["dtypes"] == (q.dtype, k_cache.dtype), "the plan was for other data types"
        assert planned["heads"] == (q.shape[1], k_cache.shape[2], q.shape[2])
        assert planned["page_size"] == k_cache.shape[1] == v_cache.shape[1]
        assert q.stride(-1) == k_cache.stride(-1) == v_cache.stride(-1) == 1
        assert k_cache.stride() == v_cache.stride()
        qo_indptr, kv_indptr, indices, last_page_len = (column.tolist() for column in planned["columns"])
        assert q.shape[0] == qo_indptr[-1], "q has other tokens than the plan"
        if out is None:
            out = torch.zeros(q.shape, dtype=q.dtype)
        assert out.shape == q.shape
        assert out.dtype == q.dtype
        for row in range(len(last_page_len)):
            pages = indices[kv_indptr[row] : kv_indptr[row + 1]]
            span = slice(qo_indptr[row], qo_indptr[row + 1])
            out[span] = paged_softmax(
                q[span],
                k_cache[pages].flatten(0, 1),
                v_cache[pages].flatten(0, 1),
                (len(pages) - 1) * planned["page_size"] + last_page_len[row],
                scale=planned["scale"],
                causal=planned["causal"],
                left=planned["window_left"],
                softcap=planned["softcap"],
            )
        return out


def flashinfer_module() -> ModuleType:
    """What `import flashinfer` should find."""
    module = ModuleType("flashinfer")
    wrapper = type("BatchPrefillWithPagedKVCacheWrapper", (BatchPrefillWithPagedKVCacheWrapper,), {})
    module.BatchPrefillWithPagedKVCacheWrapper = wrapper  # type: ignore[attr-defined]  # a module made by hand
    return module
