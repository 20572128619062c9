"""Adds the products of low-rank matrices to some rows of a layer's result: several adapters in one batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraPart:
    """What an adapter adds to some neighbouring outputs of a layer: b a x."""

    a: Tensor
    """[rank, in_features]."""
    b: Tensor
    """[num_rows, rank], with the adapter's scale in it."""
    row_start: int
    """First of the layer's outputs that it changes."""

    @property
    def num_bytes(self) -> int:
        """Of both matrices."""
        return self.a.numel() * self.a.element_size() + self.b.numel() * self.b.element_size()


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraGroup:
    """Rows of a batch that have the same adapter."""

    rows: Tensor
    """[n] int64, ascending."""
    parts: Sequence[LoraPart]
    """Of the layer; several may change the same outputs."""


def add_lora(x: Tensor, out: Tensor, groups: Sequence[LoraGroup]) -> None:
    """out[rows, part] += (x[rows] a^T) b^T for every group and part, in place.

    Args:
        x: [num_tokens, in_features].
        out: [num_tokens, out_features], of the data type of x or float32.
        groups: no row is in two of them. Ranks may differ.

    Source: Hu et al. 2021 (arXiv 2106.09685); many adapters in a batch: Chen et al. 2023 (arXiv 2310.18547).
    """
    add_lora_reference(x, out, groups)


def add_lora_reference(x: Tensor, out: Tensor, groups: Sequence[LoraGroup]) -> None:
    """The specification: x a^T is rounded to the data type of x, the sum with `out` once to that of `out`."""
    for group in groups:
        rows = x.index_select(0, group.rows)
        for part in group.parts:
            columns = out[:, part.row_start : part.row_start + part.b.shape[0]]
            delta = F.linear(F.linear(rows, part.a).float(), part.b.float())
            columns[group.rows] = (columns.index_select(0, group.rows).float() + delta).to(out.dtype)


def embed_lora_reference(ids: Tensor, out: Tensor, groups: Sequence[LoraGroup]) -> None:
    """The same for a table: out[rows] += b a[:, ids[rows]], where a has a column for each id.

    Args:
        ids: [num_tokens] int64.
        out: [num_tokens, dim].
    """
    for group in groups:
        ids_of_group = ids.index_select(0, group.rows)
        for part in group.parts:
            shrunk = part.a.index_select(1, ids_of_group).t()
            delta = F.linear(shrunk.float(), part.b.float())
            out[group.rows] = (out.index_select(0, group.rows).float() + delta).to(out.dtype)


def no_rows(device: torch.device) -> Tensor:
    """Rows of a group that has none."""
    return torch.empty(0, dtype=torch.int64, device=device)
