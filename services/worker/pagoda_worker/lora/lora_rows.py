"""LoraRows: which rows of the step that runs have which adapter. Every layer asks it; knows no slots."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from pagoda_kernels.lora.add_lora import LoraGroup, add_lora, embed_lora_reference
from pagoda_worker.lora.adapter import Adapter

IntArray = npt.NDArray[np.int64]
NO_ADAPTER = -1


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The rows of one adapter."""

    adapter: Adapter
    rows: Tensor
    """[n] int64 on the device, ascending."""


class LoraRows:
    """One for all layers of a model. One caller at a time: the thread that computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._adapters: Sequence[Adapter] = ()
        self._numbers: IntArray = np.zeros(0, dtype=np.int64)
        """[num_tokens] place of each row's adapter in `_adapters`, or NO_ADAPTER."""
        self.groups: tuple[AdapterRows, ...] = ()
        """Of the rows that layers see now; empty: none has an adapter."""

    def begin(self, adapters: Sequence[Adapter | None], num_tokens: IntArray) -> None:
        """A step of sequences, in order.

        Args:
            adapters: [num_seqs], of each sequence; empty: none has one.
            num_tokens: [num_seqs] rows of each.
        """
        self._adapters = list(dict.fromkeys(adapter for adapter in adapters if adapter is not None))
        if not self._adapters:
            self.groups = ()
            return
        places = {adapter: place for place, adapter in enumerate(self._adapters)}
        numbers = [NO_ADAPTER if adapter is None else places[adapter] for adapter in adapters]
        self._see(np.repeat(np.array(numbers, dtype=np.int64), num_tokens))

    def _see(self, numbers: IntArray) -> None:
        self._numbers = numbers
        groups = []
        for place, adapter in enumerate(self._adapters):
            rows = np.flatnonzero(numbers == place)
            if rows.size:
                groups.append(AdapterRows(adapter, torch.from_numpy(rows).to(self._device)))
        self.groups = tuple(groups)

    @contextmanager
    def selected(self, rows: IntArray) -> Iterator[None]:
        """Within: layers see no more than some rows of those that they see now, in this order."""
        groups, numbers = self.groups, self._numbers
        if groups:
            self._see(numbers[rows])
        try:
            yield
        finally:
            self.groups, self._numbers = groups, numbers

    def rows_within(self, module: str) -> IntArray:
        """[n] the rows whose adapter changes some layer in `module`."""
        places = [place for place, adapter in enumerate(self._adapters) if module in adapter.owners]
        return np.flatnonzero(np.isin(self._numbers, places)) if self.groups and places else _NO_ROWS

    def add(self, layer: str, x: Tensor, out: Tensor) -> Tensor:
        """`out` with what the adapters add to the product of a layer, in place.

        Args:
            x: [num_rows, in_features].
            out: [num_rows, out_features].
        """
        if groups := self._groups_of(layer):
            add_lora(x, out, groups)
        return out

    def embed(self, layer: str, ids: Tensor, out: Tensor) -> Tensor:
        """The same for rows of a table: [num_rows] int64, and `out` [num_rows, dim]."""
        if groups := self._groups_of(layer):
            embed_lora_reference(ids, out, groups)
        return out

    def _groups_of(self, layer: str) -> list[LoraGroup]:
        return [
            LoraGroup(rows=group.rows, parts=parts)
            for group in self.groups
            if (parts := group.adapter.layers.get(layer)) is not None
        ]


def attach(model: nn.Module, rows: LoraRows) -> None:
    """Have every layer of a model that knows adapters ask for them."""
    for name, module in model.named_modules():
        if hasattr(module, "lora"):
            module.lora, module.lora_name = rows, name


_NO_ROWS: IntArray = np.zeros(0, dtype=np.int64)
