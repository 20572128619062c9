"""Low-rank products of grouped rows: the kernel equals its reference, and a row has the same bits in every batch."""

from collections.abc import Sequence

import pytest
import torch

from benchmarks.gpu.tools.lora_case import LoraCase, lora_case
from pagoda_kernels.lora.add_lora import LoraPart, add_lora, add_lora_reference
from pagoda_kernels.native.library import load_native, native

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True, scope="module")
def kernels() -> None:
    assert load_native(), "this machine has a compiler"
    assert native("add_lora") is not None
    torch.manual_seed(0)


def check(case: LoraCase) -> None:
    before = case.out.clone()
    expected = case.out.clone()
    add_lora(*case)
    add_lora_reference(case.x, expected, case.rows, case.table)
    torch.testing.assert_close(case.out, expected, atol=TOLERANCE[case.x.dtype], rtol=TOLERANCE[case.x.dtype])
    is_changed = torch.zeros(case.out.shape[0], dtype=torch.bool)
    is_changed[case.rows.rows] = True
    assert torch.equal(case.out[~is_changed], before[~is_changed])


def part_of_wider_rows(case: LoraCase) -> LoraCase:
    """The same, where NaN lies on both sides of each row of x and of out."""
    x, out = (torch.nn.functional.pad(one, (3, 7), value=torch.nan)[:, 3:-7] for one in (case.x, case.out))
    return case._replace(x=x, out=out)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "counts", [(1, 0), (0, 3), (1, 1, 1, 1, 1, 2), (5, 0, 2, 17, 1, 0), (130, 1, 0, 70, 3, 40)], ids=str
)
@pytest.mark.parametrize("num_inputs", [1, 100, 128])
def test_rows_meet_the_matrices_of_their_adapter(counts: Sequence[int], num_inputs: int, dtype: torch.dtype) -> None:
    check(lora_case(counts, num_inputs=num_inputs, dtype=dtype))


def test_logits_are_wider_than_what_they_are_made_of() -> None:
    check(lora_case((3, 4, 1), dtype=torch.bfloat16, out_dtype=torch.float32))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_inputs_and_outputs_may_be_a_part_of_wider_rows(dtype: torch.dtype) -> None:
    check(part_of_wider_rows(lora_case((2, 5, 1, 1), dtype=dtype)))


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_row_has_the_same_bits_in_every_batch(dtype: torch.dtype, num_threads: int) -> None:
    case = lora_case((70, 1, 6, 9, 3, 4), num_inputs=300, sizes=(700, 200, 90), dtype=dtype)
    threads = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        alone = [case.only(row) for row in range(case.x.shape[0])]
        add_lora(*case)
        for row, one in enumerate(alone):
            add_lora(*one)
            assert torch.equal(one.out[0], case.out[row])
    finally:
        torch.set_num_threads(threads)


def test_a_part_keeps_its_matrix() -> None:
    b = torch.randn(70, 3)
    assert torch.equal(LoraPart.of(torch.randn(3, 5), b, 0).matrix, b)
