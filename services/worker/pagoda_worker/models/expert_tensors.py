"""Experts of a layer that a checkpoint has in one tensor. Names and shapes; no files."""

from collections.abc import Callable

from torch import Tensor

from pagoda_common.errors import ModelLoadError
from pagoda_worker.models.weights import MadeWeights


def stacked_experts(
    name: str,
    parameters: tuple[str, ...],
    *,
    unpack: Callable[[Tensor], Tensor] = lambda rows: rows,
    is_swapped: bool = False,
) -> MadeWeights:
    """One parameter of each expert, from [num_experts, …].

    Args:
        name: of the tensor, in the checkpoint.
        parameters: of the model, one an expert.
        unpack: from what is stored of an expert to its parameter.
        is_swapped: see MadeWeights.
    """

    def make(tensors: list[Tensor]) -> dict[str, Tensor]:
        (stacked,) = tensors
        if stacked.shape[:1] != (len(parameters),):
            raise ModelLoadError(f"{name} has {list(stacked.shape)[:1]} experts, must have {len(parameters)}")
        return {parameter: unpack(one) for parameter, one in zip(parameters, stacked.unbind(), strict=True)}

    return MadeWeights(names=(name,), parameters=parameters, make=make, is_swapped=is_swapped)
