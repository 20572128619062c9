"""Attention over latents on the CPU, of DeepSeek-V3's sizes: decodes in GB/s of latents, chunks of prompts in seconds.

    python benchmarks/cpu/kernels/latents.py --json benchmarks/results/cpu_latents.jsonl

`native` has `paged_attention` in C++ under it, `torch` PyTorch's operators. Each call takes another layer's cache,
until the layers do not fit into the processor's caches together.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3]))  # so that it also runs as a plain script

from collections.abc import Callable
from itertools import cycle

import torch

from benchmarks.cpu.kernels.attention import COLD_BYTES, MAX_LAYERS, timed
from benchmarks.gpu.latents import RANK, ROTARY_DIM, SCALE, latent_case
from benchmarks.tools.figures import Report, median, parser
from pagoda_kernels.attention.mla_attention import mla_attention
from pagoda_kernels.native.library import load_native
from pagoda_kernels.selection import use_references

DTYPE = torch.bfloat16
DECODES = ((1, 4096), (8, 1024))
"""Sequences, and keys of each."""
CHUNKS = ((512, 512), (256, 4096))
"""Tokens of a chunk, and keys with those before it."""


def caller(query_lens: list[int], seq_lens: list[int], num_heads: int) -> tuple[Callable[[], None], int]:
    """One layer's attention, of another layer in each call; and how many layers there are."""
    query, cache, plan, up = latent_case(query_lens, seq_lens, num_heads, DTYPE, torch.device("cpu"))
    count = min(MAX_LAYERS, max(1, -(-COLD_BYTES // cache.nbytes)))
    layers = cycle([cache.clone() for _ in range(count)])

    def call() -> None:
        mla_attention(query, next(layers), plan, **up, scale=SCALE)

    return call, count


def measure(call: Callable[[], None], count: int, *, rounds: int, budget_s: float) -> dict[str, list[float]]:
    """Seconds of both paths, one after the other in each round."""
    paths: dict[str, tuple[str, ...]] = {"native": (), "torch": ("paged_attention",)}
    samples: dict[str, list[float]] = {path: [] for path in paths}
    for _ in range(rounds):
        for path, references in paths.items():
            use_references(references)
            samples[path].append(timed(call, count, budget_s))
    use_references(())
    return samples


def main() -> None:
    flags = parser(__doc__ or "")
    flags.add_argument("--heads", type=int, nargs="+", default=[16, 128], help="of a rank of eight, and all")
    flags.add_argument("--budget", type=float, default=0.5, metavar="S", help="seconds for each measurement")
    args = flags.parse_args()
    report = Report(args.json)
    load_native()
    for num_heads in args.heads:
        for batch, length in DECODES:
            call, count = caller([1] * batch, [length] * batch, num_heads)
            num_bytes = batch * length * (RANK + ROTARY_DIM) * DTYPE.itemsize
            name = f"decode_{batch}x{length}_{num_heads}_heads"
            for path, values in measure(call, count, rounds=args.rounds, budget_s=args.budget).items():
                report.add(f"{name}.{path}", num_bytes / median(values) / 1e9, "GB/s", n=len(values))
        for query_len, seq_len in CHUNKS:
            call, count = caller([query_len], [seq_len], num_heads)
            name = f"chunk_{query_len}_of_{seq_len}_{num_heads}_heads"
            for path, values in measure(call, count, rounds=args.rounds, budget_s=args.budget).items():
                report.add(f"{name}.{path}", median(values) * 1e3, "ms", n=len(values))


if __name__ == "__main__":
    main()
