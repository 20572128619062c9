"""Low-rank products of grouped rows in Triton equal what their reference computes."""

from collections.abc import Sequence

import pytest
import torch

from benchmarks.gpu.tools.lora_case import lora_case
from pagoda_kernels.lora.add_lora import add_lora, add_lora_reference
from tests.kernels.linear.test_add_lora import part_of_wider_rows
from tests.kernels.triton.outputs import nan_filled_outputs

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("counts", [(1, 0), (0, 2), (1, 1, 0, 1, 1, 2), (17, 33, 1, 5)], ids=str)
def test_rows_meet_the_matrices_of_their_adapter(counts: Sequence[int], dtype: torch.dtype) -> None:
    case = lora_case(counts, dtype=dtype)
    expected = case.out.clone()
    with nan_filled_outputs():
        add_lora(*case)
    add_lora_reference(case.x, expected, case.rows, case.table)
    torch.testing.assert_close(case.out, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_logits_are_wider_than_what_they_are_made_of() -> None:
    case = lora_case((3, 4, 1), dtype=torch.bfloat16, out_dtype=torch.float32)
    expected = case.out.clone()
    add_lora(*case)
    add_lora_reference(case.x, expected, case.rows, case.table)
    torch.testing.assert_close(case.out, expected, atol=2e-2, rtol=2e-2)


def test_inputs_and_outputs_may_be_a_part_of_wider_rows() -> None:
    case = part_of_wider_rows(lora_case((2, 5, 1, 1)))
    expected = case.out.clone()
    add_lora(*case)
    add_lora_reference(case.x, expected, case.rows, case.table)
    torch.testing.assert_close(case.out, expected, atol=1e-5, rtol=1e-5)
