"""Linear layers on a CPU with bfloat16 weights in 12 bits each, to the bit the same.

A step of few tokens takes as long as its weights take from memory. Exponents in a matrix are much alike: 16 neighbours
hold all but one number in thousands, so that 4 bits take the place of 8 (the idea of DFloat11, Zhang et al. 2025,
with codes of one length, for vector instructions). Some numbers are multiplied while the next ones are decompressed.
"""

import threading

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda_kernels.linear.packed_linear import (
    PANEL,
    check_addends,
    check_ids,
    dense,
    dense_rows,
    packed_linear_reference,
    unpack_weight,
)
from pagoda_kernels.native.library import native

UNIT_PAIRS = 16
"""Pairs of columns that, for a panel of rows, are compressed together: 1,024 numbers."""
NUMBERS_OF_OUTLIER = 256
"""For so many numbers there is room for one without a code: what reading saves, more would take."""
_UNIT_BYTES = 1536
_GROUPS = 8
_EXPONENT_SHIFT = 24
_scratch = threading.local()


def compressed_bytes(out_features: int, in_features: int) -> int:
    """Size of a compressed matrix: 12.1 bits per number if its sides are multiples of 32."""
    return _outliers_at(out_features, in_features) + out_features * in_features // NUMBERS_OF_OUTLIER * 4


def compress_weight(weight: Tensor) -> Tensor | None:
    """The layout of `compressed_linear`.

    Args:
        weight: [out_features, in_features]; on the meta device too.

    Returns:
        [compressed_bytes] uint8: codes of units, a word for each, and the numbers that have no code, as
        csrc/linear/compressed_weight.h says. None: there is no kernel for such a matrix, or too many numbers have no
        code.
    """
    out_features, in_features = weight.shape
    out = torch.empty(compressed_bytes(out_features, in_features), dtype=torch.uint8, device=weight.device)
    if weight.is_meta:
        return out
    kernel = native("compress_weight") if weight.is_cpu and weight.dtype == torch.bfloat16 else None
    if kernel is None or in_features % 2 or not kernel(weight.contiguous(), out):
        return None
    return out


def can_compress(in_features: int) -> bool:
    """Whether there is a kernel for bfloat16 matrices with so many columns, on this CPU."""
    return in_features % 2 == 0 and native("compress_weight") is not None


