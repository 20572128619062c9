"""Linear layers of bfloat16 on the CPU: the packed kernel, and PyTorch's operator on the same matrices.

Few rows are measured in GB/s of weights read, many in GFLOP/s. Each call takes another matrix, until they do not fit
into the processor's caches together. `read` is the read limit: the sum of a vector that fits into no cache.

    python benchmarks/cpu/kernels/linear.py --json benchmarks/results/cpu_linear.jsonl
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3]))  # so that it also runs as a plain script

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle, repeat

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.tools.figures import Report, median, parser
from pagoda_kernels.linear.packed_linear import pack_weight, packed_linear
from pagoda_kernels.native.library import load_native, native

SHAPES = {
    "llama125m.qkv": (2304, 768),
    "llama125m.o": (768, 768),
    "llama125m.up": (4096, 768),
    "llama125m.down": (768, 2048),
    "llama125m.head": (32000, 768),
    "qwen0.6b.qkv": (4096, 1024),
    "qwen0.6b.o": (1024, 2048),
    "qwen0.6b.up": (6144, 1024),
    "qwen0.6b.down": (1024, 3072),
    "qwen0.6b.head": (151936, 1024),
}
"""out_features and in_features."""
FEW_ROWS = (1, 4, 16, 32)
MANY_ROWS = (128, 512, 2048)
MAX_HEAD_ROWS = 32
"""Rows that the head of the model sees: those that sample."""
COLD_BYTES = 128 << 20
"""Matrices of one shape together, at least."""


def timed(copies: Iterator[Callable[[Tensor], Tensor]], x: Tensor, budget_s: float) -> float:
    """Median seconds of one layer over `budget_s`, after a warm-up."""
    next(copies)(x)
    samples: list[float] = []
    end = time.perf_counter() + budget_s
    while time.perf_counter() < end or len(samples) < 3:
        started = time.perf_counter()
        next(copies)(x)
        samples.append(time.perf_counter() - started)
    return median(samples)


def layers(paths: list[str], weight: Tensor) -> dict[str, Iterator[Callable[[Tensor], Tensor]]]:
    """What is measured, by name: an endless row of the same layer with matrices of its own."""
    count, rows = max(1, -(-COLD_BYTES // weight.nbytes)), weight.shape[0]
    result: dict[str, Iterator[Callable[[Tensor], Tensor]]] = {}
    if "native" in paths:
        packed = [pack_weight(weight) for _ in range(count)]
        result["native"] = cycle([partial(packed_linear, packed=one, out_features=rows) for one in packed])
    if "torch" in paths:
        result["torch"] = cycle([partial(F.linear, weight=weight.clone()) for _ in range(count)])
    return result


def measure(report: Report, name: str, args: argparse.Namespace) -> None:
    """One matrix of a model with each number of rows; native and torch one after the other in each round."""
    weight = (torch.randn(SHAPES[name]) / SHAPES[name][1] ** 0.5).bfloat16()
    measured = layers(args.paths, weight)
    for num_rows in args.rows:
        if name.endswith("head") and num_rows > MAX_HEAD_ROWS:
            continue
        x = torch.randn(num_rows, weight.shape[1]).bfloat16()
        samples: dict[str, list[float]] = {path: [] for path in args.paths}
        for _ in range(args.rounds):
            for path, copies in measured.items():
                samples[path].append(timed(copies, x, args.budget))
        for path, values in samples.items():
            is_few = num_rows in FEW_ROWS
            amount = weight.nbytes if is_few else 2 * num_rows * weight.numel()
            unit = "GB/s" if is_few else "GFLOP/s"
            report.add(f"{name}.{num_rows}.{path}", amount / median(values) / 1e9, unit, n=len(values))


def read_limit(report: Report, args: argparse.Namespace) -> None:
    """Bytes a second that the cores can take in."""
    vector = torch.ones(4 * COLD_BYTES // 4)
    samples = [timed(repeat(torch.sum), vector, args.budget) for _ in range(args.rounds)]
    report.add("read", vector.nbytes / median(samples) / 1e9, "GB/s", n=len(samples))


def main() -> None:
    """Command line."""
    flags = parser(__doc__ or "")
    flags.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), metavar="NAME")
    flags.add_argument("--rows", nargs="+", type=int, default=[*FEW_ROWS, *MANY_ROWS], metavar="M")
    flags.add_argument("--paths", nargs="+", choices=("native", "torch"), default=["native", "torch"])
    flags.add_argument("--budget", type=float, default=0.1, metavar="S", help="seconds a measurement")
    args = flags.parse_args()
    if not load_native() or native("packed_linear") is None:
        sys.exit("there is no kernel for this CPU, or no compiler")
    torch.manual_seed(0)
    report = Report(args.json)
    with torch.inference_mode():
        read_limit(report, args)
        for name in args.shapes:
            measure(report, name, args)


if __name__ == "__main__":
    main()
