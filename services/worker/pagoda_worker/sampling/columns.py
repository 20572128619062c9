"""Growing arrays: slot-indexed columns, and padded slot-indexed lists of different lengths."""

from typing import Any

import numpy as np
import numpy.typing as npt


def grown(array: npt.NDArray[Any], shape: tuple[int, ...], *, fill: Any = 0) -> npt.NDArray[Any]:
    """`array` itself if it has `shape` already, else a larger copy (each dimension at least doubled)."""
    if all(have >= want for have, want in zip(array.shape, shape, strict=True)):
        return array
    larger = tuple(have if have >= want else max(want, 2 * have) for have, want in zip(array.shape, shape, strict=True))
    result = np.full(larger, fill, dtype=array.dtype) if fill else np.zeros(larger, dtype=array.dtype)
    result[tuple(slice(size) for size in array.shape)] = array
    return result


class RaggedColumn:
    """One list per slot, rows padded with `fill`; memory is allocated with the first list."""

    def __init__(self, *, dtype: Any, fill: int = 0) -> None:
        self._fill = fill
        self.values: npt.NDArray[Any] = np.zeros((0, 0), dtype=dtype)
        """[slots, longest list so far]."""
        self.lengths: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        """[slots]."""

    def set(self, slot: int, values: npt.NDArray[Any]) -> None:
        """Replace a slot's list."""
        if values.size == 0 and slot >= self.lengths.size:
            return
        self.lengths = grown(self.lengths, (slot + 1,))
        self.values = grown(self.values, (slot + 1, max(values.size, 1)), fill=self._fill)
        self.values[slot] = self._fill
        self.values[slot, : values.size] = values
        self.lengths[slot] = values.size

    def lengths_of(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """[n] lengths; 0 for slots that never had a list."""
        result = np.zeros(slots.size, dtype=np.int64)
        known = slots < self.lengths.size
        result[known] = self.lengths[slots[known]]
        return result
