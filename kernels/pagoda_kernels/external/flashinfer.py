"""Paged attention of FlashInfer (pip install flashinfer-python): one wrapper for prompts, chunks, decodes and mixtures.

`BatchPrefillWithPagedKVCacheWrapper` takes any number of query tokens a sequence. With one each it runs the kernel that
FlashInfer's decode wrapper runs with use_tensor_cores=True. `plan` works out on the host how a batch is divided, once a
step for all layers that score alike; `run` is a layer.

Our caches are what it calls NHD, a pair of [num_pages, page_size, num_kv_heads, head_dim], so nothing is copied.
`plan` reads its indptr arrays on the host: it gets host tensors, in pinned memory, so that it waits for nothing.

Not run on a GPU yet; written after prefill.py and scheduler.cuh of flashinfer-python 0.3.0 and 0.7.2.
Source of the idea: Ye et al. 2025 (arXiv 2501.01005).
"""

import importlib
import re
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagoda_kernels.attention.plan import AttentionPlan
from pagoda_kernels.external.adapter import Adapter, AttentionNeeds, Scoring, plain_refusal

MIN_VERSION = (0, 3)
"""The oldest one whose signatures were looked at; the newest one was 0.7.2."""
HEAD_DIMS = (64, 128, 256)
"""Sizes that its kernels are made for."""
MIN_WORKSPACE_BYTES = 128 << 20
"""Size that its documentation recommends."""
MAX_TILE = 128
"""Rows of a tile of queries, at most."""


class FlashInferAttention(Adapter):
    """Wrappers of FlashInfer that share a workspace: one for each way to score, planned when a step begins."""

    name = "flashinfer"
    module = "flashinfer"
    distribution = "flashinfer-python"

    @classmethod
    def refusal(cls, needs: AttentionNeeds) -> str | None:
        if _numbers(cls.version()) < MIN_VERSION:
            return (
                f"{cls.distribution} is of version {cls.version()}, must be {'.'.join(map(str, MIN_VERSION))} or newer"
            )
        if needs.head_dim not in HEAD_DIMS:
            return f"head_dim is {needs.head_dim}, must be one of {', '.join(map(str, HEAD_DIMS))}"
        return plain_refusal(needs)

    def __init__(self, *, needs: AttentionNeeds, device: torch.device) -> None:
        self._flashinfer: Any = importlib.import_module(self.module)
        self._device = device
        # What lies there is only of one call, and calls come one after the other.
        self._workspace = torch.empty(workspace_bytes(needs, device), dtype=torch.uint8, device=device)
        self._wrappers: dict[Scoring, _Wrapper] = {}
        self._plan: AttentionPlan | None = None
        """The step that the wrappers are planned for."""
        self._pages: _Pages | None = None
        """Pages of that step."""

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
        if plan is not self._plan or self._pages is None:
            self._plan, self._pages = None, pages_of(plan, self._device)
            # All at the step's begin: what the next step's plans wait for is then long done.
            for scoring, wrapper in self._wrappers.items():
                wrapper.plan(scoring, self._pages, query, k_cache)
            self._plan = plan
        scoring = Scoring(scale, window, softcap)
        if scoring not in self._wrappers:
            wrapper = _Wrapper(
                self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD"), self._device
            )
            wrapper.plan(scoring, self._pages, query, k_cache)
            self._wrappers[scoring] = wrapper
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        self._wrappers[scoring].run(query, (k_cache, v_cache), output)
        return output.flatten(1)


class _Wrapper:
    """A wrapper of FlashInfer, and the event after the copy that its last plan has launched."""

    def __init__(self, wrapper: Any, device: torch.device) -> None:
        self._wrapper = wrapper
        self._device = device
        self._copied: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch: its constructor has no types

    def plan(self, scoring: Scoring, pages: "_Pages", query: Tensor, k_cache: Tensor) -> None:
        # A plan is written into pinned memory, from where it goes to the device: not before the last one is there.
        if self._copied is not None:
            self._copied.synchronize()
        self._wrapper.plan(
            pages.query_start_loc,
            pages.page_start_loc,
            pages.page_ids,
            pages.last_page_lens,
            query.shape[1],
            k_cache.shape[2],
            query.shape[2],
            k_cache.shape[1],
            causal=True,
            sm_scale=scoring.scale,
            window_left=-1 if scoring.window is None else scoring.window - 1,  # without the query's own key
            logits_soft_cap=scoring.softcap,
            q_data_type=query.dtype,
            kv_data_type=k_cache.dtype,
            non_blocking=True,
        )  # not max_token_per_sequence, with which 0.3.0 forgets to count the rows
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device))

    def run(self, query: Tensor, caches: tuple[Tensor, Tensor], output: Tensor) -> None:
        self._wrapper.run(query, caches, out=output)


class _Pages(NamedTuple):
    """A batch as FlashInfer describes it. int32, on the host; pinned where the device is another."""

    query_start_loc: Tensor
    """[num_seqs + 1]."""
    page_start_loc: Tensor
    """[num_seqs + 1]; sequence i has the pages page_start_loc[i] … page_start_loc[i + 1] - 1 of `page_ids`."""
    page_ids: Tensor
    """[num_pages]."""
    last_page_lens: Tensor
    """[num_seqs] tokens in the last page of each, 1 to page_size."""


def pages_of(plan: AttentionPlan, device: torch.device) -> _Pages:
    """The pages that the sequences of a batch read, no more: block tables may be longer."""
    num_pages = -(-plan.seq_lens // plan.block_size)
    is_read = np.arange(plan.block_table.shape[1]) < num_pages[:, None]
    return _Pages(
        query_start_loc=_on_host(_starts(plan.query_lens), device),
        page_start_loc=_on_host(_starts(num_pages), device),
        page_ids=_on_host(plan.block_table[is_read], device),
        last_page_lens=_on_host(plan.seq_lens - (num_pages - 1) * plan.block_size, device),
    )


def workspace_bytes(needs: AttentionNeeds, device: torch.device) -> int:
    """What `plan` may ask of the workspace, for parts of outputs of keys that are split; twice as many tiles as there
    are multiprocessors are, at most."""
    num_multiprocessors = 1
    if device.type == "cuda":
        num_multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    num_tiles = max(1, 2 * num_multiprocessors // needs.num_kv_heads)
    return max(MIN_WORKSPACE_BYTES, 4 * needs.num_heads * num_tiles * MAX_TILE * (needs.head_dim + 1) + (1 << 20))


def _starts(lens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    starts = np.zeros(lens.size + 1, dtype=np.int64)
    np.cumsum(lens, out=starts[1:])
    return starts


def _on_host(array: npt.NDArray[np.integer[Any]], device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array.astype(np.int32))
    return tensor.pin_memory() if device.type == "cuda" else tensor


def _numbers(version: str) -> tuple[int, ...]:
    """Major and minor number; nothing, which is less than any, where there are none."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return () if match is None else (int(match[1]), int(match[2]))
