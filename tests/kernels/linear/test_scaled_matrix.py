"""Matrices of small floats are the numbers that PyTorch and the specification of MXFP4 say."""

import pytest
import torch

from pagoda_kernels.linear.scaled_matrix import ScaledMatrix, common_group, pack_mxfp4

E2M1 = [sign * magnitude for sign in (1, -1) for magnitude in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]


def test_mxfp4_is_codes_times_powers_of_two() -> None:
    blocks, scales = torch.randint(0, 256, (6, 3, 16), dtype=torch.uint8), torch.randint(0, 255, (6, 3)).byte()
    matrix = pack_mxfp4(blocks, scales)
    assert (matrix.bits, matrix.num_outputs, matrix.num_inputs, matrix.is_readable) == (4, 6, 96, True)
    expected = [
        [
            E2M1[int(blocks[row, column // 32, column % 32 // 2]) >> (4 * (column % 2)) & 15]
            * 2.0 ** (int(scales[row, column // 32]) - 127)
            for column in range(96)
        ]
        for row in range(6)
    ]
    assert torch.equal(matrix.dequantize(), torch.tensor(expected, dtype=torch.float64).float())


def test_smaller_groups_are_the_same_numbers() -> None:
    matrix = ScaledMatrix(torch.randn(5, 200).to(torch.float8_e4m3fn), torch.rand(5, 2), 128)
    smaller = matrix.with_groups(32)
    assert smaller.scales.shape == (5, 7)
    assert torch.equal(smaller.dequantize(), matrix.dequantize())


@pytest.mark.parametrize(
    ("groups", "inputs", "held", "expected"),
    [
        ([128, 128], 512, 512, 128),
        ([128], 200, 200, 128),
        ([128], 192, 96, 32),
        ([512], 512, 256, 256),
        ([96, 64], 96, 96, 32),
    ],
)
def test_groups_end_where_the_part_of_a_rank_ends(groups: list[int], inputs: int, held: int, expected: int) -> None:
    assert common_group(groups, inputs, held) == expected
