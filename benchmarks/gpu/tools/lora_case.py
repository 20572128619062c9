"""Batches of several adapters for `add_lora`."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pagoda_kernels.lora.add_lora import GroupedRows, LoraPart, LoraTable


class LoraCase(NamedTuple):
    """Arguments of `add_lora`."""

    x: Tensor
    out: Tensor
    rows: GroupedRows
    table: LoraTable

    def only(self, row: int) -> "LoraCase":
        """The same of one row."""
        starts = self.rows.starts.tolist()
        of_groups = [self.rows.rows[begin:end] for begin, end in itertools.pairwise(starts)]
        groups = [np.arange(int((of_group == row).sum())) for of_group in of_groups]
        rows = GroupedRows.of(groups, self.x.device)
        return LoraCase(self.x[row : row + 1], self.out[row : row + 1].clone(), rows, self.table)


def lora_case(
    counts: Sequence[int],
    *,
    ranks: Sequence[int] = (8, 16, 3, 64, 256),
    num_inputs: int = 100,
    sizes: Sequence[int] = (70, 30, 64),
    dtype: torch.dtype = torch.float32,
    out_dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> LoraCase:
    """A layer whose outputs are slices of `sizes` with a gap after the first; the last group has no part of the first.

    Args:
        counts: rows of each group; the last number: rows without an adapter.
    """
    device = torch.device(device)
    num_tokens = sum(counts)
    order = torch.randperm(num_tokens).numpy()
    ends = np.cumsum(counts)
    groups = [np.sort(order[end - count : end]) for end, count in zip(ends[:-1], counts[:-1], strict=True)]
    starts = [0, *(np.cumsum(sizes) + 5).tolist()]
    parts = []
    for group in range(len(groups)):
        of_group = []
        for start, size in list(zip(starts, sizes, strict=False))[group == len(groups) - 1 :]:
            rank = ranks[group % len(ranks)]
            a, b = torch.randn(rank, num_inputs) * num_inputs**-0.5, torch.randn(size, rank) * rank**-0.5
            of_group.append(LoraPart.of(a.to(device, dtype), b.to(device, dtype), start))
        parts.append(tuple(of_group))
    return LoraCase(
        x=torch.randn(num_tokens, num_inputs).to(device, dtype),
        out=torch.randn(num_tokens, sum(sizes) + 9).to(device, out_dtype or dtype),
        rows=GroupedRows.of(groups, device),
        table=LoraTable.of(parts, device),
    )
