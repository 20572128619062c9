"""How a layer's matrix is held in memory and multiplied with: as it was loaded, or packed for the kernels of the CPU.
Knows tensors and layers; no checkpoints."""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pagoda_kernels.linear.compressed_weight import compress_weight, compressed_embedding, compressed_linear
from pagoda_kernels.linear.linear_weights import LinearWeights
from pagoda_kernels.linear.packed_linear import pack_weight, packed_embedding, packed_linear
from pagoda_kernels.native.library import native


class MatrixLayer(Protocol):
    """What a method knows of its layer, which is an nn.Module."""

    prefix: str
    rows: int
    columns: int
    is_multiplied: bool
    dtype: torch.dtype
    method: "LinearMethod"
    weight: nn.Parameter
    weight_scale: nn.Parameter | None
    weight_zero_point: nn.Parameter | None


class LinearMethod(Protocol):
    """One way to hold a matrix [rows, columns]. It has no state of its own: one object may serve many layers.

    A layer's parameters are as `process_weights_after_loading` leaves them at all times, but while they are filled:
    weights move by name (to host memory, from other weights that were prepared) in that form.
    """

    def create_weights(self, layer: MatrixLayer, dtype: torch.dtype) -> None:
        """Give the layer the parameters that a checkpoint fills, on the meta device."""

    def fill_rows(self, layer: MatrixLayer, rows: Tensor, first_row: int) -> bool:
        """Take rows of a checkpoint straight into the form that `apply` wants.

        Args:
            rows: [n, columns] in host memory, of any float type.

        Returns:
            Whether that is possible; else nothing is done, and the rows belong into what `create_weights` has made.
        """

    def process_weights_after_loading(self, layer: MatrixLayer) -> None:
        """Replace what a checkpoint has filled by what `apply` wants. On the meta device too: shapes only, then.

        What cannot be held this way gets another method.
        """

    def apply(
        self,
        layer: MatrixLayer,
        x: Tensor,
        *,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """residual + x W^T + bias.

        Args:
            x: [num_tokens, columns].
            bias: [rows].
            residual: [num_tokens, rows], of the result's data type.
            out_dtype: of the result, [num_tokens, rows]; None is that of x.
        """

    def embedding(self, layer: MatrixLayer, ids: Tensor) -> Tensor:
        """Rows of the matrix: [num_tokens] int64 to [num_tokens, columns]."""

    def fused_weights(self, layer: MatrixLayer, bias: Tensor | None) -> LinearWeights | None:
        """What `apply` multiplies with and `embedding` reads, for a kernel that runs whole layers; None: there is none
        for this form."""


class PlainLinearMethod:
    """A matrix as it was loaded: `weight` [rows, columns]."""

    def create_weights(self, layer: MatrixLayer, dtype: torch.dtype) -> None:
        """As in LinearMethod."""
        weight = torch.empty(layer.rows, layer.columns, dtype=dtype, device="meta")
        layer.weight = nn.Parameter(weight, requires_grad=False)

    def fill_rows(self, layer: MatrixLayer, rows: Tensor, first_row: int) -> bool:
        """As in LinearMethod."""
        return False

    def process_weights_after_loading(self, layer: MatrixLayer) -> None:
        """As in LinearMethod."""

    def apply(
        self,
        layer: MatrixLayer,
        x: Tensor,
        *,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """As in LinearMethod."""
        out = F.linear(x, layer.weight, bias).to(out_dtype or x.dtype)
        return out if residual is None else residual + out

    def embedding(self, layer: MatrixLayer, ids: Tensor) -> Tensor:
        """As in LinearMethod."""
        return F.embedding(ids, layer.weight)

    def fused_weights(self, layer: MatrixLayer, bias: Tensor | None) -> LinearWeights | None:
        """As in LinearMethod."""
        return LinearWeights(
            matrix=layer.weight, bias=bias, out_features=layer.rows, in_features=layer.columns, is_plain=True
        )


class PackedLinearMethod(PlainLinearMethod):
    """A bfloat16 matrix as `packed_linear` reads it: `weight` [rows / 32, columns / 2, 32, 2], rounded up."""

    def process_weights_after_loading(self, layer: MatrixLayer) -> None:
        """As in LinearMethod; the layer holds its matrix twice meanwhile."""
        layer.weight = nn.Parameter(pack_weight(layer.weight), requires_grad=False)

    def apply(
        self,
        layer: MatrixLayer,
        x: Tensor,
        *,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """As in LinearMethod."""
        return packed_linear(x, layer.weight, layer.rows, bias=bias, residual=residual, out_dtype=out_dtype)

    def embedding(self, layer: MatrixLayer, ids: Tensor) -> Tensor:
        """As in LinearMethod."""
        return packed_embedding(ids, layer.weight, layer.columns)

    def fused_weights(self, layer: MatrixLayer, bias: Tensor | None) -> LinearWeights | None:
        """As in LinearMethod."""
        if layer.columns % 2:
            return None
        return LinearWeights(matrix=layer.weight, bias=bias, out_features=layer.rows, in_features=layer.columns)


class CompressedLinearMethod(PlainLinearMethod):
    """A bfloat16 matrix as `compressed_linear` reads it, three quarters of its size: `weight` [num_bytes] uint8.

    A matrix that cannot be compressed, since its numbers are of too many sizes, is packed.
    """

    def process_weights_after_loading(self, layer: MatrixLayer) -> None:
        """As in LinearMethod; the layer holds its matrix twice meanwhile, and may have another method then."""
        compressed = compress_weight(layer.weight)
        if compressed is None:
            layer.method = PACKED
            PACKED.process_weights_after_loading(layer)
        else:
            layer.weight = nn.Parameter(compressed, requires_grad=False)

    def apply(
        self,
        layer: MatrixLayer,
        x: Tensor,
        *,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """As in LinearMethod."""
        return compressed_linear(x, layer.weight, layer.rows, bias=bias, residual=residual, out_dtype=out_dtype)

    def embedding(self, layer: MatrixLayer, ids: Tensor) -> Tensor:
        """As in LinearMethod."""
        return compressed_embedding(ids, layer.weight, layer.rows, layer.columns)

    def fused_weights(self, layer: MatrixLayer, bias: Tensor | None) -> LinearWeights | None:
        """As in LinearMethod."""
        return LinearWeights(matrix=layer.weight, bias=bias, out_features=layer.rows, in_features=layer.columns)


PLAIN = PlainLinearMethod()
PACKED = PackedLinearMethod()
COMPRESSED = CompressedLinearMethod()


def choose_linear_method(*, dtype: torch.dtype, device: torch.device) -> LinearMethod:
    """For the matrices that a model multiplies with: compressed or packed where there is a kernel for it."""
    if device.type != "cpu" or dtype != torch.bfloat16 or native("packed_linear") is None:
        return PLAIN
    return PACKED if native("compressed_linear") is None else COMPRESSED
