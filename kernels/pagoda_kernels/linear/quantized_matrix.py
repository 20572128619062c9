"""Matrices of small integers with a scale for each group of inputs: from floats, packed for the kernels, and back."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

TILE = 32
"""Output features of a packed tile."""
QUAD = 4
"""Inputs that are together in a tile."""
SHARES = (1.0, 0.93, 0.86)
"""Fractions of a group's largest value to which the end of four bits may map; the one with the least squared error is
used. Clipping the largest value makes the steps of all others smaller."""

Allocate: TypeAlias = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Gives a tensor of a shape and a data type, of any content."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedMatrix:
    """Element [n, k] is scales[n, g] * (numbers[n, k] - zeros[n, g]) with g = k // group_size."""

    numbers: Tensor
    """[num_outputs, num_inputs] int8, of `bits` bits: -8..7 or -128..127."""
    scales: Tensor
    """[num_outputs, num_groups] float32; may be negative."""
    zeros: Tensor | None
    """[num_outputs, num_groups] float32, whole; None is 0 everywhere."""
    bits: int
    """4 or 8."""
    group_size: int
    """Inputs that share a scale; the last group may be smaller."""

    def dequantize(self) -> Tensor:
        """[num_outputs, num_inputs] float32."""
        groups = torch.arange(self.numbers.shape[1], device=self.numbers.device) // self.group_size
        numbers = self.numbers.float()
        if self.zeros is not None:
            numbers = numbers - self.zeros[:, groups]
        return numbers * self.scales[:, groups]


class PackedMatrix(NamedTuple):
    """The same in the order in which the kernels read it: tiles of 32 outputs, zeros after the last output."""

    codes: Tensor
    """[num_tiles, num_inputs / 4, 16 * bits] uint8: four inputs of the tile's outputs, see quantized_codes.h."""
    scales: Tensor
    """[num_tiles, num_groups, 32] float32."""
    zeros: Tensor | None
    """The same, or None."""
    bits: int
    group_size: int
    num_outputs: int
    num_inputs: int
    quantizes_inputs: bool = False
    """Whether bfloat16 that is multiplied with it is taken to int8 before, see `quantize_inputs`."""