class CompressedRows:
    """A matrix that is compressed some rows at a time, by any threads: before, it is never in memory as a whole."""

    def __init__(self, out: Tensor, out_features: int, in_features: int) -> None:
        """
        Args:
            out: [compressed_bytes] uint8; has the matrix once `finish` returns True.
        """
        self._out_features = out_features
        self._in_features = in_features
        self._units_of_panel = -(-in_features // (2 * UNIT_PAIRS))
        num_units = -(-out_features // PANEL) * self._units_of_panel
        self._codes, self._words, self._outliers = _split(out, num_units)
        self._parts: dict[int, tuple[int, Tensor]] = {}
        """By first row: how many units, and the numbers among them that have no code."""
        self._has_too_many = False

    def add(self, rows: Tensor, first_row: int) -> None:
        """Compress some rows, each once. Nothing if too many numbers had no code before.

        Args:
            rows: [num_rows, in_features] bfloat16; num_rows is a multiple of 32 unless they are the last ones.
            first_row: a multiple of 32.

        Raises:
            ValueError: the rows do not fit.
        """
        num_rows, end = rows.shape[0], first_row + rows.shape[0]
        is_whole = first_row % PANEL == 0 and (num_rows % PANEL == 0 or end == self._out_features)
        if rows.shape[1] != self._in_features or not is_whole or not 0 <= first_row <= end <= self._out_features:
            raise ValueError(
                f"rows has shape {tuple(rows.shape)} and first_row is {first_row}: must be whole panels of {PANEL} "
                f"rows of a matrix of {self._out_features} rows of {self._in_features}"
            )
        if self._has_too_many or not num_rows:
            return
        num_units = -(-num_rows // PANEL) * self._units_of_panel
        out = _space(num_units, min(self._outliers.numel(), rows.numel()))
        kernel = native("compress_weight")
        assert kernel is not None, "can_compress is true"
        if not kernel(rows.contiguous(), out):
            self._has_too_many = True
            return
        codes, words, outliers = _split(out, num_units)
        first = first_row // PANEL * self._units_of_panel
        self._codes[first * _UNIT_BYTES : (first + num_units) * _UNIT_BYTES] = codes
        self._words[first : first + num_units] = words[:-1]
        self._parts[first] = num_units, outliers[: int(words[-1])].clone()

    def finish(self) -> bool:
        """Join what was added, which is all rows. False: too many numbers have no code."""
        if self._has_too_many or sum(part.numel() for _, part in self._parts.values()) > self._outliers.numel():
            return False
        num_outliers = 0
        for first, (num_units, outliers) in sorted(self._parts.items()):
            if num_outliers:
                self._words[first : first + num_units] += num_outliers
            if outliers.numel():
                self._outliers[num_outliers : num_outliers + outliers.numel()] = outliers
                num_outliers += outliers.numel()
        self._words[-1] = num_outliers
        return True


def decompress_weight(compressed: Tensor, out_features: int, in_features: int) -> Tensor:
    """The end of `compress_weight`, and the specification of its layout.

    Returns:
        [ceil(out_features / 32), in_features / 2, 32, 2] bfloat16, as `pack_weight` gives it.
    """
    panels, units = -(-out_features // PANEL), -(-in_features // (2 * UNIT_PAIRS))
    code_bytes, outliers_at = panels * units * _UNIT_BYTES, _outliers_at(out_features, in_features)
    words = compressed[code_bytes:outliers_at].view(torch.int32).long() & 0xFFFFFFFF
    outliers = compressed[outliers_at:].view(torch.int32).long() & 0xFFFFFFFF

    streams = compressed[:code_bytes].view(torch.int16).int().view(panels, 3, units, _GROUPS, PANEL) & 0xFFFF
    free = streams >> 11 & 15
    last = free[:, 0] << 7 | free[:, 1] << 3 | (free[:, 2] & 1) << 15 | free[:, 2] >> 1
    codes = torch.stack([*(streams & 0x87FF).unbind(1), last], dim=3)  # [panels, units, groups, lines, 32]
    numbers = codes + ((words[:-1] >> _EXPONENT_SHIFT).int() << 7).view(panels, units, 1, 1, 1)

    first = words & ((1 << _EXPONENT_SHIFT) - 1)
    unit_of = torch.repeat_interleave(torch.arange(panels * units), first[1:] - first[:-1])
    flat = numbers.reshape(-1)
    outliers = outliers[: len(unit_of)]
    flat[unit_of * UNIT_PAIRS * 2 * PANEL + (outliers >> 16)] = (outliers & 0xFFFF).int()
    signed = torch.where(flat >= 1 << 15, flat - (1 << 16), flat).to(torch.int16)
    pairs = (in_features + 1) // 2
    lines = signed.view(panels, units * UNIT_PAIRS, PANEL, 2)[:, :pairs].contiguous().view(torch.bfloat16)
    lines[-1, :, out_features - PANEL * (panels - 1) :] = 0  # after the last row
    return lines


def compressed_linear(
    x: Tensor,
    compressed: Tensor,
    out_features: int,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`packed_linear`, to the bit, of a compressed matrix.

    Args:
        x: [num_tokens, in_features] bfloat16, in_features even.
        compressed: as `compress_weight` gives it.
        bias, residual, out_dtype: as for `packed_linear`.

    Returns:
        [num_tokens, out_features].

    Raises:
        ValueError: a shape or type is another one.
    """
    _check(x, compressed, out_features, bias, residual)
    kernel = native("compressed_linear") if x.is_cpu else None
    if kernel is None or x.dtype != torch.bfloat16:
        packed = decompress_weight(compressed, out_features, x.shape[1])
        return packed_linear_reference(x, packed, out_features, bias=bias, residual=residual, out_dtype=out_dtype)
    out = torch.empty(x.shape[0], out_features, dtype=out_dtype or x.dtype)
    kernel(dense_rows(x), compressed, dense(bias), None if residual is None else dense_rows(residual), out)
    return out


def compressed_embedding(ids: Tensor, compressed: Tensor, out_features: int, in_features: int) -> Tensor:
    """Rows of a compressed matrix.

    Args:
        ids: [num_tokens] int64, below out_features.
        compressed: as `compress_weight` gives it.

    Returns:
        [num_tokens, in_features] bfloat16.

    Raises:
        IndexError: there is no such row.
    """
    check_ids(ids, out_features)
    kernel = native("compressed_embedding")
    if kernel is None:
        packed = decompress_weight(compressed, out_features, in_features)
        return F.embedding(ids, unpack_weight(packed, out_features, in_features))
    out = torch.empty(ids.numel(), in_features, dtype=torch.bfloat16)
    kernel(ids.contiguous(), compressed, out_features, out)
    return out


def _space(num_units: int, num_outliers: int) -> Tensor:
    """Memory of this thread for compressed rows, which stays in its cache."""
    num_bytes = num_units * _UNIT_BYTES + (num_units + 1 + num_outliers) * 4
    space: Tensor | None = getattr(_scratch, "space", None)
    if space is None or space.numel() < num_bytes:
        space = _scratch.space = torch.empty(num_bytes, dtype=torch.uint8)
    return space[:num_bytes]


def _split(compressed: Tensor, num_units: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, words and outliers of a compressed matrix."""
    code_bytes = num_units * _UNIT_BYTES
    outliers_at = code_bytes + (num_units + 1) * 4
    words, outliers = compressed[code_bytes:outliers_at], compressed[outliers_at:]
    return compressed[:code_bytes], words.view(torch.int32), outliers.view(torch.int32)


def _outliers_at(out_features: int, in_features: int) -> int:
    units = -(-out_features // PANEL) * -(-in_features // (2 * UNIT_PAIRS))
    return units * _UNIT_BYTES + (units + 1) * 4


def _check(x: Tensor, compressed: Tensor, out_features: int, bias: Tensor | None, residual: Tensor | None) -> None:
    if x.dim() != 2 or x.shape[1] % 2:
        raise ValueError(f"x has shape {tuple(x.shape)}, must be [num_tokens, in_features], in_features even")
    num_bytes = compressed_bytes(out_features, x.shape[1])
    if compressed.dtype != torch.uint8 or compressed.shape != (num_bytes,):
        raise ValueError(
            f"compressed is {compressed.dtype} of shape {tuple(compressed.shape)}, must be {num_bytes} bytes for "
            f"{out_features} out_features and {x.shape[1]} in_features"
        )
    check_addends(x, out_features, bias, residual)
