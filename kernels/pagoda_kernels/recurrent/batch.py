"""RecurrentBatch: the sequences of a packed batch, and where their states are."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(slots=True)
class RecurrentBatch:
    """Sequences one after the other, each with a row of the states, which it finds and leaves there."""

    query_lens: npt.NDArray[np.int64]
    """[num_seqs] tokens of each, at least 1."""
    rows: npt.NDArray[np.int64]
    """[num_seqs] different rows of the states."""
    device: torch.device
    kept_rows: npt.NDArray[np.int64] | None = None
    """[num_tokens] further rows, where the state after each token goes as well; -1: nowhere. None: nowhere for all."""
    _columns: tuple[Tensor, Tensor, Tensor | None] | None = field(default=None, init=False)

    def columns(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """query_start_loc [num_seqs + 1], rows and kept_rows, int64 on the device."""
        if self._columns is None:
            starts = np.zeros(self.query_lens.size + 1, dtype=np.int64)
            np.cumsum(self.query_lens, out=starts[1:])
            kept = None if self.kept_rows is None else self._on_device(self.kept_rows)
            self._columns = self._on_device(starts), self._on_device(self.rows), kept
        return self._columns

    def _on_device(self, array: npt.NDArray[np.int64]) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)
