"""Rows of floats to small integers, straight to where a packed matrix has them: no other copy of the matrix is made."""

import torch
from torch import Tensor

from pagoda_kernels.linear.quantized_matrix import (
    QUAD,
    TILE,
    Allocate,
    PackedMatrix,
    new_tensor,
    pack,
    packed_in,
    quantize,
)
from pagoda_kernels.native.library import NATIVE_DTYPES, native


def new_packed(
    num_outputs: int, num_inputs: int, *, bits: int, group_size: int, allocate: Allocate = new_tensor
) -> PackedMatrix:
    """Memory for a matrix without zeros on a CPU, zero after the last output, to be filled with `quantize_rows`.

    Args:
        group_size: at least num_inputs is one scale for each output.
        allocate: gives host memory.
    """
    group_size = min(group_size, num_inputs)
    packed = packed_in(allocate, num_outputs, num_inputs, bits=bits, group_size=group_size)
    if num_outputs % TILE:
        packed.codes[-1].fill_(0x80 if bits == 8 else 0x88)
        packed.scales[-1].zero_()
    return packed


def quantize_rows(rows: Tensor, packed: PackedMatrix, *, first_row: int, dtype: torch.dtype | None = None) -> None:
    """Make rows `first_row` and on of a matrix from floats; all others stay as they are.

    Several threads may do so at once, if their rows are of different tiles.

    Args:
        rows: [num_rows, num_inputs] of any float type on a CPU, any strides.
        packed: of 4 or 8 bits, without zeros.
        dtype: a float type that they are rounded to before; None: they are taken as they are.

    Raises:
        ValueError: the rows do not fit.
    """
    num_rows, num_inputs = rows.shape
    if num_inputs != packed.num_inputs or not 0 <= first_row <= packed.num_outputs - num_rows:
        raise ValueError(
            f"rows has shape {tuple(rows.shape)} and first_row is {first_row}, the matrix has "
            f"{packed.num_outputs} rows of {packed.num_inputs}"
        )
    kernel = native("quantize_rows")
    dtype = dtype or rows.dtype
    is_as_read = rows.dtype == dtype and dtype in NATIVE_DTYPES and (rows.stride(1) == 1 or num_inputs == 1)
    part = num_rows if is_as_read else max(1, (1 << 20) // num_inputs)  # so that what is in between stays small
    for start in range(0, num_rows, part):
        some = rows[start : start + part].to(dtype)
        if kernel is None or packed.zeros is not None:
            quantize_rows_reference(some, packed, first_row=first_row + start)
            continue
        if not is_as_read:
            some = (some if dtype in NATIVE_DTYPES else some.float()).contiguous()
        kernel(some, first_row + start, packed.codes, packed.scales, packed.group_size)


def quantize_rows_reference(rows: Tensor, packed: PackedMatrix, *, first_row: int) -> None:
    """The specification of `quantize_rows`: what `pack(quantize(...))` has for them."""
    made = pack(quantize(rows, bits=packed.bits, group_size=packed.group_size))
    numbers = torch.arange(rows.shape[0])
    to, at = (first_row + numbers) // TILE, (first_row + numbers) % TILE
    packed.scales[to, :, at] = made.scales[numbers // TILE, :, numbers % TILE]
    outputs = 4 * packed.bits
    source = made.codes.view(-1, packed.num_inputs // QUAD, outputs, QUAD)
    target = packed.codes.view(-1, packed.num_inputs // QUAD, outputs, QUAD)
    values = source[numbers // TILE, :, numbers % TILE % outputs]
    if packed.bits == 8:
        target[to, :, at] = values
        return
    values = (values >> (numbers % TILE // outputs * 4).to(torch.uint8)[:, None, None]) & 15
    for half, shift in ((0, 0), (1, 4)):  # both are in one byte
        chosen = at // outputs == half
        places = to[chosen], slice(None), at[chosen] % outputs
        target[places] = (target[places] & (0xF0 >> shift)) | (values[chosen] << shift)
