"""Attention of other packages, where they are installed: checked like our kernel, and timed at the same shapes."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.kernels import DTYPE, HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, decode_shapes, prompt_lengths
from benchmarks.gpu.tools.attention_case import BLOCK_SIZE, attention_case
from benchmarks.gpu.tools.check import TOLERANCE, Check, Pair
from benchmarks.gpu.tools.timing import Figures
from pagoda_kernels.attention.paged_attention import paged_attention, paged_attention_reference
from pagoda_kernels.attention.plan import AttentionPlan
from pagoda_kernels.external.adapter import Adapter, AttentionNeeds, Scoring
from pagoda_kernels.external.adapters import installed_adapters

CHECKED = ([1, 1, 17, 64, 1, 16], [3000, 17, 300, 64, 1, 1000])


def needs(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> AttentionNeeds:
    """What such heads ask of attention. Without a GPU, as if there were one: stand-ins are measured there."""
    return AttentionNeeds(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=BLOCK_SIZE,
        dtype=dtype,
        cache_dtype=dtype,
        layers=(Scoring(head_dim**-0.5),),
        capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0),
    )


def backend_checks(device: torch.device, dtype: torch.dtype, head_dim: int, group: int) -> Iterator[Check]:
    """Each installed package that serves such heads against the reference."""
    asked = needs(2 * group, 2, head_dim, dtype, device)
    options: dict[str, dict[str, Any]] = {"plain": {}, "window": {"window": 20}, "softcap": {"softcap": 0.5}}
    for adapter in installed_adapters():
        if adapter.refusal(asked) is not None:
            continue
        for name, option in options.items():

            def run(adapter: type[Adapter] = adapter, option: dict[str, Any] = option) -> list[Pair]:
                query, k_cache, v_cache, plan = attention_case(*CHECKED, 2 * group, 2, head_dim, dtype, device)
                plan.backend = adapter(needs=asked, device=device)
                case = (query, k_cache, v_cache, plan)
                actual = paged_attention(*case, scale=head_dim**-0.5, **option)
                expected = paged_attention_reference(*case, scale=head_dim**-0.5, **option)
                return [Pair(actual, expected, TOLERANCE[dtype])]

            yield Check("paged_attention", f"{adapter.name} {name} {dtype} head_dim {head_dim} group {group}", run)


def measure_backends(figures: Figures, *, is_small: bool) -> None:
    """One layer of a step that is planned, and the first layer of the next step, whose plan is made on the host."""
    asked = needs(NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, DTYPE, figures.device)
    steps = [("decode", f"batch {batch}, {length} keys", [1] * batch, [length] * batch)
             for batch, length in decode_shapes(is_small=is_small)]  # fmt: skip
    steps += [("prefill", f"{length} tokens", [length], [length]) for length in prompt_lengths(is_small=is_small)]
    for adapter_type in installed_adapters():
        if adapter_type.refusal(asked) is not None:
            continue
        adapter = adapter_type(needs=asked, device=figures.device)
        for part, case, query_lens, seq_lens in steps:
            heads = (NUM_HEADS, NUM_KV_HEADS, HEAD_DIM)
            query, k_cache, v_cache, plan = attention_case(query_lens, seq_lens, *heads, DTYPE, figures.device)
            plan.backend = adapter
            amount = {"num_bytes": 2 * sum(seq_lens) * NUM_KV_HEADS * HEAD_DIM * DTYPE.itemsize}
            if part == "prefill":
                amount = {"num_flops": 2 * seq_lens[0] ** 2 * HEAD_DIM * NUM_HEADS}  # causal: half of the products
            rounds = 1 if is_small else 20
            layer = partial(paged_attention, query, k_cache, v_cache, scale=HEAD_DIM**-0.5)
            figures.add(f"{part} {adapter.name}", case, figures.time(partial(layer, plan), rounds=rounds), **amount)

            def next_step(layer: Any = layer, plan: AttentionPlan = plan) -> None:
                layer(replace(plan, device_tables=None))

            figures.add(f"{part} {adapter.name}", f"{case}, planned again", figures.time(next_step, rounds=rounds))
