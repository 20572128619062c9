"""Adapter: the matrices of one LoRA adapter by layer, as one rank needs them. Knows tensors; no files."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda_common.params.lora_adapter import LoraAdapter
from pagoda_kernels.lora.add_lora import LoraPart


@dataclass(frozen=True, eq=False, kw_only=True, slots=True, weakref_slot=True)
class Adapter:
    """Compared by identity: sequences keep their adapter even if another one takes its name."""

    name: LoraAdapter
    layers: Mapping[str, tuple[LoraPart, ...]]
    """Parts by the layer's dotted name in the model. Parts of one layer change different outputs."""
    rank: int
    """The highest rank of its matrices."""
    owners: frozenset[str] = field(default=frozenset())
    """Names of all modules that contain one of the layers."""

    @classmethod
    def of(cls, name: LoraAdapter, layers: Mapping[str, tuple[LoraPart, ...]]) -> "Adapter":
        """`layers`: on one device."""
        owners = set()
        for layer in layers:
            parts = layer.split(".")
            owners |= {".".join(parts[:count]) for count in range(1, len(parts))}
        ranks = (part.a.shape[0] for parts_of_layer in layers.values() for part in parts_of_layer)
        return cls(name=name, layers=layers, rank=max(ranks, default=0), owners=frozenset(owners))

    @property
    def num_bytes(self) -> int:
        """Bytes of its matrices on this rank."""
        return sum(part.num_bytes for parts in self.layers.values() for part in parts)

    def to(self, device: torch.device) -> "Adapter":
        """A copy on a device. Copies from pinned memory run while the host continues."""
        return self._moved(lambda matrix: matrix.to(device, non_blocking=True))

    def pinned(self) -> "Adapter":
        """A copy in pinned host memory."""
        return self._moved(Tensor.pin_memory)

    def _moved(self, move: Callable[[Tensor], Tensor]) -> "Adapter":
        layers = {
            layer: tuple(replace(part, a=move(part.a), b=move(part.b)) for part in parts)
            for layer, parts in self.layers.items()
        }
        return Adapter(name=self.name, layers=layers, rank=self.rank, owners=self.owners)


def apart(parts: Iterable[LoraPart]) -> tuple[LoraPart, ...]:
    """Equivalent parts of a layer, with parts that change common outputs merged."""
    found: list[LoraPart] = []
    for part in sorted(parts, key=lambda one: one.row_start):
        if found and part.row_start < found[-1].row_start + found[-1].num_rows:
            found[-1] = _as_one(found[-1], part)
        else:
            found.append(part)
    return tuple(found)


def _as_one(first: LoraPart, second: LoraPart) -> LoraPart:
    """The sum of two parts; the first one must not begin after the second."""
    end = max(first.row_start + first.num_rows, second.row_start + second.num_rows)
    wide = []
    for part in (first, second):
        before = part.row_start - first.row_start
        wide.append(F.pad(part.matrix, (0, 0, before, end - first.row_start - before - part.num_rows)))
    return LoraPart.of(torch.cat([first.a, second.a]), torch.cat(wide, dim=1), first.row_start)
