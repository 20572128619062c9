"""Paged attention on the CPU: the C++ kernel, and what PyTorch's operators make of the same batch.

Decodes are measured in GB/s of keys and values read, prompts in GFLOP/s (two products over the visible keys). Where
decodes share their first tokens' blocks, these count once a sequence, however often they are read. Each call takes
another layer's cache, until the layers do not fit into the processor's caches together.

    python benchmarks/cpu/kernels/attention.py --json benchmarks/results/cpu_attention.jsonl
    python benchmarks/cpu/kernels/attention.py --paths native --kv-cache-dtype int8
    python benchmarks/cpu/kernels/attention.py --paths native --heads 16/8x128
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3]))  # so that it also runs as a plain script

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from benchmarks.tools.figures import Report, median, parser
from pagoda_kernels.attention.paged_attention import paged_attention
from pagoda_kernels.attention.plan import AttentionPlan
from pagoda_kernels.attention.quantized_cache import cache_width, quantize_rows
from pagoda_kernels.native.library import load_native
from pagoda_kernels.selection import use_references

BLOCK_SIZE = 16
COLD_BYTES = 96 << 20
"""Keys and values of all layers together, at least."""
MAX_LAYERS = 48


@dataclass(frozen=True, slots=True)
class Shape:
    """Heads and data type of a model."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    cache_dtype: torch.dtype

    @property
    def key_bytes(self) -> int:
        """Of one token in one layer, its value included."""
        return 2 * self.num_kv_heads * cache_width(self.head_dim, self.cache_dtype) * self.cache_dtype.itemsize


@dataclass(frozen=True, slots=True)
class Case:
    """A batch, and the caches of some layers."""

    query: Tensor
    layers: list[tuple[Tensor, Tensor]]
    query_lens: list[int]
    seq_lens: list[int]
    block_table: npt.NDArray[np.int32]
    dtype: torch.dtype

    def plan(self) -> AttentionPlan:
        """As the worker makes it, once a step."""
        query_lens, seq_lens = np.array(self.query_lens), np.array(self.seq_lens)
        return AttentionPlan(query_lens, seq_lens, self.block_table, BLOCK_SIZE, self.dtype, torch.device("cpu"))


def make_case(shape: Shape, query_lens: list[int], seq_lens: list[int], num_shared: int = 0) -> Case:
    """Random numbers in blocks in random order; the first `num_shared` tokens, in whole blocks, are shared."""
    generator = torch.Generator().manual_seed(0)
    counts = [-(-length // BLOCK_SIZE) for length in seq_lens]
    order = torch.randperm(sum(counts), generator=generator).to(torch.int32).numpy()
    table = np.zeros((len(seq_lens), max(counts)), dtype=np.int32)
    for row, (count, end) in enumerate(zip(counts, np.cumsum(counts), strict=True)):
        table[row, :count] = order[end - count : end]
        table[row, : num_shared // BLOCK_SIZE] = table[0, : num_shared // BLOCK_SIZE]
    size = (sum(counts), BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
    layer_bytes = sum(counts) * BLOCK_SIZE * shape.key_bytes
    first = [torch.randn(size, generator=generator).to(shape.dtype) for _ in range(2)]
    if shape.cache_dtype == torch.int8:
        first = [quantize_rows(cache) for cache in first]
    layers = [
        (first[0].clone(), first[1].clone()) for _ in range(min(MAX_LAYERS, max(1, -(-COLD_BYTES // layer_bytes))))
    ]
    query = torch.randn(sum(query_lens), shape.num_heads, shape.head_dim, generator=generator).to(shape.dtype)
    return Case(query, layers, query_lens, seq_lens, table, shape.dtype)


def seconds(case: Case, budget_s: float) -> float:
    """Median of one layer's attention; the plan's share is not in it."""
    plan, layers = case.plan(), cycle(case.layers)
    scale = case.query.shape[2] ** -0.5

    def call() -> None:
        k_cache, v_cache = next(layers)
        paged_attention(case.query, k_cache, v_cache, plan, scale=scale)

    return timed(call, len(case.layers), budget_s)


def timed(call: Callable[[], None], at_least: int, budget_s: float) -> float:
    """Median seconds of `call` over `budget_s`, after one warm-up."""
    call()
    samples: list[float] = []
    end = time.perf_counter() + budget_s
    while time.perf_counter() < end or len(samples) < min(at_least, 3):
        started = time.perf_counter()
        call()
        samples.append(time.perf_counter() - started)
    return median(samples)


def both(report: Report, name: str, unit: str, amount: float, case: Case, args: argparse.Namespace) -> None:
    """`amount` a second of the C++ kernel and of PyTorch, one after the other in each round."""
    paths: dict[str, tuple[str, ...]] = {"native": (), "torch": ("paged_attention",)}
    samples: dict[str, list[float]] = {path: [] for path in paths}
    for _ in range(args.rounds):
        for path, references in paths.items():
            if path in args.paths:
                use_references(references)
                samples[path].append(seconds(case, args.budget))
    for path, values in samples.items():
        if values:
            report.add(f"{name}.{path}", amount / median(values) / 1e9, unit, n=len(values))
            report.add(f"{name}.{path}.ms", median(values) * 1e3, "ms", n=len(values))


def main() -> None:
    """Command line."""
    flags = parser(str(__doc__).splitlines()[0])
    flags.add_argument("--heads", default="12/12x64", metavar="Q/KVxD", help="heads, KV heads and head_dim")
    flags.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    flags.add_argument("--kv-cache-dtype", default="auto", choices=("auto", "int8"))
    flags.add_argument("--paths", nargs="+", default=["native", "torch"], choices=("native", "torch"))
    flags.add_argument("--decode", nargs="*", default=["1x128", "1x2048", "16x512", "32x128", "32x512", "32x2048"])
    flags.add_argument(
        "--shared",
        nargs="*",
        default=["8x256+200", "32x1024+60"],
        metavar="NxSHARED+OWN",
        help="decodes with one prefix",
    )
    flags.add_argument("--prefill", nargs="*", type=int, default=[128, 512, 2048])
    flags.add_argument("--budget", type=float, default=0.2, metavar="SECONDS", help="of each measurement")
    args = flags.parse_args()
    if not load_native():
        raise SystemExit("there are no C++ kernels on this machine")
    heads, head_dim = args.heads.split("x")
    num_heads, num_kv_heads = map(int, heads.split("/"))
    dtype = getattr(torch, args.dtype)
    cache_dtype = torch.int8 if args.kv_cache_dtype == "int8" else dtype
    shape = Shape(num_heads, num_kv_heads, int(head_dim), dtype, cache_dtype)
    report = Report(args.json)
    prefix = f"attention.{args.heads}.{args.dtype}.kv-{args.kv_cache_dtype}"
    for name in args.decode:
        count, context = map(int, name.split("x"))
        case = make_case(shape, [1] * count, [context] * count)
        amount = count * context * shape.key_bytes
        both(report, f"{prefix}.decode.{name}", "GB/s", amount, case, args)
    for name in args.shared:
        count, num_shared, num_own = map(int, name.replace("+", "x").split("x"))
        case = make_case(shape, [1] * count, [num_shared + num_own] * count, num_shared)
        amount = count * (num_shared + num_own) * shape.key_bytes
        both(report, f"{prefix}.shared.{name}", "GB/s", amount, case, args)
    for length in args.prefill:
        case = make_case(shape, [length], [length])
        amount = 4 * num_heads * shape.head_dim * length * (length + 1) / 2
        both(report, f"{prefix}.prefill.{length}", "GFLOP/s", amount, case, args)


if __name__ == "__main__":
    main()
