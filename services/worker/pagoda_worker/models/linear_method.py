"""LinearMethod: the form of a layer's matrix in memory and its product: as loaded, or packed for CPU kernels. Knows
tensors and layers; no checkpoints."""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pagoda_kernels.linear.compressed_weight import (
    CompressedRows,
    can_compress,
    compress_weight,
    compressed_bytes,
    compressed_embedding,
    compressed_linear,
)
from pagoda_kernels.linear.linear_weights import LinearWeights
from pagoda_kernels.linear.packed_linear import pack_weight, packed_embedding, packed_linear
from pagoda_kernels.linear.quantized_matrix import Allocate
from pagoda_kernels.native.library import native


class MatrixLayer(Protocol):
    """The interface of a layer for a method; the layer is an nn.Module."""

    prefix: str
    rows: int
    columns: int
    is_multiplied: bool
    takes_many_rows: bool
    is_of_experts: bool
    dtype: torch.dtype
    method: "LinearMethod"
    weight: nn.Parameter
    weight_scale: nn.Parameter | None
    weight_zero_point: nn.Parameter | None


class RowSink(Protocol):
    """Writes a matrix from a checkpoint, some rows at a time, directly in the form that `apply` uses."""

    def fill(self, rows: Tensor, first_row: int) -> None:
        """Take some rows, each once. Several threads may do so at once.

        Args:
            rows: [n, columns] in host memory, of any float type; n is a multiple of SINK_ROWS unless they are the last.
            first_row: a multiple of SINK_ROWS.
        """

    def finish(self, layer: "MatrixLayer") -> bool:
        """Give the filled matrix to the layer. False: this form does not fit, and nothing is changed."""


SINK_ROWS = 32
"""Number of rows of a panel or tile, which one thread fills."""


