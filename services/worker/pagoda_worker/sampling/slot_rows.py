"""SlotRows: assigns rows of a device tensor to slots when first needed. No tensors."""

import numpy as np
import numpy.typing as npt

from pagoda_worker.steps.step import IntArray


class SlotRows:
    """Rows for slots that need one; a row is reused once its slot holds another sequence."""

    def __init__(self, generations: npt.NDArray[np.int64]) -> None:
        """`generations`: [slots], changes with every sequence that enters or leaves a slot; only read here."""
        self._generations = generations
        self._row_of: IntArray = np.full(generations.size, -1, dtype=np.int64)
        self._slot_of: IntArray = np.zeros(0, dtype=np.int64)
        self._generation_of: IntArray = np.zeros(0, dtype=np.int64)
        """[rows] generation of the sequence that each row was taken for."""

    @property
    def size(self) -> int:
        """Number of rows that a tensor needs."""
        return self._slot_of.size

    def take(self, slots: IntArray) -> tuple[IntArray, npt.NDArray[np.bool_]]:
        """[n] the rows of `slots`, and [n] whether each is new, with meaningless content.

        Args:
            slots: [n], without duplicates.
        """
        rows = self._row_of[slots]
        is_new = rows < 0
        known = np.flatnonzero(~is_new)
        is_taken = self._slot_of[rows[known]] != slots[known]  # another slot has it meanwhile
        is_new[known] = is_taken | (self._generation_of[rows[known]] != self._generations[slots[known]])
        if is_new.any():
            rows[is_new] = self._free_rows(int(is_new.sum()))
            new_slots = slots[is_new]
            self._row_of[new_slots] = rows[is_new]
            self._slot_of[rows[is_new]] = new_slots
            self._generation_of[rows[is_new]] = self._generations[new_slots]
        return rows, is_new

    def _free_rows(self, count: int) -> IntArray:
        free = np.flatnonzero(self._generations[self._slot_of] != self._generation_of)[:count]
        if free.size < count:
            size = max(self.size + count - free.size, min(2 * self.size, self._generations.size))
            free = np.concatenate((free, np.arange(self.size, size)))[:count]
            added = np.zeros(size - self.size, dtype=np.int64)
            self._slot_of = np.concatenate((self._slot_of, added))
            self._generation_of = np.concatenate((self._generation_of, added - 1))
        return free
