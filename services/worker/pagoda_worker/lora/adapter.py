"""Adapter: the matrices of one LoRA adapter by layer, as one rank needs them. Knows tensors; no files."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from pagoda_common.params.lora_adapter import LoraAdapter
from pagoda_kernels.lora.add_lora import LoraPart


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class Adapter:
    """Two are equal only if they are the same object: sequences hold theirs, whatever comes under its name."""

    name: LoraAdapter
    layers: Mapping[str, tuple[LoraPart, ...]]
    """By the dotted name of the layer in the model."""
    rank: int
    """Its highest."""
    owners: frozenset[str] = field(default=frozenset())
    """Names of all modules that have one of the layers in them."""

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
        """Of its matrices on this rank."""
        return sum(part.num_bytes for parts in self.layers.values() for part in parts)

    def to(self, device: torch.device) -> "Adapter":
        """The same on a device; itself if it is there. Copies run while the host goes on."""
        layers = {
            layer: tuple(
                LoraPart(
                    a=part.a.to(device, non_blocking=True),
                    b=part.b.to(device, non_blocking=True),
                    row_start=part.row_start,
                )
                for part in parts
            )
            for layer, parts in self.layers.items()
        }
        return Adapter(name=self.name, layers=layers, rank=self.rank, owners=self.owners)
