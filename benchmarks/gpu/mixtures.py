"""Products with the matrices of experts, held against PyTorch's."""

from collections.abc import Iterator

import torch

from benchmarks.gpu.check import TOLERANCE, Check, Pair
from pagoda_kernels.moe.grouped_linear import (
    ExpertMatrices,
    grouped_linear,
    grouped_linear_reference,
    sort_by_expert,
)


def mixture_checks(device: torch.device, *, is_small: bool) -> Iterator[Check]:
    """Rows of tokens, then rows of slots, with blocks of few and of many rows."""
    num_experts, inputs, outputs = (5, 100, 130) if is_small else (60, 1000, 1500)
    for dtype in (torch.bfloat16,) if is_small else tuple(TOLERANCE):
        for num_tokens in (17,) if is_small else (1, 15, 300):

            def run(dtype: torch.dtype = dtype, num_tokens: int = num_tokens) -> list[Pair]:
                weights = (torch.randn(num_experts, outputs, inputs, device=device) * inputs**-0.5).to(dtype)
                biases = torch.randn(num_experts, outputs, device=device, dtype=dtype)
                matrices = ExpertMatrices.of(list(weights), list(biases))
                chosen = torch.rand(num_tokens, num_experts, device=device).argsort(dim=-1)[:, :4]
                rows = sort_by_expert(chosen, num_experts, block_rows=16 if num_tokens < 300 else 64)
                pairs = []
                for top_k, count in ((4, num_tokens), (0, rows.choices.shape[0])):
                    x = torch.randn(count, inputs, device=device).to(dtype)
                    actual = grouped_linear(x, matrices, rows, top_k=top_k)[rows.slots]
                    expected = grouped_linear_reference(x, matrices, rows, top_k=top_k)[rows.slots]
                    pairs.append(Pair(actual, expected, TOLERANCE[dtype]))
                return pairs

            yield Check("grouped_linear", f"{num_tokens} tokens {dtype}", run)
