"""Blocks of numbers as GGUF files store them, to small integers where those are exact, else to floats. Knows tensors.

A block of the K types has 256 numbers in groups of 16 or 32, whose scales (and least values) are small integers times
one float of the block. Source: ggml's block structures (ggml-common.h), field by field.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from pagoda_kernels.linear.quantized_matrix import QuantizedMatrix


def read_blocks(kind: str, data: Tensor, num_columns: int) -> Tensor | QuantizedMatrix:
    """Rows of numbers from their bytes.

    Args:
        kind: name of the type, one of BLOCK_TYPES of pagoda_common.gguf.file.
        data: [num_rows, bytes of a row] uint8, in memory of its own.

    Returns:
        [num_rows, num_columns], floats of any type, or integers.
    """
    if kind in _FLOATS:
        return data.view(_FLOATS[kind])
    return _READERS[kind](data, num_columns)


_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _halves(field: Tensor) -> Tensor:
    """[..., 2 n] uint8 to [..., n] float32."""
    return field.contiguous().view(torch.float16).float()


def _nibbles(field: Tensor) -> Tensor:
    """[..., n] uint8 to [..., 2 n]: all lower bits, then all upper ones."""
    return torch.cat((field & 15, field >> 4), dim=-1)


def _parted(data: Tensor, *sizes: int) -> tuple[Tensor, ...]:
    """[rows, bytes] to the fields of each block, [rows, blocks, size]."""
    return torch.split(data.view(data.shape[0], -1, sum(sizes)), list(sizes), dim=-1)


def _matrix(numbers: Tensor, scales: Tensor, zeros: Tensor | None, *, bits: int, columns: int) -> QuantizedMatrix:
    """A matrix from numbers [rows, blocks, ...] int8, and scales and zeros [rows, blocks, groups of a block]."""
    rows = len(numbers)
    flat = scales.reshape(rows, -1).contiguous()
    return QuantizedMatrix(
        numbers=numbers.reshape(rows, columns).contiguous(),
        scales=flat,
        zeros=None if zeros is None else zeros.reshape(rows, -1).contiguous(),
        bits=bits,
        group_size=columns // flat.shape[1],
    )


def _with_least(codes: Tensor, scales: Tensor, least: Tensor, *, bits: int, columns: int) -> QuantizedMatrix:
    """A matrix from codes times scales plus least values, whose zero points are not integers.

    Args:
        codes: [rows, blocks, groups, numbers] uint8; with 4 bits all are below 16.
        scales, least: [rows, blocks, groups].
    """
    offset = 8 if bits == 4 else 0
    numbers = codes.to(torch.int8) - offset
    is_flat = scales == 0  # all numbers of the group are the least one
    numbers = numbers.masked_fill(is_flat[..., None], 0)
    zeros = torch.where(is_flat, -least, -least / torch.where(is_flat, 1.0, scales) - offset)
    return _matrix(numbers, torch.where(is_flat, 1.0, scales), zeros, bits=bits, columns=columns)


def _q4_0(data: Tensor, columns: int) -> QuantizedMatrix:
    scale, codes = _parted(data, 2, 16)
    return _matrix(_nibbles(codes).to(torch.int8) - 8, _halves(scale), None, bits=4, columns=columns)


def _q4_1(data: Tensor, columns: int) -> QuantizedMatrix:
    scale, least, codes = _parted(data, 2, 2, 16)
    return _with_least(_nibbles(codes)[:, :, None], _halves(scale), _halves(least), bits=4, columns=columns)


def _fifth_bits(field: Tensor) -> Tensor:
    """[..., 4] uint8 to [..., 32]: 16 of each bit."""
    return (field[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2) << 4


def _q5_0(data: Tensor, columns: int) -> QuantizedMatrix:
    scale, high, codes = _parted(data, 2, 4, 16)
    numbers = (_nibbles(codes) | _fifth_bits(high)).to(torch.int8) - 16
    return _matrix(numbers, _halves(scale), None, bits=8, columns=columns)


def _q5_1(data: Tensor, columns: int) -> QuantizedMatrix:
    scale, least, high, codes = _parted(data, 2, 2, 4, 16)
    numbers = _nibbles(codes) | _fifth_bits(high)
    return _with_least(numbers[:, :, None], _halves(scale), _halves(least), bits=8, columns=columns)


def _q8_0(data: Tensor, columns: int) -> QuantizedMatrix:
    scale, codes = _parted(data, 2, 32)
    return _matrix(codes.contiguous().view(torch.int8), _halves(scale), None, bits=8, columns=columns)


def _q2_k(data: Tensor, columns: int) -> QuantizedMatrix:
    both, codes, scale, least = _parted(data, 16, 64, 2, 2)
    numbers = _two_bits(codes).view(*codes.shape[:2], 16, 16)
    return _with_least(numbers, _halves(scale) * (both & 15), -_halves(least) * (both >> 4), bits=4, columns=columns)


def _two_bits(field: Tensor) -> Tensor:
    """[..., 64] uint8 to [..., 256]: of each half, the lowest bits of its 32 bytes, then the next ones."""
    halves = field.view(*field.shape[:-1], 2, 1, 32)
    return (halves >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None] & 3).flatten(-3)


def _q3_k(data: Tensor, columns: int) -> QuantizedMatrix:
    mask, codes, packed, scale = _parted(data, 32, 64, 12, 2)
    low = torch.cat((packed[..., :8] & 15, packed[..., :8] >> 4), dim=-1)
    high = (packed[..., None, 8:] >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None] & 3).flatten(-2)
    scales = (low | high << 4).float() - 32
    third = (mask[..., None, :] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1).flatten(-2)
    numbers = (_two_bits(codes) | third << 2).to(torch.int8) - 4
    return _matrix(numbers, _halves(scale) * scales, None, bits=4, columns=columns)


def _scales_and_least(packed: Tensor) -> tuple[Tensor, Tensor]:
    """[..., 12] uint8 to two times [..., 8], six bits each."""
    first, second, third = torch.split(packed, 4, dim=-1)
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), dim=-1)
    least = torch.cat((second & 63, third >> 4 | second >> 6 << 4), dim=-1)
    return scales, least


def _by_groups(codes: Tensor) -> Tensor:
    """[..., 128] uint8 to [..., 8, 32]: every 32 bytes are a group of lower bits, then one of upper bits."""
    return _nibbles(codes.view(*codes.shape[:-1], 4, 32)).view(*codes.shape[:-1], 8, 32)


def _q4_k(data: Tensor, columns: int) -> QuantizedMatrix:
    scale, least, packed, codes = _parted(data, 2, 2, 12, 128)
    scales, minima = _scales_and_least(packed)
    return _with_least(_by_groups(codes), _halves(scale) * scales, -_halves(least) * minima, bits=4, columns=columns)


def _q5_k(data: Tensor, columns: int) -> QuantizedMatrix:
    scale, least, packed, high, codes = _parted(data, 2, 2, 12, 32, 128)
    scales, minima = _scales_and_least(packed)
    fifth = (high[..., None, :] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1) << 4
    return _with_least(
        _by_groups(codes) | fifth, _halves(scale) * scales, -_halves(least) * minima, bits=8, columns=columns
    )


def _q6_k(data: Tensor, columns: int) -> QuantizedMatrix:
    low, high, scales, scale = _parted(data, 128, 64, 16, 2)
    codes = _nibbles(low.view(*low.shape[:-1], 2, 64)).flatten(-2) | _two_bits(high) << 4
    factors = _halves(scale) * scales.contiguous().view(torch.int8)
    return _matrix(codes.to(torch.int8) - 32, factors, None, bits=8, columns=columns)


_READERS: dict[str, Callable[[Tensor, int], QuantizedMatrix]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
