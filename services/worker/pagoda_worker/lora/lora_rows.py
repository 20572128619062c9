"""LoraRows: the adapter of each row of the running step, for all layers. Knows no slots."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from pagoda_kernels.lora.add_lora import NUM_FIELDS, GroupedRows, LoraTable, add_lora, embed_lora_reference
from pagoda_worker.lora.adapter import Adapter
from pagoda_worker.memory.transfers import to_device

IntArray = npt.NDArray[np.int64]
NO_ADAPTER = -1


class LoraRows:
    """Shared by all layers of a model. Only the computing thread may call it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._places: dict[str, int] = {}
        """Index of each layer in a table."""
        self._tables: WeakKeyDictionary[Adapter, IntArray] = WeakKeyDictionary()
        """[num_layers, num_parts, NUM_FIELDS] of adapters."""
        self._matrices = Matrices((), {}, self._tables, device)
        self._numbers: IntArray = np.zeros(0, dtype=np.int64)
        """[num_tokens] index of each row's adapter among those of the step, or NO_ADAPTER."""
        self.grouped: GroupedRows | None = None
        """The rows that layers currently compute, by adapter; None: no row has one."""

    def know(self, layers: Sequence[str]) -> None:
        """Assign an index to each layer that uses adapters."""
        self._places = {layer: place for place, layer in enumerate(layers)}

    @property
    def matrices(self) -> "Matrices":
        """Matrices of the step's adapters, which form the groups."""
        return self._matrices

    def begin(self, adapters: Sequence[Adapter | None], num_tokens: IntArray) -> None:
        """Set the adapters of a step's sequences, in order.

        Args:
            adapters: [num_seqs], of each sequence; empty: no adapters.
            num_tokens: [num_seqs] rows of each.
        """
        found = list(dict.fromkeys(adapter for adapter in adapters if adapter is not None))
        if not found:
            self.grouped = None
            return
        if set(found) != set(self._matrices.adapters):
            self._matrices = Matrices(found, self._places, self._tables, self._device)
        places = {adapter: place for place, adapter in enumerate(self._matrices.adapters)}
        numbers = [NO_ADAPTER if adapter is None else places[adapter] for adapter in adapters]
        self._see(np.repeat(np.array(numbers, dtype=np.int64), num_tokens))

    def _see(self, numbers: IntArray) -> None:
        self._numbers = numbers
        groups = [np.flatnonzero(numbers == place) for place in range(len(self._matrices.adapters))]
        self.grouped = GroupedRows.of(groups, self._device) if any(rows.size for rows in groups) else None

    @contextmanager
    def selected(self, rows: IntArray) -> Iterator[None]:
        """Context in which layers compute only some of the current rows, in this order."""
        grouped, numbers = self.grouped, self._numbers
        if grouped is not None:
            self._see(numbers[rows])
        try:
            yield
        finally:
            self.grouped, self._numbers = grouped, numbers

    def rows_within(self, module: str) -> IntArray:
        """[n] the rows whose adapter changes some layer in `module`."""
        adapters = self._matrices.adapters if self.grouped is not None else ()
        places = [place for place, adapter in enumerate(adapters) if module in adapter.owners]
        return np.flatnonzero(np.isin(self._numbers, places)) if places else _NO_ROWS

    def add(self, layer: str, x: Tensor, out: Tensor) -> Tensor:
        """Add the adapters' products for a layer to `out`, in place.

        Args:
            x: [num_rows, in_features].
            out: [num_rows, out_features].
        """
        if self.grouped is not None and (table := self._matrices.table(layer)) is not None:
            add_lora(x, out, self.grouped, table)
        return out

    def embed(self, layer: str, ids: Tensor, out: Tensor) -> Tensor:
        """The same for rows of a table: [num_rows] int64, and `out` [num_rows, dim]."""
        if self.grouped is not None and (table := self._matrices.table(layer)) is not None:
            embed_lora_reference(ids, out, self.grouped, table)
        return out


class Matrices:
    """Matrices of some adapters by layer, in the kernels' form."""

    def __init__(
        self,
        adapters: Sequence[Adapter],
        places: Mapping[str, int],
        tables: WeakKeyDictionary[Adapter, IntArray],
        device: torch.device,
    ) -> None:
        """
        Args:
            places: index of each layer in a table.
            tables: of adapters that were used before.
        """
        self.adapters = tuple(adapters)
        self.places = places
        each = []
        for adapter in adapters:
            if adapter not in tables:
                tables[adapter] = _table_of(adapter, places)
            each.append(tables[adapter])
        num_parts = max((table.shape[1] for table in each), default=0)
        fields = np.zeros((len(each), len(places), num_parts, NUM_FIELDS), dtype=np.int64)
        for number, table in enumerate(each):
            fields[number, :, : table.shape[1]] = table
        self.fields = to_device(fields, device)
        """[num_groups, num_layers, most parts, NUM_FIELDS]."""
        self._max_rows = fields[..., 4].max(axis=(0, 2), initial=0).tolist()
        self._max_rank = max((adapter.rank for adapter in adapters), default=0)
        self._by_layer: dict[str, LoraTable | None] = {}
        self.layers = frozenset().union(*(adapter.layers for adapter in adapters))
        """Layers that at least one adapter changes."""

    def places_of(self, layers: Sequence[str]) -> list[int]:
        """[4] of the matrices of a layer; -1: no adapter changes it, or there are fewer."""
        places = [self.places[layer] if layer in self.layers else -1 for layer in layers]
        return places + [-1] * (4 - len(places))

    def table(self, layer: str) -> LoraTable | None:
        """The table of a layer; None: no adapter changes it."""
        if layer not in self._by_layer:
            parts = [adapter.layers.get(layer, ()) for adapter in self.adapters]
            place = self.places[layer]
            self._by_layer[layer] = (
                LoraTable(
                    parts=parts,
                    fields=self.fields[:, place],
                    max_rank=self._max_rank,
                    max_rows=self._max_rows[place],
                )
                if any(parts)
                else None
            )
        return self._by_layer[layer]


def attach(model: nn.Module, rows: LoraRows) -> None:
    """Register every layer of a model that supports adapters."""
    names = []
    for name, module in model.named_modules():
        if hasattr(module, "lora"):
            module.lora, module.lora_name = rows, name
            names.append(name)
    rows.know(list(dict.fromkeys([*names, HEAD])))


def _table_of(adapter: Adapter, places: Mapping[str, int]) -> IntArray:
    """[num_layers, most parts, NUM_FIELDS], of layers that ask; zeros where there are fewer parts."""
    table = np.zeros((len(places), max(map(len, adapter.layers.values()), default=0), NUM_FIELDS), dtype=np.int64)
    for layer, parts in adapter.layers.items():
        for number, part in enumerate(parts):
            table[places[layer], number] = part.fields
    return table


HEAD = "lm_head"
"""The name of a head that may be tied to the embedding table."""
_NO_ROWS: IntArray = np.zeros(0, dtype=np.int64)
