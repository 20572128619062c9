"""Matrices of small integers in the order in which the Triton kernel reads them: a row of bytes for each output.

The tiles of `quantized_matrix` suit vectors of a CPU; on a GPU their numbers would have to change places between
threads. Here a thread that has read a byte has its numbers where the matrix product wants them: in 4 bits the halves of
a byte go to two products of half the inputs each, so they are never brought into one order.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from pagoda_kernels.linear.quantized_matrix import QuantizedMatrix

UNIT = 32
"""Inputs whose 4-bit codes lie in 16 bytes: those of the first 16 in the low halves, the others' in the high halves."""
PADDED_INPUTS = 128
"""Rows have a multiple of this many inputs, so that the kernel reads whole tiles."""


class RowMatrix(NamedTuple):
    """A `QuantizedMatrix`, packed for a GPU."""

    codes: Tensor
    """8 bits: the numbers, int8 [num_outputs, padded_inputs]; 4 bits: uint8 [num_outputs, padded_inputs / 2], where
    byte 16 u + i has input 32 u + i in its low half and 32 u + 16 + i in its high half; a code is the number plus 8."""
    scales: Tensor
    """[num_groups, num_outputs] float32."""
    zeros: Tensor | None
    """The same, or None."""
    bits: int
    group_size: int
    num_outputs: int
    num_inputs: int


def fits_rows(num_inputs: int, group_size: int) -> bool:
    """Whether the kernel reads such groups: whole units, or one scale for each output."""
    return group_size >= num_inputs or group_size % UNIT == 0


def pack_rows(matrix: QuantizedMatrix) -> RowMatrix:
    """For `quantized_linear` on a GPU, on the device where the matrix is.

    Raises:
        ValueError: groups that are not of whole units.
    """
    num_outputs, num_inputs = matrix.numbers.shape
    if not fits_rows(num_inputs, matrix.group_size):
        raise ValueError(f"group_size is {matrix.group_size}, must be a multiple of {UNIT}, or at least {num_inputs}")
    codes = torch.nn.functional.pad(matrix.numbers, (0, -num_inputs % PADDED_INPUTS))
    if matrix.bits == 4:
        units = (codes + 8).view(torch.uint8).view(num_outputs, -1, 2, UNIT // 2)
        codes = (units[:, :, 0] | units[:, :, 1] << 4).flatten(1)
    return RowMatrix(
        codes=codes.contiguous(),
        scales=matrix.scales.t().contiguous(),
        zeros=None if matrix.zeros is None else matrix.zeros.t().contiguous(),
        bits=matrix.bits,
        group_size=matrix.group_size,
        num_outputs=num_outputs,
        num_inputs=num_inputs,
    )


def empty_rows(
    num_outputs: int, num_inputs: int, *, bits: int, group_size: int, device: torch.device | str
) -> RowMatrix:
    """Memory for a matrix without zeros."""
    num_bytes, num_groups = (num_inputs + -num_inputs % PADDED_INPUTS) * bits // 8, -(-num_inputs // group_size)
    codes_dtype = torch.int8 if bits == 8 else torch.uint8
    return RowMatrix(
        codes=torch.empty(num_outputs, num_bytes, dtype=codes_dtype, device=device),
        scales=torch.empty(num_groups, num_outputs, device=device),
        zeros=None,
        bits=bits,
        group_size=group_size,
        num_outputs=num_outputs,
        num_inputs=num_inputs,
    )


def unpack_row_matrix(rows: RowMatrix) -> QuantizedMatrix:
    """The inverse of `pack_rows`."""
    return QuantizedMatrix(
        numbers=_numbers(rows.codes, rows),
        scales=rows.scales.t().contiguous(),
        zeros=None if rows.zeros is None else rows.zeros.t().contiguous(),
        bits=rows.bits,
        group_size=rows.group_size,
    )


def look_up_rows(rows: RowMatrix, ids: Tensor) -> Tensor:
    """Rows of the matrix by number: [n] int64 to [n, num_inputs] float32."""
    zeros = None if rows.zeros is None else rows.zeros[:, ids].t()
    numbers = _numbers(rows.codes[ids], rows)
    chosen = QuantizedMatrix(
        numbers=numbers, scales=rows.scales[:, ids].t(), zeros=zeros, bits=rows.bits, group_size=rows.group_size
    )
    return chosen.dequantize()


def _numbers(codes: Tensor, rows: RowMatrix) -> Tensor:
    """[n, bytes] to int8 [n, num_inputs]."""
    if rows.bits == 4:
        units = codes.view(codes.shape[0], codes.shape[1] // (UNIT // 2), 1, UNIT // 2)
        codes = torch.cat((units & 15, units >> 4), dim=2).flatten(1).view(torch.int8) - 8
    return codes[:, : rows.num_inputs].contiguous()
