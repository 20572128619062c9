"""Mixtures of experts on a GPU: products against PyTorch's, and a layer at Qwen3-30B-A3B's shape."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.tools.check import TOLERANCE, Check, Pair
from benchmarks.gpu.tools.timing import Figures
from pagoda_kernels.linear.linear_weights import LinearWeights
from pagoda_kernels.linear.scaled_matrix import FP4_GROUP, ScaledMatrix, pack_mxfp4
from pagoda_kernels.moe.experts import ExpertWeights, routed_experts
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
    yield from _scaled_checks(device, is_small=is_small)


def _scaled_checks(device: torch.device, *, is_small: bool) -> Iterator[Check]:
    """The same of FP8 and FP4."""
    num_experts, inputs, outputs = (3, 160, 130) if is_small else (60, 2880, 1500)
    kinds = {
        "FP8": partial(_float8, inputs),
        "FP8 in blocks": partial(_float8, 128),
        "MXFP4": _mxfp4,
    }
    for name, make in kinds.items():
        for num_tokens in (17,) if is_small else (1, 300):

            def run(make: Callable[[Tensor], ScaledMatrix] = make, num_tokens: int = num_tokens) -> list[Pair]:
                drawn = torch.randn(num_experts, outputs, inputs, device=device) * inputs**-0.5
                biases = torch.randn(num_experts, outputs, device=device).bfloat16()
                matrices = ExpertMatrices.of([make(one) for one in drawn], list(biases))
                chosen = torch.rand(num_tokens, num_experts, device=device).argsort(dim=-1)[:, :2]
                rows = sort_by_expert(chosen, num_experts, block_rows=16 if num_tokens < 300 else 64)
                x = torch.randn(num_tokens, inputs, device=device).bfloat16()
                actual = grouped_linear(x, matrices, rows, top_k=2)[rows.slots]
                expected = grouped_linear_reference(x, matrices, rows, top_k=2)[rows.slots]
                return [Pair(actual, expected, TOLERANCE[torch.bfloat16])]

            yield Check("grouped_linear", f"{name}, {num_tokens} tokens", run)


def _float8(group_size: int, weight: Tensor) -> ScaledMatrix:
    num_groups = -(-weight.shape[1] // group_size)
    scales = torch.rand(weight.shape[0], num_groups, device=weight.device) + 0.5
    return ScaledMatrix((weight * 16).to(torch.float8_e4m3fn), scales / 16, group_size)


def _mxfp4(weight: Tensor) -> ScaledMatrix:
    """Random numbers of the weight's shape."""
    num_groups = weight.shape[1] // FP4_GROUP
    blocks = torch.randint(0, 256, (weight.shape[0], num_groups, FP4_GROUP // 2), device=weight.device)
    scales = torch.randint(118, 124, (weight.shape[0], num_groups), device=weight.device)
    return pack_mxfp4(blocks.byte(), scales.byte())


def measure_mixtures(figures: Figures, *, is_small: bool) -> None:
    """The experts' part of a layer: bytes of the experts that are met for few tokens, products for many."""
    num_experts, top_k, hidden, inner = (5, 2, 64, 32) if is_small else (128, 8, 2048, 768)
    device, dtype = figures.device, torch.bfloat16

    def matrix(*shape: int) -> LinearWeights:
        drawn = (torch.randn(*shape, device=device) * shape[1] ** -0.5).to(dtype)
        return LinearWeights(matrix=drawn, bias=None, out_features=shape[0], in_features=shape[1], is_plain=True)

    experts = [ExpertWeights(gate_up=matrix(2 * inner, hidden), down=matrix(hidden, inner)) for _ in range(num_experts)]
    layer = routed_experts(experts, activation="silu", dtype=dtype)
    for num_tokens in (1, 17) if is_small else (1, 8, 64, 256, 2048, 8192):
        x = torch.randn(num_tokens, hidden, device=device).to(dtype)
        chosen = torch.rand(num_tokens, num_experts, device=device).argsort(dim=-1)[:, :top_k]
        weights = torch.rand(num_tokens, top_k, device=device)
        num_met = int(chosen.unique().numel())
        if layer is None:  # without a GPU
            continue
        seconds = figures.time(partial(layer, x, weights, chosen), rounds=2 if is_small else 20)
        num_bytes = 0 if num_tokens > 256 else 2.0 * 3 * num_met * hidden * inner
        num_flops = 2.0 * 3 * num_tokens * top_k * hidden * inner if num_tokens > 256 else 0
        figures.add(
            "experts",
            f"{num_tokens} tokens, {num_met} of {num_experts} experts met",
            seconds,
            num_bytes=num_bytes,
            num_flops=num_flops,
        )
