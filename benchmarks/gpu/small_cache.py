"""Caches of 8 bits on a GPU: writes and attention against their references, and decodes beside those over bfloat16."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.kernels import DTYPE, HEAD_DIM, NUM_HEADS, NUM_KV_HEADS
from benchmarks.gpu.tools.attention_case import BLOCK_SIZE, attention_case
from benchmarks.gpu.tools.check import TOLERANCE, Check, Pair
from benchmarks.gpu.tools.timing import Figures
from pagoda_kernels.attention.paged_attention import paged_attention, paged_attention_reference
from pagoda_kernels.attention.quantized_cache import FP8, cache_width, dequantize_rows, quantize_rows, to_fp8
from pagoda_kernels.attention.store_kv_cache import store_kv_cache, store_kv_cache_reference

KINDS: dict[str, tuple[torch.dtype, Callable[[Tensor], Tensor]]] = {
    "int8": (torch.int8, quantize_rows),
    "fp8": (FP8, to_fp8),
}
"""Data type of a cache, and what makes its rows."""


def small_cache_checks(device: torch.device, dtype: torch.dtype, head_dim: int, *, is_small: bool) -> Iterator[Check]:
    """Both kinds; FP8 where the device has instructions for it."""
    lens = ([1, 20], [40, 33]) if is_small else ([1, 1, 17, 64, 1, 16], [3000, 17, 300, 64, 1, 1000])
    for name, (kind, quantized) in KINDS.items():
        if kind == FP8 and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
            continue

        def attend(quantized: Callable[[Tensor], Tensor] = quantized) -> list[Pair]:
            query, k_cache, v_cache, plan = attention_case(*lens, 8, 2, head_dim, dtype, device)
            rows = quantized(k_cache), quantized(v_cache)
            actual = paged_attention(query, *rows, plan, scale=head_dim**-0.5)
            expected = paged_attention_reference(query, *rows, plan, scale=head_dim**-0.5)
            return [Pair(actual, expected, TOLERANCE[dtype])]

        def store(kind: torch.dtype = kind) -> list[Pair]:
            heads = torch.randn(17, 4, head_dim, device=device, dtype=dtype)
            shape = (4, 3, BLOCK_SIZE, 2, cache_width(head_dim, kind))
            caches = torch.zeros(shape, dtype=torch.uint8, device=device).view(kind).unbind()
            slots = torch.randperm(40)[:17]
            slots[::5] = -1
            store_kv_cache(heads[:, :2], heads[:, 2:], *caches[:2], slots.to(device))
            store_kv_cache_reference(heads[:, :2], heads[:, 2:], *caches[2:], slots.to(device))
            if kind == FP8:
                return [
                    Pair(one.float(), other.float(), 1e-9) for one, other in zip(caches[:2], caches[2:], strict=True)
                ]
            numbers = [dequantize_rows(cache, head_dim, torch.float32) for cache in caches]
            return [Pair(one, other, 1e-6) for one, other in zip(numbers[:2], numbers[2:], strict=True)]

        yield Check("paged_attention", f"{name} cache {dtype} head_dim {head_dim}", attend)
        yield Check("store_kv_cache", f"{name} cache {dtype} head_dim {head_dim}", store)


def measure_small_caches(figures: Figures, *, is_small: bool) -> None:
    """Decodes of Llama-3.1-8B's heads; bytes are those of the rows that are read."""
    for batch, length in ((2, 40),) if is_small else ((1, 32768), (64, 1024)):
        query, k_cache, v_cache, plan = attention_case(
            [1] * batch, [length] * batch, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, DTYPE, figures.device
        )
        for name, (kind, quantized) in KINDS.items():
            rows = quantized(k_cache), quantized(v_cache)
            num_bytes = 2 * batch * length * NUM_KV_HEADS * cache_width(HEAD_DIM, kind)
            run = partial(paged_attention, query, *rows, plan, scale=HEAD_DIM**-0.5)
            seconds = figures.time(run, rounds=2 if is_small else 20)
            figures.add("decode attention", f"{name} cache, batch {batch}, {length} keys", seconds, num_bytes=num_bytes)