class LinearMethod(Protocol):
    """One form of a matrix [rows, columns].

    It is stateless: one object may serve many layers. A layer's parameters are always as
    `process_weights_after_loading` leaves them, except while they are filled: weights move by name (to host memory,
    from prepared weights) in that form.
    """

    takes_rows: bool
    """Whether `fill_rows` accepts a checkpoint's rows."""

    def create_weights(self, layer: MatrixLayer, dtype: torch.dtype) -> None:
        """Create the layer's parameters that a checkpoint fills, on the meta device."""

    def fill_rows(self, layer: MatrixLayer, rows: Tensor, first_row: int) -> bool:
        """Write rows of a checkpoint directly in the form that `apply` uses.

        Args:
            rows: [n, columns] in host memory, of any float type.

        Returns:
            Whether that is possible; else nothing is done, and the rows must be written to the parameters of
            `create_weights`.
        """

    def row_sink(self, layer: MatrixLayer, allocate: Allocate) -> RowSink | None:
        """A sink for all rows without a temporary copy of the matrix; None if there is none.

        Args:
            allocate: allocates the layer's memory.
        """

    def process_weights_after_loading(self, layer: MatrixLayer) -> None:
        """Convert the filled parameters to the form that `apply` uses; on the meta device, only shapes.

        A matrix that does not fit this form gets another method.
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
        """The matrix for a kernel that runs whole layers; None if there is no such kernel for this form."""


class PlainLinearMethod:
    """A matrix as loaded: `weight` [rows, columns]."""

    takes_rows = False

    def create_weights(self, layer: MatrixLayer, dtype: torch.dtype) -> None:
        """See LinearMethod."""
        weight = torch.empty(layer.rows, layer.columns, dtype=dtype, device="meta")
        layer.weight = nn.Parameter(weight, requires_grad=False)

    def fill_rows(self, layer: MatrixLayer, rows: Tensor, first_row: int) -> bool:
        """See LinearMethod."""
        return False

    def row_sink(self, layer: MatrixLayer, allocate: Allocate) -> RowSink | None:
        """See LinearMethod."""
        return None

    def process_weights_after_loading(self, layer: MatrixLayer) -> None:
        """See LinearMethod."""

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
        out = F.linear(x, layer.weight, bias).to(out_dtype or x.dtype)
        return out if residual is None else residual + out

    def embedding(self, layer: MatrixLayer, ids: Tensor) -> Tensor:
        """See LinearMethod."""
        return F.embedding(ids, layer.weight)

    def fused_weights(self, layer: MatrixLayer, bias: Tensor | None) -> LinearWeights | None:
        """See LinearMethod."""
        return LinearWeights(
            matrix=layer.weight, bias=bias, out_features=layer.rows, in_features=layer.columns, is_plain=True
        )


class PackedLinearMethod(PlainLinearMethod):
    """A bfloat16 matrix in the form of `packed_linear`: `weight` [rows / 32, columns / 2, 32, 2], rounded up."""

    def process_weights_after_loading(self, layer: MatrixLayer) -> None:
        """See LinearMethod; the layer holds its matrix twice meanwhile."""
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
        """See LinearMethod."""
        return packed_linear(x, layer.weight, layer.rows, bias=bias, residual=residual, out_dtype=out_dtype)

    def embedding(self, layer: MatrixLayer, ids: Tensor) -> Tensor:
        """See LinearMethod."""
        return packed_embedding(ids, layer.weight, layer.columns)

    def fused_weights(self, layer: MatrixLayer, bias: Tensor | None) -> LinearWeights | None:
        """See LinearMethod."""
        if layer.columns % 2:
            return None
        return LinearWeights(matrix=layer.weight, bias=bias, out_features=layer.rows, in_features=layer.columns)


class CompressedSink:
    """The sink for `compressed_linear`. See RowSink."""

    def __init__(self, layer: MatrixLayer, allocate: Allocate) -> None:
        self._out = allocate((compressed_bytes(layer.rows, layer.columns),), torch.uint8)
        self._rows = CompressedRows(self._out, layer.rows, layer.columns)

    def fill(self, rows: Tensor, first_row: int) -> None:
        """See RowSink."""
        self._rows.add(rows.to(torch.bfloat16), first_row)

    def finish(self, layer: MatrixLayer) -> bool:
        """See RowSink; False: too many numbers have no code."""
        is_compressed = self._rows.finish()
        if is_compressed:
            layer.weight = nn.Parameter(self._out, requires_grad=False)
        return is_compressed


class CompressedLinearMethod(PlainLinearMethod):
    """A bfloat16 matrix in the form of `compressed_linear`, at three quarters of its size: `weight` [num_bytes] uint8.

    A matrix that cannot be compressed, because its exponents vary too much, is packed.
    """

    def row_sink(self, layer: MatrixLayer, allocate: Allocate) -> RowSink | None:
        """See LinearMethod."""
        return CompressedSink(layer, allocate) if can_compress(layer.columns) else None

    def process_weights_after_loading(self, layer: MatrixLayer) -> None:
        """See LinearMethod; the layer holds its matrix twice meanwhile, and may have another method then."""
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
        """See LinearMethod."""
        return compressed_linear(x, layer.weight, layer.rows, bias=bias, residual=residual, out_dtype=out_dtype)

    def embedding(self, layer: MatrixLayer, ids: Tensor) -> Tensor:
        """See LinearMethod."""
        return compressed_embedding(ids, layer.weight, layer.rows, layer.columns)

    def fused_weights(self, layer: MatrixLayer, bias: Tensor | None) -> LinearWeights | None:
        """See LinearMethod."""
        return LinearWeights(matrix=layer.weight, bias=bias, out_features=layer.rows, in_features=layer.columns)


class WidenedLinearMethod(PlainLinearMethod):
    """A bfloat16 matrix held in float32, for CPUs without bfloat16 instructions: `weight` [rows, columns].

    There, F.linear of bfloat16 takes ten times as long: with only AVX2, [1024, 384] by [384, 1536] takes 146 ms of a
    core in bfloat16 and 16 ms this way.
    """

    def process_weights_after_loading(self, layer: MatrixLayer) -> None:
        """See LinearMethod; the layer holds its matrix twice meanwhile."""
        layer.weight = nn.Parameter(layer.weight.float(), requires_grad=False)

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
        out = F.linear(x.float(), layer.weight, None if bias is None else bias.float())
        if residual is not None:
            out += residual
        return out.to(out_dtype or x.dtype)

    def embedding(self, layer: MatrixLayer, ids: Tensor) -> Tensor:
        """See LinearMethod."""
        return F.embedding(ids, layer.weight).to(layer.dtype)

    def fused_weights(self, layer: MatrixLayer, bias: Tensor | None) -> LinearWeights | None:
        """See LinearMethod."""
        return None


PLAIN = PlainLinearMethod()
WIDENED = WidenedLinearMethod()
PACKED = PackedLinearMethod()
COMPRESSED = CompressedLinearMethod()


def choose_linear_method(*, dtype: torch.dtype, device: torch.device) -> LinearMethod:
    """The method for a model's matrices: compressed or packed if there is a kernel for it."""
    if device.type != "cpu" or dtype != torch.bfloat16 or native("packed_linear") is None:
        return PLAIN
    return PACKED if native("compressed_linear") is None else COMPRESSED
