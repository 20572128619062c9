"""Finds a rank's part of a stored tensor, and its place in the parameter. Knows tensors and sources; no files."""

from collections.abc import Iterator

import torch
from torch import Tensor

from pagoda_worker.models.model import WeightSharding
from pagoda_worker.models.weights import WeightSource


def in_order(tensor: Tensor, source: WeightSource) -> Tensor:
    """A stored tensor with dimensions and rows as in the parameter; a view if possible."""
    if source.is_transposed:
        tensor = tensor.t()
    if source.group_rows:
        groups = tensor.view(-1, sum(source.group_rows), *tensor.shape[1:])
        parts = torch.split(groups, list(source.group_rows), dim=1)
        tensor = torch.cat([part.flatten(0, 1) for part in parts])
    return tensor[None] if source.is_row else tensor


def copy_part(
    tensor: Tensor, source: WeightSource, parameter: Tensor, sharding: WeightSharding, *, num_rows: int
) -> None:
    """Copy this rank's part of a tensor into its parameter.

    Args:
        tensor: rows of the whole parameter from `source.row_start`.
        num_rows: of the whole parameter.
    """
    if not tensor.dim():
        parameter.data.copy_(tensor)
        return
    if not sharding.rows(source.parameter, num_rows):
        parameter.data.zero_()
    for first_row, part in held_parts(tensor, source, sharding, num_rows=num_rows):
        parameter[first_row : first_row + part.shape[0]].data.copy_(part)


def held_parts(
    tensor: Tensor, source: WeightSource, sharding: WeightSharding, *, num_rows: int
) -> Iterator[tuple[int, Tensor]]:
    """This rank's parts of a tensor's rows, each with its first row in the rank's parameter.

    Args:
        num_rows: of the whole parameter.
    """
    if tensor.dim() > 1:
        columns = sharding.columns(source.parameter, tensor.shape[1])
        tensor = tensor[:, columns.start : columns.stop]
    offset = 0
    for rows in sharding.rows(source.parameter, num_rows):
        begin = max(rows.start, source.row_start)
        end = min(rows.stop, source.row_start + tensor.shape[0])
        if begin < end:
            yield offset + begin - rows.start, tensor[begin - source.row_start : end - source.row_start]
        offset += len(rows)
