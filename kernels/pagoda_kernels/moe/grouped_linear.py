"""Products of rows with the matrices of the experts that they go to, on a GPU: rows are sorted by expert first."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda_kernels.selection import TRITON_DTYPES, triton_kernel


class SortedRows(NamedTuple):
    """Choices sorted by expert, in blocks of one expert each. Made without a word from the device to the host."""

    choices: Tensor
    """[num_slots] int64: token * top_k + rank; -1 fills a block up."""
    experts: Tensor
    """[num_slots / block_rows] int64: of each block; num_experts where it is empty."""
    slots: Tensor
    """[num_tokens * top_k] int64: where each choice is."""
    block_rows: int


class ExpertMatrices(NamedTuple):
    """A matrix of every expert, all of one shape and data type, wherever each of them lies."""

    weights: tuple[Tensor, ...]
    """[num_outputs, num_inputs] each, contiguous."""
    biases: tuple[Tensor, ...]
    """[num_outputs] each; empty: none."""
    weight_addresses: Tensor
    """[num_experts] int64, on the device."""
    bias_addresses: Tensor | None

    @classmethod
    def of(cls, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> "ExpertMatrices":
        """Of matrices that stay where they are."""
        device = weights[0].device

        def addresses(tensors: Sequence[Tensor]) -> Tensor:
            return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64, device=device)

        return cls(tuple(weights), tuple(biases), addresses(weights), addresses(biases) if biases else None)


def sort_by_expert(chosen: Tensor, num_experts: int, *, block_rows: int) -> SortedRows:
    """Sort choices, so that a block of rows meets one matrix.

    Args:
        chosen: [num_tokens, top_k] int64.
    """
    flat = chosen.flatten()
    count, device = flat.shape[0], chosen.device
    order = flat.argsort(stable=True)
    sizes = torch.zeros(num_experts, dtype=torch.int64, device=device).scatter_add_(0, flat, torch.ones_like(flat))
    num_blocks = (sizes + block_rows - 1) // block_rows
    ends = num_blocks.cumsum(0)
    of_sorted = flat[order]
    within = torch.arange(count, device=device) - (sizes.cumsum(0) - sizes)[of_sorted]
    places = (ends - num_blocks)[of_sorted] * block_rows + within
    most = count // block_rows + min(num_experts, count)
    choices = torch.full((most * block_rows,), -1, dtype=torch.int64, device=device)
    choices[places] = order
    experts = torch.searchsorted(ends, torch.arange(most, device=device), right=True)
    slots = torch.empty_like(places)
    slots[order] = places
    return SortedRows(choices, experts, slots, block_rows)


def grouped_linear(x: Tensor, matrices: ExpertMatrices, rows: SortedRows, *, top_k: int) -> Tensor:
    """x W^T + b, of each row with the matrix of its expert; summed in float32 and rounded once.

    Args:
        x: [num_tokens, num_inputs] with top_k > 0: the row of a choice's token is read; else [num_slots, num_inputs].
        top_k: choices of a token; 0: a slot's row is its own.

    Returns:
        [num_slots, num_outputs]; rows without a choice mean nothing.
    """
    kernel = triton_kernel("grouped_linear", x)
    if kernel is not None and x.dtype in TRITON_DTYPES and x.stride(1) == 1:
        out: Tensor = kernel(x, matrices, rows, top_k=top_k)
        return out
    return grouped_linear_reference(x, matrices, rows, top_k=top_k)


def grouped_linear_reference(x: Tensor, matrices: ExpertMatrices, rows: SortedRows, *, top_k: int) -> Tensor:
    """The specification of `grouped_linear`."""
    out = x.new_zeros(rows.choices.shape[0], matrices.weights[0].shape[0])
    of_rows = rows.experts.repeat_interleave(rows.block_rows)
    for index, weight in enumerate(matrices.weights):
        slots = torch.nonzero((of_rows == index) & (rows.choices >= 0)).flatten()
        source = rows.choices[slots] // top_k if top_k else slots
        bias = matrices.biases[index] if matrices.biases else None
        out[slots] = F.linear(x[source], weight, bias)
    return out
