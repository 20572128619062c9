"""Attention over latents: against its reference, and how fast decodes read them.

    python benchmarks/gpu/latents.py

`run_all.py` has all of it too; alone it takes a CUDA device for a minute or two, most of which is compiling.
"""

import sys
from pathlib import Path

sys.path.extend(
    str(Path(__file__).parents[2] / folder) for folder in (".", "kernels", "common")
)  # so that it also runs as a plain script

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.small_cache import KINDS
from benchmarks.gpu.tools.attention_case import attention_case
from benchmarks.gpu.tools.check import TOLERANCE, Check, Pair
from benchmarks.gpu.tools.timing import Figures
from pagoda_kernels.attention.mla_attention import mla_attention, mla_attention_reference
from pagoda_kernels.attention.plan import AttentionPlan
from pagoda_kernels.attention.quantized_cache import FP8
from pagoda_kernels.selection import triton_kernel

RANK, ROTARY_DIM, KEY_DIM, VALUE_DIM = 512, 64, 128, 128
"""Of DeepSeek-V2 and V3, and of Kimi K2."""
SCALE = (KEY_DIM + ROTARY_DIM) ** -0.5


def latent_case(
    query_lens: list[int], seq_lens: list[int], num_heads: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, AttentionPlan, dict[str, Tensor]]:
    """A query, a cache of random latents with NaN in blocks of no sequence, the plan, and what latents meet."""
    width = RANK + ROTARY_DIM
    wide, cache, _, plan = attention_case(query_lens, seq_lens, num_heads, 1, width, dtype, device)
    up = {
        name: (torch.randn(num_heads, dim, RANK, device=device) * RANK**-0.5).to(dtype)
        for name, dim in (("key_up", KEY_DIM), ("value_up", VALUE_DIM))
    }
    return wide[..., : KEY_DIM + ROTARY_DIM].contiguous(), cache, plan, up


def latent_checks(device: torch.device, *, is_small: bool) -> Iterator[Check]:
    """Decodes alone and split, drafts, and prompts beside decodes; caches of 8 bits."""
    batches = {"decodes": ([1, 1], [40, 17]), "drafts": ([3, 1], [40, 9])}
    if not is_small:
        batches = {
            "decodes": ([1] * 5, [3000, 17, 300, 64, 1]),
            "drafts": ([5, 1, 4], [3000, 64, 100]),
            "mixed": ([1, 100, 17, 5, 1], [3000, 300, 17, 1000, 1]),
            "many": ([1] * 300, [100 + row for row in range(300)]),
        }

    def run(
        lens: tuple[list[int], list[int]], num_heads: int, dtype: torch.dtype, quantized: Callable[[Tensor], Tensor]
    ) -> list[Pair]:
        query, cache, plan, up = latent_case(*lens, num_heads, dtype, device)
        case = query, quantized(cache), plan
        actual = mla_attention(*case, **up, scale=SCALE)
        return [Pair(actual, mla_attention_reference(*case, **up, scale=SCALE), 2 * TOLERANCE[dtype])]

    for dtype in (torch.bfloat16, torch.float32) if is_small else tuple(TOLERANCE):
        for name, lens in batches.items():
            for num_heads in (16, 40) if is_small else (16, 20, 128):
                case = partial(run, lens, num_heads, dtype, _same)
                yield Check("mla_attention", f"{name} {dtype} {num_heads} heads", case)
    yield Check("mla_attention", "decodes, keys in 4 splits", partial(_split, device, batches["decodes"]))
    for kind, (cache_dtype, quantized) in KINDS.items():
        if cache_dtype == FP8 and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
            continue
        case = partial(run, batches["decodes"], 16, torch.bfloat16, quantized)
        yield Check("mla_attention", f"{kind} cache {torch.bfloat16}", case)


def _split(device: torch.device, lens: tuple[list[int], list[int]]) -> list[Pair]:
    """Splits, however many the device would take."""
    query, cache, plan, up = latent_case(*lens, 16, torch.bfloat16, device)
    kernel = triton_kernel("mla_attention", query)
    narrow = torch.einsum("thd,hdr->thr", query[..., :KEY_DIM].float(), up["key_up"].float()).to(query.dtype)
    rows = torch.cat((narrow, query[..., KEY_DIM:]), dim=-1)
    whole, split = (
        kernel(rows, cache, plan.tables(), rank=RANK, scale=SCALE, num_splits=count).float() for count in (1, 4)
    )
    return [Pair(split, whole, TOLERANCE[torch.bfloat16])]


def _same(cache: Tensor) -> Tensor:
    return cache


def measure_latents(figures: Figures, *, is_small: bool) -> None:
    """Decodes of DeepSeek-V3's heads, all of them and a rank's share; bytes are those of the latents."""
    is_chosen = triton_kernel("mla_attention", torch.empty(0, device=figures.device)) is not None
    for num_heads in (16,) if is_small else (16, 128):
        for batch, length in ((2, 40),) if is_small else ((1, 32768), (64, 4096)):
            dtype = torch.bfloat16
            query, cache, plan, up = latent_case([1] * batch, [length] * batch, num_heads, dtype, figures.device)
            num_bytes = batch * length * (RANK + ROTARY_DIM) * dtype.itemsize
            run = partial(mla_attention, query, cache, plan, **up, scale=SCALE)
            seconds = figures.time(run, rounds=2 if is_small else 20)
            name = "latent attention" if is_chosen else "latent attention in PyTorch"
            figures.add(name, f"{num_heads} heads, batch {batch}, {length} keys", seconds, num_bytes=num_bytes)


def main() -> None:
    """On a CUDA device."""
    device, num_wrong = torch.device("cuda"), 0
    for number, check in enumerate(latent_checks(device, is_small=False)):
        torch.manual_seed(number)
        worst = max(pair.error for pair in check.run())
        num_wrong += worst > 1
        print(f"{'right' if worst <= 1 else 'WRONG'} {worst:8.4f} {check.operation} {check.case}", flush=True)
    figures = Figures(device)
    measure_latents(figures, is_small=False)
    for row in figures.rows:
        print(row, flush=True)
    sys.exit(num_wrong > 0)


if __name__ == "__main__":
    main()
