"""StatePool: states of recurrent layers, of each slot's sequence, and snapshots. Knows no requests."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pagoda_kernels.recurrent.batch import RecurrentBatch
from pagoda_worker.memory.transfers import to_device
from pagoda_worker.models.model import RecurrentLayer
from pagoda_worker.steps.step import IntArray


def state_bytes(layers: Sequence[RecurrentLayer], dtype: torch.dtype) -> int:
    """Bytes of one sequence's states, over all layers."""
    return sum(tensor.num_bytes(dtype) for layer in layers for tensor in layer.tensors)


class StatePool:
    """Rows of states, with the same layout for all layers: one for each slot, then the snapshots, then those after
    draft tokens.

    A slot's state is that after all tokens its sequence has computed. `settle` undoes the effect of wrong draft tokens.
    """

    def __init__(
        self,
        *,
        layers: Sequence[RecurrentLayer],
        num_slots: int,
        num_snapshots: int,
        num_cpu_snapshots: int = 0,
        num_draft_tokens: int = 0,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """
        Args:
            num_draft_tokens: maximum per sequence and step.
            dtype: default data type of tensors.
        """
        self.num_slots = num_slots
        self.num_snapshots = num_snapshots
        self.num_cpu_snapshots = num_cpu_snapshots
        self._num_draft_tokens = num_draft_tokens
        self._device = device
        num_rows = num_slots * (1 + num_draft_tokens) + num_snapshots

        def zeros(count: int, device: torch.device) -> list[tuple[Tensor, ...]]:
            return [
                tuple(
                    torch.zeros((count, *one.shape), dtype=one.dtype or dtype, device=device) for one in layer.tensors
                )
                for layer in layers
            ]

        self.tensors = zeros(num_rows, device)
        """Tensors of each layer, [num_rows, …] each."""
        self._host = zeros(num_cpu_snapshots, torch.device("cpu"))

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return sum(tensor.nbytes for layer in self.tensors for tensor in layer)

    def begin(self, slots: IntArray) -> None:
        """Clear slots, which sequences without computed tokens enter."""
        if slots.size:
            rows = to_device(_below(slots, self.num_slots, "slot"), self._device)
            for tensor in self._all(self.tensors):
                tensor.index_fill_(0, rows, 0)

    def load(self, pairs: IntArray) -> None:
        """Load snapshots into slots; pairs [n, 2] (snapshot, slot)."""
        if pairs.size:
            snapshots, slots = self._snapshots(pairs[:, 0]), _below(pairs[:, 1], self.num_slots, "slot")
            self._copy(self.tensors, self.tensors, snapshots, slots)

    def save(self, pairs: IntArray) -> None:
        """Save the states of slots; pairs [n, 2] (slot, snapshot)."""
        if pairs.size:
            slots, snapshots = _below(pairs[:, 0], self.num_slots, "slot"), self._snapshots(pairs[:, 1])
            self._copy(self.tensors, self.tensors, slots, snapshots)

    def swap_out(self, pairs: IntArray) -> None:
        """Copy snapshots to the host; pairs [n, 2] (snapshot, host snapshot)."""
        if pairs.size:
            host = _below(pairs[:, 1], self.num_cpu_snapshots, "host snapshot")
            self._copy(self.tensors, self._host, self._snapshots(pairs[:, 0]), host)

    def swap_in(self, pairs: IntArray) -> None:
        """Copy snapshots from the host; pairs [n, 2] (host snapshot, snapshot)."""
        if pairs.size:
            host = _below(pairs[:, 0], self.num_cpu_snapshots, "host snapshot")
            self._copy(self._host, self.tensors, host, self._snapshots(pairs[:, 1]))

    def batch(self, slots: IntArray, query_lens: IntArray, num_draft_tokens: IntArray) -> RecurrentBatch:
        """The batch of a step for recurrent layers; [n] each, drafts are at the end of the tokens."""
        kept = None
        if num_draft_tokens.any():
            kept = np.full(int(query_lens.sum()), -1, dtype=np.int64)
            ends = np.cumsum(query_lens)
            for slot, end, count in zip(slots.tolist(), ends.tolist(), num_draft_tokens.tolist(), strict=True):
                # After the last known token, and after each token of the draft but the last.
                kept[end - 1 - count : end - 1] = self._draft_row(slot) + np.arange(count)
        return RecurrentBatch(query_lens=query_lens, rows=slots, device=self._device, kept_rows=kept)

    def settle(self, slots: IntArray, num_draft_tokens: IntArray, num_right: IntArray) -> None:
        """Restore the state before the first wrong draft token; [n] each, after the step that tried them."""
        wrong = num_right < num_draft_tokens
        if wrong.any():
            rows = np.array([self._draft_row(slot) for slot in slots[wrong].tolist()]) + num_right[wrong]
            self._copy(self.tensors, self.tensors, rows, slots[wrong])

    def _draft_row(self, slot: int) -> int:
        return self.num_slots + self.num_snapshots + slot * self._num_draft_tokens

    def _snapshots(self, ids: IntArray) -> IntArray:
        return self.num_slots + _below(ids, self.num_snapshots, "snapshot")

    @staticmethod
    def _all(layers: list[tuple[Tensor, ...]]) -> list[Tensor]:
        return [tensor for layer in layers for tensor in layer]

    def _copy(
        self,
        source: list[tuple[Tensor, ...]],
        target: list[tuple[Tensor, ...]],
        from_rows: IntArray,
        to_rows: IntArray,
    ) -> None:
        for one, other in zip(self._all(source), self._all(target), strict=True):
            rows = one.index_select(0, to_device(np.ascontiguousarray(from_rows), one.device))
            other.index_copy_(0, to_device(np.ascontiguousarray(to_rows), other.device), rows.to(other.device))


def _below(ids: IntArray, bound: int, name: str) -> IntArray:
    highest = int(ids.max(initial=-1))
    if highest >= bound:
        raise ValueError(f"{name} {highest} is not below {bound}")
    return ids
