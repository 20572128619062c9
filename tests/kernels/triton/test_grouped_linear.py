"""Grouped products and whole mixtures in Triton equal what their references compute."""

import pytest
import torch

from pagoda_kernels.layers.act_and_mul import ClampedSwiglu
from pagoda_kernels.linear.scaled_matrix import ScaledMatrix, pack_mxfp4
from pagoda_kernels.moe.grouped_linear import (
    ExpertMatrices,
    grouped_linear,
    grouped_linear_reference,
    sort_by_expert,
    sort_by_expert_reference,
)
from tests.kernels.triton.outputs import nan_filled_outputs

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("block_rows", [16, 64])
@pytest.mark.parametrize("num_tokens", [0, 1, 15, 65, 700])
def test_choices_are_sorted_in_blocks_of_one_expert(num_tokens: int, block_rows: int) -> None:
    chosen = torch.stack([torch.randperm(7)[:3] for _ in range(num_tokens)]) if num_tokens else torch.zeros(0, 3).long()
    rows = sort_by_expert(chosen, 7, block_rows=block_rows)
    there = rows.choices[rows.choices >= 0]
    assert sorted(there.tolist()) == list(range(3 * num_tokens))
    assert torch.equal(rows.choices[rows.slots], torch.arange(3 * num_tokens))
    for block, expert in enumerate(rows.experts.tolist()):
        choices = rows.choices[block * block_rows : (block + 1) * block_rows]
        assert all(int(chosen.flatten()[choice]) == expert for choice in choices[choices >= 0])
        assert expert < 7 or bool((choices < 0).all())
    expected = sort_by_expert_reference(chosen, 7, block_rows=block_rows)
    for made, wanted in zip(rows[:3], expected[:3], strict=True):
        assert torch.equal(made, wanted)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("num_tokens", "inputs", "outputs"), [(1, 64, 64), (17, 100, 130), (40, 33, 15)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_rows_meet_the_matrix_of_their_expert(
    num_tokens: int, inputs: int, outputs: int, has_bias: bool, dtype: torch.dtype
) -> None:
    weights = [(torch.randn(outputs, inputs) * inputs**-0.5).to(dtype) for _ in range(5)]
    biases = [torch.randn(outputs).to(dtype) for _ in range(5)] if has_bias else []
    matrices = ExpertMatrices.of(weights, biases)
    chosen = torch.stack([torch.randperm(5)[:2] for _ in range(num_tokens)])
    rows = sort_by_expert(chosen, 5, block_rows=16)
    x = torch.randn(num_tokens, inputs).to(dtype)
    with nan_filled_outputs():
        actual = grouped_linear(x, matrices, rows, top_k=2)
    expected = grouped_linear_reference(x, matrices, rows, top_k=2)
    torch.testing.assert_close(actual[rows.slots], expected[rows.slots], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    slots = torch.randn(rows.choices.shape[0], inputs).to(dtype)
    with nan_filled_outputs():
        actual = grouped_linear(slots, matrices, rows, top_k=0)
    expected = grouped_linear_reference(slots, matrices, rows, top_k=0)
    torch.testing.assert_close(actual[rows.slots], expected[rows.slots], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("activation", ["silu", ClampedSwiglu(limit=1.5, alpha=1.702, up_offset=1.0)], ids=str)
@pytest.mark.parametrize("scales_input", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 33])
def test_experts_on_a_gpu_give_what_one_after_the_other_gives(
    num_tokens: int, scales_input: bool, activation: str | ClampedSwiglu
) -> None:
    from pagoda_kernels.layers.act_and_mul import act_and_mul_reference
    from pagoda_kernels.moe.experts import GroupedExperts, mixture_reference

    ups, downs = [torch.randn(80, 48) / 7 for _ in range(4)], [torch.randn(48, 40) / 6 for _ in range(4)]
    experts = GroupedExperts(
        ExpertMatrices.of(ups, []), ExpertMatrices.of(downs, []), activation=activation, scales_input=scales_input
    )
    x = torch.randn(num_tokens, 48)
    chosen = torch.stack([torch.randperm(4)[:2] for _ in range(num_tokens)])
    weights = torch.rand(num_tokens, 2)
    plain = [
        lambda rows, up=up, down=down: act_and_mul_reference(rows @ up.t(), activation) @ down.t()
        for up, down in zip(ups, downs, strict=True)
    ]
    expected = mixture_reference(x, weights, chosen, plain, scales_input=scales_input)
    torch.testing.assert_close(experts(x, weights, chosen), expected, atol=1e-5, rtol=1e-5)


def float8(outputs: int, inputs: int, group_size: int) -> ScaledMatrix:
    """Every code of FP8 but its two NaNs, with a scale for each output or for each group of it."""
    codes = torch.randint(0, 256, (outputs, inputs), dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    scales = (torch.rand(outputs, -(-inputs // group_size)) + 0.5) / 4096
    return ScaledMatrix(codes.view(torch.float8_e4m3fn), scales, group_size)


def mxfp4(outputs: int, inputs: int) -> ScaledMatrix:
    """Every code of FP4, and scales from 2^-12 on."""
    blocks = torch.randint(0, 256, (outputs, inputs // 32, 16), dtype=torch.uint8)
    return pack_mxfp4(blocks, torch.randint(115, 122, (outputs, inputs // 32), dtype=torch.uint8))


SCALED = {
    "by output": lambda outputs, inputs: float8(outputs, inputs, inputs),
    "by blocks of 128": lambda outputs, inputs: float8(outputs, inputs, 128),
    "by groups of 96": lambda outputs, inputs: float8(outputs, inputs, 96),
    "mxfp4": mxfp4,
}


@pytest.mark.parametrize("kind", SCALED)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("num_tokens", "inputs", "outputs"), [(3, 96, 64), (17, 160, 70)])
def test_rows_meet_small_floats_of_their_expert(
    num_tokens: int, inputs: int, outputs: int, dtype: torch.dtype, kind: str
) -> None:
    weights = [SCALED[kind](outputs, inputs) for _ in range(3)]
    biases = [torch.randn(outputs).to(dtype) for _ in range(3)] if num_tokens == 17 else []
    matrices = ExpertMatrices.of(weights, biases)
    rows = sort_by_expert(torch.stack([torch.randperm(3)[:2] for _ in range(num_tokens)]), 3, block_rows=16)
    for top_k, num_rows in ((2, num_tokens), (0, rows.choices.shape[0])):
        x = torch.randn(num_rows, inputs).to(dtype)
        with nan_filled_outputs():
            actual = grouped_linear(x, matrices, rows, top_k=top_k)
        expected = grouped_linear_reference(x, matrices, rows, top_k=top_k)
        bound = TOLERANCE[dtype]
        torch.testing.assert_close(actual[rows.slots], expected[rows.slots], atol=bound, rtol=bound)
