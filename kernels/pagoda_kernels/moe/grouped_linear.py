"""Products of rows with the matrices of the experts that they go to, on a GPU: rows are sorted by expert first."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda_kernels.linear.scaled_matrix import ScaledMatrix
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
    """A matrix of every expert, all of one shape and form, wherever each of them lies."""

    weights: tuple[Tensor | ScaledMatrix, ...]
    """[num_outputs, num_inputs] each, contiguous; scaled ones of one number of bits and one group size."""
    biases: tuple[Tensor, ...]
    """[num_outputs] each; empty: none."""
    weight_addresses: Tensor
    """[num_experts] int64, on the device; of the codes of scaled ones."""
    scale_addresses: Tensor | None
    """The same of their scales."""
    bias_addresses: Tensor | None
    is_aligned: bool
    """Whether every matrix begins at a multiple of 16 bytes."""

    @classmethod
    def of(cls, weights: Sequence[Tensor | ScaledMatrix], biases: Sequence[Tensor]) -> "ExpertMatrices":
        """From matrices that are not moved."""
        numbers = [weight.codes if isinstance(weight, ScaledMatrix) else weight for weight in weights]
        scales = [weight.scales for weight in weights if isinstance(weight, ScaledMatrix)]

        def addresses(tensors: Sequence[Tensor]) -> Tensor:
            places = [tensor.data_ptr() for tensor in tensors]
            return torch.tensor(places, dtype=torch.int64, device=numbers[0].device)

        return cls(
            tuple(weights),
            tuple(biases),
            addresses(numbers),
            addresses(scales) if scales else None,
            addresses(biases) if biases else None,
            is_aligned=all(tensor.data_ptr() % 16 == 0 for tensor in numbers),
        )

    @property
    def num_outputs(self) -> int:
        """Rows of a matrix."""
        first = self.weights[0]
        return first.num_outputs if isinstance(first, ScaledMatrix) else first.shape[0]


def sort_by_expert(chosen: Tensor, num_experts: int, *, block_rows: int) -> SortedRows:
    """Sort choices, so that a block of rows meets one matrix.

    Args:
        chosen: [num_tokens, top_k] int64.
        block_rows: of a block, a power of two.
    """
    kernel = triton_kernel("sort_by_expert", chosen)
    if kernel is None:
        return sort_by_expert_reference(chosen, num_experts, block_rows=block_rows)
    rows: SortedRows = kernel(chosen, num_experts, block_rows=block_rows)
    return rows


def sort_by_expert_reference(chosen: Tensor, num_experts: int, *, block_rows: int) -> SortedRows:
    """The specification of `sort_by_expert`."""
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
    out = x.new_zeros(rows.choices.shape[0], matrices.num_outputs)
    of_rows = rows.experts.repeat_interleave(rows.block_rows)
    for index, weight in enumerate(matrices.weights):
        slots = torch.nonzero((of_rows == index) & (rows.choices >= 0)).flatten()
        source = rows.choices[slots] // top_k if top_k else slots
        bias = matrices.biases[index] if matrices.biases else None
        if isinstance(weight, ScaledMatrix):
            wide = F.linear(x[source].float(), weight.dequantize(), None if bias is None else bias.float())
            out[slots] = wide.to(x.dtype)
        else:
            out[slots] = F.linear(x[source], weight, bias)
    return out
