"""Matrices of small floats (FP8, FP4) with a scale for each group of inputs, as large in memory as in their checkpoint.

Integers are in `quantized_matrix`. Only the grouped products of experts on a GPU read these as they are.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values of the 16 codes of E2M1."""
FP4_GROUP = 32
"""Inputs that share a scale in MXFP4."""
SCALE_BIAS = 127
"""An E8M0 scale of code c is 2 ** (c - SCALE_BIAS)."""
MIN_GROUP = 32
"""Inputs of the smallest group that the kernel reads; groups are multiples of it, or one for each output."""


class ScaledMatrix(NamedTuple):
    """Element [n, k] is the number of codes[n, k] times the scale of [n, k // group_size]."""

    codes: Tensor
    """FP8: float8_e4m3fn [num_outputs, num_inputs]. FP4: uint8 [num_outputs, num_inputs / 2], where byte 16 u + i has
    the code of input 32 u + i in its low half and that of 32 u + 16 + i in its high half."""
    scales: Tensor
    """[num_outputs, num_groups]: float32 with FP8, E8M0 as uint8 with FP4."""
    group_size: int
    """The last group may be smaller. 32 with FP4."""

    @property
    def bits(self) -> int:
        """Of a code: 8 or 4."""
        return 4 if self.codes.dtype == torch.uint8 else 8

    @property
    def num_outputs(self) -> int:
        """Rows."""
        return self.codes.shape[0]

    @property
    def num_inputs(self) -> int:
        """Columns."""
        return self.codes.shape[1] * 8 // self.bits

    @property
    def shape(self) -> tuple[int, int]:
        """[num_outputs, num_inputs]."""
        return self.num_outputs, self.num_inputs

    @property
    def is_readable(self) -> bool:
        """Whether the kernel reads such groups."""
        if self.bits == 4:
            return self.group_size == FP4_GROUP and self.num_inputs % FP4_GROUP == 0
        return self.group_size >= self.num_inputs or self.group_size % MIN_GROUP == 0

    def dequantize(self) -> Tensor:
        """[num_outputs, num_inputs] float32."""
        if self.bits == 4:
            units = self.codes.view(self.num_outputs, -1, FP4_GROUP // 2)  # [num_outputs, groups, 16]
            values = torch.tensor(FP4_VALUES, device=units.device)[torch.cat((units & 15, units >> 4), dim=2).int()]
            return torch.ldexp(values, self.scales.int()[..., None] - SCALE_BIAS).flatten(1)
        groups = torch.arange(self.num_inputs, device=self.codes.device) // self.group_size
        return self.codes.float() * self.scales[:, groups]

    def with_groups(self, group_size: int) -> "ScaledMatrix":
        """The same with smaller groups.

        Args:
            group_size: divides the old one.
        """
        if group_size == self.group_size:
            return self
        num_groups = -(-self.num_inputs // group_size)
        scales = self.scales.repeat_interleave(self.group_size // group_size, 1)[:, :num_groups]
        return self._replace(scales=scales.contiguous(), group_size=group_size)


def pack_mxfp4(blocks: Tensor, scales: Tensor) -> ScaledMatrix:
    """From the order in which checkpoints store MXFP4: neighbours share a byte, the first is its low half.

    Args:
        blocks: [num_outputs, num_groups, 16] uint8.
        scales: [num_outputs, num_groups] uint8.
    """
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)  # [num_outputs, groups, 32]
    packed = codes[..., : FP4_GROUP // 2] | codes[..., FP4_GROUP // 2 :] << 4
    return ScaledMatrix(codes=packed.flatten(1), scales=scales.contiguous(), group_size=FP4_GROUP)


def common_group(group_sizes: list[int], num_inputs: int, num_held: int) -> int:
    """The largest group that several matrices of `num_inputs` can have, and a rank that holds `num_held` of them."""
    group_size = math.gcd(*(min(size, num_inputs) for size in group_sizes))
    return group_size if num_held == num_inputs else math.gcd(group_size, num_held)
