"""Weights of small integers on a GPU: against their reference, and at Llama-3.1-8B's shapes beside bfloat16 weights."""

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.gpu.tools.check import Check, Pair
from benchmarks.gpu.tools.timing import Figures
from pagoda_kernels.linear.quantized_linear import quantized_linear, quantized_linear_reference
from pagoda_kernels.linear.quantized_matrix import QuantizedMatrix
from pagoda_kernels.linear.quantized_rows import RowMatrix, pack_rows
from pagoda_kernels.selection import triton_kernel

SCHEMES = ((8, 0), (8, 32), (4, 128), (4, 64), (4, 32))
"""Bits, and inputs that share a scale; 0 is all."""
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""Of results of about 1, absolute and relative: a unit in the last place, and float32's rounding of the sum."""


def random_rows(
    num_outputs: int, num_inputs: int, bits: int, group_size: int, device: torch.device, *, has_zeros: bool = False
) -> RowMatrix:
    """Such that normal activations give results of deviation 1, whatever is in a group."""
    half, group_size = 1 << (bits - 1), group_size or num_inputs
    num_groups = -(-num_inputs // group_size)
    size = 3**0.5 / half / num_inputs**0.5
    zeros = torch.randint(-half, half, (num_outputs, num_groups), device=device).float() if has_zeros else None
    return pack_rows(
        QuantizedMatrix(
            numbers=torch.randint(-half, half, (num_outputs, num_inputs), device=device, dtype=torch.int8),
            scales=(torch.rand(num_outputs, num_groups, device=device) + 0.5) * size,
            zeros=zeros,
            bits=bits,
            group_size=group_size,
        )
    )


def quantized_checks(device: torch.device, *, is_small: bool) -> Iterator[Check]:
    """Products, with all that may be added, whole and with their inputs divided."""
    shape = (130, 520) if is_small else (1500, 4000)
    sizes = (1, 17) if is_small else (1, 15, 16, 17, 64, 300)
    cases = [(dtype, *scheme) for scheme in SCHEMES for dtype in TOLERANCE]
    if is_small:  # what the compiler should see
        cases = [(torch.bfloat16, 8, 0), (torch.bfloat16, 4, 32), (torch.float16, 4, 128), (torch.float32, 4, 128)]
    for dtype, bits, group_size in cases:
        for num_rows in sizes:

            def run(
                dtype: torch.dtype = dtype, bits: int = bits, group_size: int = group_size, num_rows: int = num_rows
            ) -> list[Pair]:
                weight = random_rows(*shape, bits, group_size, device, has_zeros=num_rows == 17)
                x = torch.randn(num_rows, shape[1], device=device, dtype=dtype)
                bias = torch.randn(shape[0], device=device, dtype=dtype)
                residual = torch.randn(num_rows, shape[0], device=device, dtype=dtype)
                expected = quantized_linear_reference(x, weight, bias, residual)
                kernel = triton_kernel("quantized_linear", x)
                whole = kernel(x, weight, bias, residual, num_splits=1)
                pairs = [Pair(whole, expected, TOLERANCE[dtype])]
                if num_rows <= 17:
                    divided = kernel(x, weight, bias, residual, num_splits=4)
                    pairs.append(Pair(divided, expected, TOLERANCE[dtype]))
                return pairs

            yield Check("quantized_linear", f"{num_rows} rows {dtype} int{bits} groups of {group_size or 'all'}", run)


def measure_quantized_linear(figures: Figures, *, is_small: bool) -> None:
    """Gate and up projection of Llama-3.1-8B: bytes of weights a second for few rows, products a second for many."""
    num_outputs, num_inputs = (256, 512) if is_small else (28672, 4096)
    device = figures.device
    weights = {
        f"int{bits}" + (f"-g{group_size}" if group_size else ""): random_rows(
            num_outputs, num_inputs, bits, group_size, device
        )
        for bits, group_size in SCHEMES
    }
    floats = torch.randn(num_outputs, num_inputs, dtype=torch.bfloat16, device=device)
    for num_rows in (1, 17) if is_small else (1, 16, 64, 256, 2048):
        x = torch.randn(num_rows, num_inputs, dtype=torch.bfloat16, device=device)
        num_flops = 2.0 * num_rows * num_outputs * num_inputs if num_rows > 16 else 0.0
        rounds = 2 if is_small else 20

        def add(name: str, seconds: float, num_bytes: int, rows: int = num_rows, flops: float = num_flops) -> None:
            num_read = 0 if flops else num_bytes
            figures.add("quantized_linear", f"{name}, {rows} rows", seconds, num_bytes=num_read, num_flops=flops)

        add("bf16 (torch)", figures.time(partial(F.linear, x, floats), rounds=rounds), 2 * floats.numel())
        for name, weight in weights.items():
            seconds = figures.time(partial(quantized_linear, x, weight), rounds=rounds)
            add(name, seconds, weight.codes.numel() + 4 * weight.scales.numel())
