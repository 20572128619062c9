"""One matrix of a layer, in the form that its kernel reads, for kernels that go over several matrices in a call."""

from dataclasses import dataclass

from torch import Tensor

from pagoda_kernels.linear.quantized_matrix import PackedMatrix
from pagoda_kernels.linear.scaled_matrix import ScaledMatrix
from pagoda_kernels.native.library import native


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearWeights:
    """One matrix of a layer."""

    matrix: Tensor | PackedMatrix | ScaledMatrix
    """bfloat16 as `pack_weight` or `compress_weight` gives it, or integers; with `is_plain` [out_features, in_features]
    of any type, or small floats with scales."""
    bias: Tensor | None
    """[out_features]."""
    out_features: int
    in_features: int
    is_plain: bool = False
    name: str = ""
    """Name of the layer, which adapters use."""


def native_weights(linear: LinearWeights) -> object:
    """The matrix as the C++ kernels take it. It has no more than pointers: the caller keeps the tensors."""
    matrix, bias = linear.matrix, linear.bias
    make = native("linear_weights")
    if isinstance(matrix, PackedMatrix):
        fields = matrix.codes, matrix.scales, matrix.zeros, matrix.group_size, matrix.quantizes_inputs
        return make(*fields, bias, matrix.num_outputs, matrix.num_inputs)
    return make(matrix, None, None, 0, False, bias, linear.out_features, linear.in_features)
