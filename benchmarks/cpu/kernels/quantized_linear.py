"""Linear layers with int4 and int8 weights beside bfloat16 ones in one run: bytes a second for a few rows, else FLOP.

    python benchmarks/cpu/kernels/quantized_linear.py --json benchmarks/results/quantized_linear.jsonl

Every layer has so many copies that none is in a cache when its turn comes, as in a model. Inputs are taken to 8 bits by
layers of integers, but for "weights": with those they stay bfloat16.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3]))  # so that it also runs as a plain script

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks.tools.figures import Report, median, parser
from pagoda_kernels.linear.packed_linear import pack_weight, packed_linear
from pagoda_kernels.linear.quantized_linear import quantized_linear
from pagoda_kernels.linear.quantized_matrix import pack, quantize
from pagoda_kernels.native.library import load_native

SHAPES = ((2304, 768), (768, 2048), (6144, 1024))
"""Outputs and inputs: fused qkv and down projection of a Llama of 125 M, fused gate and up of Qwen3-0.6B."""
KINDS = ("bf16", "int8", "int8 weights", "int4-g128", "int4-g128 weights", "int4-g32")
FEW, MANY = (1, 4, 16), (32, 128, 512)
COLD_BYTES = 384 << 20
"""Of weights that pass between two uses of the same."""
MIN_SECONDS = 0.05

Layer = Callable[[Tensor], Tensor]


def layers(kind: str, weight: Tensor) -> tuple[list[Layer], int]:
    """Copies of one layer, and the bytes of one."""
    if kind == "bf16":
        packed = pack_weight(weight)
        num_bytes = packed.numel() * 2
        copies = [packed.clone() for _ in range(-(-COLD_BYTES // num_bytes))]
        rows = weight.shape[0]
        return [partial(packed_linear, packed=held, out_features=rows) for held in copies], num_bytes
    scheme, _, what = kind.partition(" ")
    bits, group_size = (8, weight.shape[1]) if scheme == "int8" else (4, int(scheme.removeprefix("int4-g")))
    matrix = pack(quantize(weight, bits=bits, group_size=group_size), quantizes_inputs=what != "weights")
    num_bytes = matrix.codes.numel() + 4 * matrix.scales.numel()
    held_all = [
        matrix._replace(codes=matrix.codes.clone(), scales=matrix.scales.clone())
        for _ in range(-(-COLD_BYTES // num_bytes))
    ]
    return [partial(quantized_linear, weight=held) for held in held_all], num_bytes


def seconds(copies: Sequence[Layer], x: Tensor) -> float:
    """Of one call."""
    num_calls, started = 0, time.perf_counter()
    while True:
        for layer in copies:
            layer(x)
            num_calls += 1
            elapsed = time.perf_counter() - started
            if elapsed > MIN_SECONDS and num_calls >= min(4, len(copies)):
                return elapsed / num_calls


def main() -> None:
    """Command line."""
    args = parser(__doc__ or "").parse_args()
    report = Report(args.json)
    if not load_native():
        sys.exit("there are no C++ kernels on this machine")
    torch.manual_seed(0)
    for num_outputs, num_inputs in SHAPES:
        weight = torch.randn(num_outputs, num_inputs).bfloat16()
        for kind in KINDS:
            copies, num_bytes = layers(kind, weight)
            for num_rows in FEW + MANY:
                x = torch.randn(num_rows, num_inputs).bfloat16()
                copies[0](x)
                took = median([seconds(copies, x) for _ in range(args.rounds)])
                name = f"linear {num_outputs}x{num_inputs} {kind} rows={num_rows}"
                if num_rows in FEW:
                    report.add(name, num_bytes / took / 1e9, "GB/s", n=args.rounds)
                    report.add(name + " time", took * 1e6, "us", n=args.rounds)
                else:
                    flop = 2 * num_rows * num_outputs * num_inputs
                    report.add(name, flop / took / 1e9, "GFLOP/s", n=args.rounds)


if __name__ == "__main__":
    main()
