"""Adds the products of low-rank matrices to some rows of a layer's result: several adapters in one batch."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda_kernels.native.library import NATIVE_DTYPES, native
from pagoda_kernels.selection import TRITON_DTYPES, triton_kernel

IntArray = npt.NDArray[np.int64]

PANEL = 64
"""Outputs that lie together in `LoraPart.b`; kLoraPanel in lora.h."""
BLOCK_ROWS = 16
"""Most rows of a block."""
NUM_FIELDS = 5
"""Fields of a part in a table: addresses of a and b, rank, row_start, num_rows; LoraPart in lora.h."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraPart:
    """The addition of an adapter to some neighbouring outputs of a layer: b a x."""

    a: Tensor
    """[rank, in_features], contiguous."""
    b: Tensor
    """[ceil(num_rows / PANEL), rank, PANEL], contiguous, the adapter's scale in it; zeros after the last output."""
    row_start: int
    """First of the layer's outputs that it changes."""
    num_rows: int
    """How many it changes."""

    @classmethod
    def of(cls, a: Tensor, b: Tensor, row_start: int) -> "LoraPart":
        """From matrices [rank, in_features] and [num_rows, rank], which may change afterwards."""
        num_rows, rank = b.shape
        padded = F.pad(b, (0, 0, 0, -num_rows % PANEL))
        panels = padded.reshape(-1, PANEL, rank).transpose(1, 2).clone(memory_format=torch.contiguous_format)
        return cls(a=a.clone(memory_format=torch.contiguous_format), b=panels, row_start=row_start, num_rows=num_rows)

    @property
    def matrix(self) -> Tensor:
        """[num_rows, rank]: b."""
        return self.b.transpose(1, 2).reshape(-1, self.b.shape[1])[: self.num_rows]

    @property
    def num_bytes(self) -> int:
        """Size of both matrices."""
        return self.a.numel() * self.a.element_size() + self.b.numel() * self.b.element_size()

    @property
    def fields(self) -> tuple[int, ...]:
        """Its line of a table, for as long as the tensors stay."""
        return self.a.data_ptr(), self.b.data_ptr(), self.a.shape[0], self.row_start, self.num_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedRows:
    """Rows of a batch by the adapter that they have."""

    rows: Tensor
    """[n] int64: group after group, ascending within each. No row is in two groups."""
    starts: Tensor
    """[num_groups + 1] int64 on the host: where each group begins in `rows`."""
    blocks: Tensor
    """[num_blocks, 3] int64: group, and from where to where in `rows`, at most BLOCK_ROWS."""

    @classmethod
    def of(cls, groups: Sequence[IntArray], device: torch.device) -> "GroupedRows":
        """From the rows of each group, ascending; a group may be empty."""
        starts = np.zeros(len(groups) + 1, dtype=np.int64)
        np.cumsum([rows.size for rows in groups], out=starts[1:])
        blocks = [
            (group, begin, min(begin + BLOCK_ROWS, int(starts[group + 1])))
            for group in range(len(groups))
            for begin in range(int(starts[group]), int(starts[group + 1]), BLOCK_ROWS)
        ]
        rows = np.concatenate(groups) if groups else np.zeros(0, dtype=np.int64)
        return cls(
            rows=_on(device, torch.from_numpy(rows)),
            starts=torch.from_numpy(starts),
            blocks=_on(device, torch.tensor(blocks, dtype=torch.int64).reshape(-1, 3)),
        )

    def each(self) -> Iterator[tuple[int, Tensor]]:
        """Every group that has rows, and these."""
        starts = self.starts.tolist()
        for group, (begin, end) in enumerate(itertools.pairwise(starts)):
            if begin < end:
                yield group, self.rows[begin:end]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraTable:
    """The matrices of each group of rows in a layer."""

    parts: Sequence[Sequence[LoraPart]]
    """By group. Those of one change different outputs."""
    fields: Tensor
    """[num_groups, most parts, NUM_FIELDS] int64: `LoraPart.fields`, zeros where there are fewer parts; contiguous but
    for the first dimension."""
    max_rank: int
    """At least that of every part."""
    max_rows: int
    """At least the `num_rows` of every part."""

    @classmethod
    def of(cls, parts: Sequence[Sequence[LoraPart]], device: torch.device) -> "LoraTable":
        """From parts on this device."""
        fields = np.zeros((len(parts), max(map(len, parts), default=0), NUM_FIELDS), dtype=np.int64)
        for group, of_group in enumerate(parts):
            for place, part in enumerate(of_group):
                fields[group, place] = part.fields
        ranks, rows = (int(fields[..., field].max(initial=0)) for field in (2, 4))
        return cls(parts=parts, fields=torch.from_numpy(fields).to(device), max_rank=ranks, max_rows=rows)


def add_lora(x: Tensor, out: Tensor, rows: GroupedRows, table: LoraTable) -> None:
    """out[rows, part] += (x[rows] a^T) b^T for every group and part, in place.

    Args:
        x: [num_tokens, in_features].
        out: [num_tokens, out_features], of the data type of x or float32.
        table: matrices have the data type of x. Ranks may differ.

    Source: Hu et al. 2021 (arXiv 2106.09685); many adapters in a batch: Chen et al. 2023 (arXiv 2310.18547).
    """
    if not rows.blocks.shape[0] or not table.max_rank:
        return
    is_usual = x.stride(1) == 1 == out.stride(1) and out.dtype in (x.dtype, torch.float32)
    launch = triton_kernel("add_lora", x)
    if launch is not None and is_usual and x.dtype in TRITON_DTYPES:
        launch(x, out, rows, table)
        return
    kernel = native("add_lora") if x.is_cpu else None
    if kernel is not None and is_usual and x.dtype in NATIVE_DTYPES:
        kernel(x, out, rows.rows, rows.starts, table.fields)
        return
    add_lora_reference(x, out, rows, table)


def add_lora_reference(x: Tensor, out: Tensor, rows: GroupedRows, table: LoraTable) -> None:
    """The specification: x a^T is rounded to the data type of x, the sum with `out` once to that of `out`."""
    for group, of_group in rows.each():
        chosen = x.index_select(0, of_group)
        for part in table.parts[group]:
            columns = out[:, part.row_start : part.row_start + part.num_rows]
            delta = F.linear(F.linear(chosen, part.a).float(), part.matrix.float())
            columns[of_group] = (columns.index_select(0, of_group).float() + delta).to(out.dtype)


def embed_lora_reference(ids: Tensor, out: Tensor, rows: GroupedRows, table: LoraTable) -> None:
    """The same for rows of a table of embeddings: out[rows] += b a[:, ids[rows]], where a has a column for each id.

    Args:
        ids: [num_tokens] int64.
        out: [num_tokens, dim].
    """
    for group, of_group in rows.each():
        chosen = ids.index_select(0, of_group)
        for part in table.parts[group]:
            shrunk = part.a.index_select(1, chosen).t()
            delta = F.linear(shrunk.float(), part.matrix.float())
            out[of_group] = (out.index_select(0, of_group).float() + delta).to(out.dtype)


def _on(device: torch.device, tensor: Tensor) -> Tensor:
    """A tensor of the host there, without a wait."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
