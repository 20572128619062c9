"""Unpacks matrices of small integers from words: shared by GPTQ, AWQ and compressed-tensors."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pagoda_common.errors import ModelLoadError
from pagoda_kernels.linear.quantized_matrix import QuantizedMatrix


def unpack_bits(words: Tensor, bits: int) -> Tensor:
    """int32 [rows, columns] to codes uint8 [rows, columns * 32 / bits], the lowest bits of a row first.

    Args:
        bits: 2, 3, 4 or 8. Codes of 3 bits cross the borders of words: 32 of them take three.
    """
    as_bytes = words.contiguous().view(torch.uint8)  # a machine whose lowest byte comes first, as all that are served
    if bits == 8:
        return as_bytes
    if bits == 4:
        return torch.stack((as_bytes & 15, as_bytes >> 4), dim=-1).flatten(-2)
    if bits == 2:
        return torch.stack([as_bytes >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1).flatten(-2)
    low, middle, high = as_bytes.view(words.shape[0], -1, 3).int().unbind(-1)  # 24 bits: eight codes
    joined = low | middle << 8 | high << 16
    return torch.stack([joined >> shift & 7 for shift in range(0, 24, 3)], dim=-1).flatten(-2).to(torch.uint8)


def signed(codes: Tensor, bits: int) -> Tensor:
    """Codes uint8 to numbers int8, by subtracting half of the range."""
    return (codes ^ 128).view(torch.int8) if bits == 8 else codes.view(torch.int8) - (1 << (bits - 1))


def integer_matrix(
    numbers: Tensor, scales: Tensor, zeros: Tensor | None, *, bits: int, group_size: int
) -> QuantizedMatrix:
    """A matrix from its parts.

    Args:
        numbers: [num_outputs, num_inputs] int8.
        scales, zeros: [num_outputs, num_groups].
        group_size: 0 is all inputs.

    Raises:
        ModelLoadError: the number of groups does not fit the inputs.
    """
    group_size = group_size or numbers.shape[1]
    expected = -(-numbers.shape[1] // group_size)
    if scales.shape != (numbers.shape[0], expected) or (zeros is not None and zeros.shape != scales.shape):
        raise ModelLoadError(
            f"{scales.shape[-1]} groups of scales for {numbers.shape[1]} inputs, must be {expected} "
            f"(group_size {group_size})"
        )
    if zeros is not None and not bool(zeros.any()):
        zeros = None
    return QuantizedMatrix(
        numbers=numbers.contiguous(),
        scales=scales.float().contiguous(),
        zeros=None if zeros is None else zeros.float().contiguous(),
        bits=8 if bits == 8 else 4,
        group_size=group_size,
    )


def regroup(matrix: QuantizedMatrix, groups: Tensor | None) -> QuantizedMatrix | Tensor:
    """Apply an activation order of inputs to a matrix: the result is floats, unless it is the usual order.

    Args:
        groups: [num_inputs], the group of each input.

    Raises:
        ModelLoadError: an input belongs to no existing group.
    """
    num_inputs = matrix.numbers.shape[1]
    usual = torch.arange(num_inputs) // matrix.group_size
    if groups is None or torch.equal(groups.long(), usual):
        return matrix
    if groups.shape != (num_inputs,) or int(groups.min()) < 0 or int(groups.max()) >= matrix.scales.shape[1]:
        raise ModelLoadError(
            f"g_idx of shape {list(groups.shape)} names groups {int(groups.min())} to {int(groups.max())}: must be one "
            f"of {matrix.scales.shape[1]} groups for each of {num_inputs} inputs"
        )
    groups = groups.long()
    numbers = matrix.numbers.float()
    if matrix.zeros is not None:
        numbers = numbers - matrix.zeros[:, groups]
    return numbers * matrix.scales[:, groups]


def repeated(matrix: QuantizedMatrix, count: int) -> QuantizedMatrix:
    """The same matrix with each scale and zero point repeated `count` times, for groups that are smaller by that
    factor."""
    zeros = None if matrix.zeros is None else matrix.zeros.repeat_interleave(count, 1)
    return replace(matrix, scales=matrix.scales.repeat_interleave(count, 1), zeros=zeros)


def alike(matrices: Sequence[QuantizedMatrix]) -> list[QuantizedMatrix]:
    """Convert matrices to the most bits and the smallest groups among them; unchanged if groups cannot be divided so.

    GGUF files store queries, keys and values, which are one matrix here, with different precision.
    """
    bits = max(matrix.bits for matrix in matrices)
    group_size = math.gcd(*(matrix.group_size for matrix in matrices))
    if any(matrix.numbers.shape[1] % matrix.group_size for matrix in matrices):
        return list(matrices)
    return [
        replace(repeated(matrix, matrix.group_size // group_size), bits=bits, group_size=group_size)
        for matrix in matrices
    ]
