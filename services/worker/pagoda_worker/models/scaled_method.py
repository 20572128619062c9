"""ScaledLinearMethod: keeps FP8 and FP4 experts in their stored form on a GPU. Knows tensors and layers; no
checkpoints."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pagoda_kernels.linear.linear_weights import LinearWeights
from pagoda_kernels.linear.scaled_matrix import ScaledMatrix
from pagoda_worker.models.linear_method import MatrixLayer, PlainLinearMethod


class ScaledLinearMethod(PlainLinearMethod):
    """Small floats in the form of `grouped_linear`: `weight` (codes) and `weight_scale`, see ScaledMatrix.

    A layer that is computed alone, as for rows with an adapter, first converts its matrix to floats.
    """

    def __init__(self, *, group_size: int) -> None:
        self._group_size = group_size

    def hold(self, layer: MatrixLayer, matrix: ScaledMatrix) -> None:
        """Take a matrix with this method's groups."""
        layer.weight = nn.Parameter(matrix.codes, requires_grad=False)
        layer.weight_scale = nn.Parameter(matrix.scales, requires_grad=False)

    def _matrix(self, layer: MatrixLayer) -> ScaledMatrix:
        assert layer.weight_scale is not None, "they are set together"
        return ScaledMatrix(layer.weight, layer.weight_scale, self._group_size)

    def apply(
        self,
        layer: MatrixLayer,
        x: Tensor,
        *,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """See LinearMethod."""
        out = F.linear(x, self._matrix(layer).dequantize().to(x.dtype), bias).to(out_dtype or x.dtype)
        return out if residual is None else residual + out

    def embedding(self, layer: MatrixLayer, ids: Tensor) -> Tensor:
        """See LinearMethod."""
        matrix = self._matrix(layer)
        return matrix._replace(codes=matrix.codes[ids], scales=matrix.scales[ids]).dequantize().to(layer.dtype)

    def fused_weights(self, layer: MatrixLayer, bias: Tensor | None) -> LinearWeights | None:
        """See LinearMethod."""
        return LinearWeights(
            matrix=self._matrix(layer), bias=bias, out_features=layer.rows, in_features=layer.columns, is_plain=True
        )