def quantize(weight: Tensor, *, bits: int, group_size: int) -> QuantizedMatrix:
    """The nearest integers, with scales that have the end of their range at a group's largest value, or just below.

    Args:
        weight: [num_outputs, num_inputs], any float type.
        group_size: at least num_inputs is one scale for each output.
    """
    num_outputs, num_inputs = weight.shape
    group_size = min(group_size, num_inputs)
    num_groups = -(-num_inputs // group_size)
    numbers = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(num_outputs, num_groups, device=weight.device)
    rows = max(1, (1 << 20) // num_inputs)
    for start in range(0, num_outputs, rows):  # so that what is in between stays small
        part = weight[start : start + rows].float()
        grouped = torch.nn.functional.pad(part, (0, num_groups * group_size - num_inputs))
        grouped = grouped.view(part.shape[0], num_groups, group_size)
        scale = _scales(grouped, bits)
        least, most = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
        rounded = (grouped * (1.0 / scale).unsqueeze(-1)).round_().clamp_(least, most)
        numbers[start : start + rows] = rounded.flatten(1)[:, :num_inputs]
        scales[start : start + rows] = scale
    return QuantizedMatrix(numbers=numbers, scales=scales, zeros=None, bits=bits, group_size=group_size)


def _scales(grouped: Tensor, bits: int) -> Tensor:
    """[..., group_size] to [...]; 1 where all is zero."""
    least, most = grouped.amin(-1), grouped.amax(-1)
    # Of four bits, the negative end is one further from 0: it belongs to the largest value, whatever its sign.
    scale = torch.maximum(-least, most) / 127 if bits == 8 else torch.where(-least >= most, least, most) / -8
    scale = torch.where(scale == 0, 1.0, scale)
    if bits == 8:
        return scale
    best, fewest = scale, torch.full_like(scale, torch.inf, dtype=torch.float64)
    for share in SHARES:
        tried = (scale * share).unsqueeze(-1)
        nearest = (grouped / tried).round_().clamp_(-8, 7).double()
        # Each is rounded once, so that every order of the sum chooses the same share.
        errors = nearest.mul_(tried).sub_(grouped).float().square_().sum(-1, dtype=torch.float64)
        is_better = errors < fewest
        best, fewest = torch.where(is_better, tried.squeeze(-1), best), torch.where(is_better, errors, fewest)
    return best


def pack(matrix: QuantizedMatrix, *, quantizes_inputs: bool = False) -> PackedMatrix:
    """For `quantized_linear`.

    Raises:
        ValueError: the number of inputs or a group's is no multiple of 4.
    """
    num_outputs, num_inputs = matrix.numbers.shape
    if not can_pack(num_inputs, matrix.group_size):
        raise ValueError(f"{num_inputs} inputs in groups of {matrix.group_size}: both must be multiples of {QUAD}")
    num_tiles = -(-num_outputs // TILE)
    padding = num_tiles * TILE - num_outputs
    numbers = torch.nn.functional.pad(matrix.numbers, (0, 0, 0, padding))
    offset = 1 << (matrix.bits - 1)
    codes = (numbers.to(torch.int16) + offset).to(torch.uint8).view(num_tiles, TILE, num_inputs // QUAD, QUAD)
    if matrix.bits == 4:
        codes = codes[:, :16] | codes[:, 16:] << 4
    return PackedMatrix(
        codes=codes.transpose(1, 2).reshape(num_tiles, num_inputs // QUAD, 16 * matrix.bits),
        scales=_tiled(matrix.scales, padding),
        zeros=None if matrix.zeros is None else _tiled(matrix.zeros, padding),
        bits=matrix.bits,
        group_size=matrix.group_size,
        num_outputs=num_outputs,
        num_inputs=num_inputs,
        quantizes_inputs=quantizes_inputs,
    )


def can_pack(num_inputs: int, group_size: int) -> bool:
    """Whether groups like these can be a PackedMatrix."""
    return num_inputs % QUAD == 0 and (group_size % QUAD == 0 or group_size >= num_inputs)


def empty_packed(
    num_outputs: int, num_inputs: int, *, bits: int, group_size: int, device: torch.device | str
) -> PackedMatrix:
    """Memory for a matrix without zeros."""
    allocate = functools.partial(new_tensor, device=device)
    return packed_in(allocate, num_outputs, num_inputs, bits=bits, group_size=group_size)


def new_tensor(shape: tuple[int, ...], dtype: torch.dtype, *, device: torch.device | str = "cpu") -> Tensor:
    """Memory from torch, as Allocate."""
    return torch.empty(shape, dtype=dtype, device=device)


def packed_in(allocate: Allocate, num_outputs: int, num_inputs: int, *, bits: int, group_size: int) -> PackedMatrix:
    """A matrix without zeros, in memory of choice."""
    num_tiles, num_groups = -(-num_outputs // TILE), -(-num_inputs // group_size)
    return PackedMatrix(
        codes=allocate((num_tiles, num_inputs // QUAD, 16 * bits), torch.uint8),
        scales=allocate((num_tiles, num_groups, TILE), torch.float32),
        zeros=None,
        bits=bits,
        group_size=group_size,
        num_outputs=num_outputs,
        num_inputs=num_inputs,
    )


def unpack_rows(packed: PackedMatrix, ids: Tensor) -> Tensor:
    """Rows of the matrix by number: [n] int64 to [n, num_inputs] float32."""
    tiles, within = ids // TILE, ids % TILE
    outputs = TILE if packed.bits == 8 else TILE // 2
    words = packed.codes.view(-1, packed.num_inputs // QUAD, outputs, QUAD)
    numbers = words[tiles, :, within % outputs].flatten(1)
    if packed.bits == 4:
        numbers = (numbers >> (4 * (within // outputs))[:, None]) & 15
    numbers = numbers.float() - (1 << (packed.bits - 1))
    groups = torch.arange(packed.num_inputs, device=ids.device) // packed.group_size
    if packed.zeros is not None:
        numbers = numbers - packed.zeros[tiles, :, within][:, groups]
    return numbers * packed.scales[tiles, :, within][:, groups]


def unpack(packed: PackedMatrix) -> QuantizedMatrix:
    """The inverse of `pack`."""
    codes = packed.codes.view(-1, packed.num_inputs // QUAD, 4 * packed.bits, QUAD)
    if packed.bits == 4:
        codes = torch.cat((codes & 15, codes >> 4), dim=2)
    numbers = codes.transpose(1, 2).reshape(-1, packed.num_inputs).to(torch.int16) - (1 << (packed.bits - 1))
    return QuantizedMatrix(
        numbers=numbers[: packed.num_outputs].to(torch.int8),
        scales=_untiled(packed.scales, packed.num_outputs),
        zeros=None if packed.zeros is None else _untiled(packed.zeros, packed.num_outputs),
        bits=packed.bits,
        group_size=packed.group_size,
    )


def _tiled(values: Tensor, padding: int) -> Tensor:
    """[num_outputs, num_groups] to [num_tiles, num_groups, 32]."""
    padded = torch.nn.functional.pad(values, (0, 0, 0, padding))
    return padded.view(-1, TILE, values.shape[1]).transpose(1, 2).contiguous()


def _untiled(values: Tensor, num_outputs: int) -> Tensor:
    return values.transpose(1, 2).reshape(-1, values.shape[1])[:num_outputs]
