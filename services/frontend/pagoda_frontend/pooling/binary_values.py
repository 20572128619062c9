"""Values as bytes: the data types and byte orders of vLLM's embed_dtype and endianness. Knows only arrays."""

import functools
import sys
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

EmbedDtype: TypeAlias = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
Endianness: TypeAlias = Literal["native", "big", "little"]
_FP8 = {"fp8_e4m3": (4, 3, 0x7E), "fp8_e5m2": (5, 2, 0x7B)}
"""By data type: bits of exponent and mantissa, and the code of the largest number."""


def to_bytes(values: npt.ArrayLike, dtype: EmbedDtype | None = None, endianness: Endianness | None = None) -> bytes:
    """Values one after the other, rounded to nearest, ties to even.

    Args:
        dtype: None is float32; fp8 clips values to its largest number.
        endianness: None is little.
    """
    given = np.ascontiguousarray(values, dtype=np.float32)
    is_big = endianness == "big" or (endianness == "native" and sys.byteorder == "big")
    written: npt.NDArray[Any]
    if dtype in _FP8:
        return _fp8(given, *_FP8[dtype]).tobytes()
    if dtype == "bfloat16":
        bits = given.view(np.uint32)
        written = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    else:
        written = given.astype(np.float16 if dtype == "float16" else np.float32)
    return written.astype(written.dtype.newbyteorder(">" if is_big else "<")).tobytes()


def _fp8(values: npt.NDArray[np.float32], num_exponent: int, num_mantissa: int, largest: int) -> npt.NDArray[np.uint8]:
    numbers = _fp8_numbers(num_exponent, num_mantissa, largest)
    middles = (numbers[1:] + numbers[:-1]) / 2
    sizes = np.minimum(np.abs(values), numbers[-1])
    codes = np.searchsorted(middles, sizes, side="left")
    is_tie = middles[np.minimum(codes, len(middles) - 1)] == sizes
    codes += is_tie & (codes % 2 == 1)
    signs = np.where(np.signbit(values), 128, 0)
    return np.asarray(codes + signs, dtype=np.uint8)


@functools.cache
def _fp8_numbers(num_exponent: int, num_mantissa: int, largest: int) -> npt.NDArray[np.float32]:
    """Values of the codes from 0 to `largest`."""
    codes = np.arange(largest + 1)
    exponents, fractions = codes >> num_mantissa, (codes & ((1 << num_mantissa) - 1)) / (1 << num_mantissa)
    bias = (1 << (num_exponent - 1)) - 1
    sizes = np.where(exponents == 0, fractions * 2.0 ** (1 - bias), (1 + fractions) * 2.0 ** (exponents - bias))
    return sizes.astype(np.float32)
