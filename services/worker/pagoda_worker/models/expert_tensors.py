"""Sources of experts that a checkpoint stores in one tensor per layer. Names and shapes; no files."""

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
        parameters: of the model, one per expert.
        unpack: converts an expert's stored tensor to its parameter.
        is_swapped: see MadeWeights.
    """

    def make(tensors: list[Tensor]) -> dict[str, Tensor]:
        (stacked,) = tensors
        if stacked.shape[:1] != (len(parameters),):
            raise ModelLoadError(f"{name} has {list(stacked.shape)[:1]} experts, must have {len(parameters)}")
        return {parameter: unpack(one) for parameter, one in zip(parameters, stacked.unbind(), strict=True)}

    return MadeWeights(names=(name,), parameters=parameters, make=make, is_swapped=is_swapped)
