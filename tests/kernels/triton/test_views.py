"""What does not lie densely in memory is computed in Triton as its copy that does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pagoda_kernels.linear.quantized_linear import quantized_linear
from pagoda_kernels.linear.quantized_matrix import quantize
from pagoda_kernels.linear.quantized_rows import pack_rows
from pagoda_kernels.moe.grouped_linear import ExpertMatrices, grouped_linear, sort_by_expert
from tests.kernels.view_cases import CASES, VIEWS, check_views, drawn

IN_TRITON = (
    *("act_and_mul", "rms_norm", "rms_norm of heads", "add_rms_norm", "gated_delta_rule", "state_space_scan"),
    *("top_logprobs", "sample_tokens", "apply_token_bitmask", "apply_token_penalties"),
)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", IN_TRITON)
def test_a_view_is_computed_as_its_copy(name: str, view: Callable[[Tensor], Tensor]) -> None:
    assert name in CASES
    check_views(name, view)


@pytest.mark.parametrize("top_k", [0, 2])
@pytest.mark.parametrize("view", VIEWS)
def test_tokens_of_experts_may_be_a_view(view: Callable[[Tensor], Tensor], top_k: int) -> None:
    matrices = ExpertMatrices.of([drawn(20, 33), drawn(20, 33), drawn(20, 33)], [])
    rows = sort_by_expert(torch.tensor([[0, 2], [1, 0], [2, 1]]), 3, block_rows=16)
    x = drawn(3 if top_k else rows.choices.shape[0], 33)
    expected = grouped_linear(x, matrices, rows, top_k=top_k)
    actual = grouped_linear(view(x), matrices, rows, top_k=top_k)
    torch.testing.assert_close(actual[rows.slots], expected[rows.slots])


@pytest.mark.parametrize("view", VIEWS)
def test_arguments_of_a_quantized_product_may_be_views(view: Callable[[Tensor], Tensor]) -> None:
    weight = pack_rows(quantize(drawn(40, 64), bits=4, group_size=32))
    given: dict[str, Any] = {"x": drawn(5, 64), "bias": drawn(40), "residual": drawn(5, 40)}
    expected = quantized_linear(weight=weight, **given)
    for name, tensor in given.items():
        actual = quantized_linear(weight=weight, **given | {name: view(tensor)})
        torch.testing.assert_close(actual, expected, msg=lambda told, name=name: f"{name}: {told}")
