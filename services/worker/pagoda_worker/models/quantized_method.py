"""Methods that hold a layer's matrix as small integers. Knows tensors and layers; no checkpoints."""

import torch
from torch import Tensor, nn

from pagoda_common.config.quantization import OnlineQuantization
from pagoda_kernels.linear.linear_weights import LinearWeights
from pagoda_kernels.linear.quantize_rows import new_packed, quantize_rows
from pagoda_kernels.linear.quantized_linear import has_kernel_for, multiplies_integers, quantized_linear
from pagoda_kernels.linear.quantized_matrix import (
    Allocate,
    PackedMatrix,
    QuantizedMatrix,
    can_pack,
    empty_packed,
    pack,
    quantize,
    unpack_rows,
)
from pagoda_kernels.linear.quantized_rows import RowMatrix, empty_rows, fits_rows, look_up_rows, pack_rows
from pagoda_kernels.linear.scaled_matrix import ScaledMatrix
from pagoda_kernels.native.library import native
from pagoda_kernels.selection import triton_kernel
from pagoda_worker.models.linear_method import (
    COMPRESSED,
    PACKED,
    PLAIN,
    WIDENED,
    LinearMethod,
    MatrixLayer,
    PlainLinearMethod,
    RowSink,
    choose_linear_method,
)
from pagoda_worker.models.scaled_method import ScaledLinearMethod

HEAD_BITS = 8
"""Bits of the language model head in every scheme, because its errors directly change the logits."""
_HEADS = ("lm_head", "embed_tokens")
_FLOAT_PREFIXES = (".router", ".shared_gate", ".alt_up.prediction", ".alt_up.correction")
"""Layers that are not quantized: routers, and mixers of hidden states. They are small, and wrong choices cost more than
rounded sums."""


def set_packed(layer: MatrixLayer, packed: PackedMatrix | RowMatrix) -> None:
    """Give these integers to a layer."""
    layer.weight = nn.Parameter(packed.codes, requires_grad=False)
    layer.weight_scale = nn.Parameter(packed.scales, requires_grad=False)
    zeros = packed.zeros
    layer.weight_zero_point = None if zeros is None else nn.Parameter(zeros, requires_grad=False)


class QuantizedSink:
    """The sink that quantizes the rows of one layer. See RowSink."""

    def __init__(self, packed: PackedMatrix, dtype: torch.dtype) -> None:
        """`dtype`: float type to which rows are rounded first."""
        self._packed = packed
        self._dtype = dtype

    def fill(self, rows: Tensor, first_row: int) -> None:
        """See RowSink."""
        quantize_rows(rows, self._packed, first_row=first_row, dtype=self._dtype)

    def finish(self, layer: MatrixLayer) -> bool:
        """See RowSink."""
        set_packed(layer, self._packed)
        return True


class QuantizedLinearMethod(PlainLinearMethod):
    """Integers in the form of `quantized_linear`: `weight` (codes), `weight_scale`, perhaps `weight_zero_point`."""

    takes_rows = True

    def __init__(self, *, bits: int, group_size: int, quantizes_inputs: bool) -> None:
        """`group_size`: inputs that share a scale; 0: all. `quantizes_inputs`: as in PackedMatrix."""
        self._bits = bits
        self._group_size = group_size
        self._quantizes_inputs = quantizes_inputs

    def process_weights_after_loading(self, layer: MatrixLayer) -> None:
        """See LinearMethod; floats become integers."""
        group_size = self._group_size or layer.columns
        if layer.weight.is_meta:
            set_packed(layer, self._empty(layer, group_size))
        elif layer.weight_scale is None:
            self._quantize(layer, group_size)

    def fill_rows(self, layer: MatrixLayer, rows: Tensor, first_row: int) -> bool:
        """See LinearMethod; the layer never holds the floats."""
        if layer.weight_scale is None:
            group_size = self._group_size or layer.columns
            set_packed(layer, new_packed(layer.rows, layer.columns, bits=self._bits, group_size=group_size))
        quantize_rows(rows, self._tiles(layer), first_row=first_row, dtype=layer.dtype)
        return True

    def row_sink(self, layer: MatrixLayer, allocate: Allocate) -> RowSink | None:
        """See LinearMethod."""
        if not self.takes_rows:
            return None
        group_size = self._group_size or layer.columns
        packed = new_packed(layer.rows, layer.columns, bits=self._bits, group_size=group_size, allocate=allocate)
        return QuantizedSink(packed, layer.dtype)

    def _quantize(self, layer: MatrixLayer, group_size: int) -> None:
        """The layer's matrix as floats."""
        packed = new_packed(layer.rows, layer.columns, bits=self._bits, group_size=group_size)
        quantize_rows(layer.weight, packed, first_row=0)
        set_packed(layer, packed)

    def hold(self, layer: MatrixLayer, matrix: QuantizedMatrix) -> None:
        """Take existing integers with this method's bits and groups."""
        set_packed(layer, self._pack(matrix))

    def _pack(self, matrix: QuantizedMatrix) -> PackedMatrix | RowMatrix:
        return pack(matrix)

    def _empty(self, layer: MatrixLayer, group_size: int) -> PackedMatrix | RowMatrix:
        """On the meta device."""
        return empty_packed(layer.rows, layer.columns, bits=self._bits, group_size=group_size, device="meta")

    def _fields(self, layer: MatrixLayer) -> tuple[Tensor, Tensor, Tensor | None, int, int, int, int]:
        """Fields of a PackedMatrix or RowMatrix."""
        assert layer.weight_scale is not None, "they are set together"
        group_size = self._group_size or layer.columns
        parameters = layer.weight, layer.weight_scale, layer.weight_zero_point
        return *parameters, self._bits, group_size, layer.rows, layer.columns

    def _tiles(self, layer: MatrixLayer) -> PackedMatrix:
        return PackedMatrix(*self._fields(layer), quantizes_inputs=self._quantizes_inputs)

    def _packed(self, layer: MatrixLayer) -> PackedMatrix | RowMatrix:
        return self._tiles(layer)

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
        return quantized_linear(x, self._packed(layer), bias, residual, out_dtype=out_dtype)

    def embedding(self, layer: MatrixLayer, ids: Tensor) -> Tensor:
        """See LinearMethod."""
        return unpack_rows(self._tiles(layer), ids).to(layer.dtype)

    def fused_weights(self, layer: MatrixLayer, bias: Tensor | None) -> LinearWeights | None:
        """See LinearMethod."""
        packed = self._tiles(layer)
        if not has_kernel_for(packed):
            return None
        return LinearWeights(matrix=packed, bias=bias, out_features=layer.rows, in_features=layer.columns)


class QuantizedRowsMethod(QuantizedLinearMethod):
    """The same, in the layout of the Triton kernel."""

    takes_rows = False

    def fill_rows(self, layer: MatrixLayer, rows: Tensor, first_row: int) -> bool:
        """See LinearMethod: a device quantizes whole matrices."""
        return False

    def _quantize(self, layer: MatrixLayer, group_size: int) -> None:
        self.hold(layer, quantize(layer.weight, bits=self._bits, group_size=group_size))

    def _pack(self, matrix: QuantizedMatrix) -> PackedMatrix | RowMatrix:
        return pack_rows(matrix)

    def _empty(self, layer: MatrixLayer, group_size: int) -> PackedMatrix | RowMatrix:
        return empty_rows(layer.rows, layer.columns, bits=self._bits, group_size=group_size, device="meta")

    def _packed(self, layer: MatrixLayer) -> PackedMatrix | RowMatrix:
        return RowMatrix(*self._fields(layer))

    def embedding(self, layer: MatrixLayer, ids: Tensor) -> Tensor:
        """See LinearMethod."""
        return look_up_rows(RowMatrix(*self._fields(layer)), ids).to(layer.dtype)

    def fused_weights(self, layer: MatrixLayer, bias: Tensor | None) -> LinearWeights | None:
        """See LinearMethod."""
        return None


class DequantizedLinearMethod(PlainLinearMethod):
    """Dequantized floats, held by another method, for devices without a kernel."""

    def __init__(self, *, bits: int, group_size: int, method: LinearMethod) -> None:
        self._bits = bits
        self._group_size = group_size
        self._method = method

    def process_weights_after_loading(self, layer: MatrixLayer) -> None:
        """See LinearMethod."""
        if not layer.weight.is_meta:
            group_size = self._group_size or layer.columns
            layer.weight.data.copy_(quantize(layer.weight, bits=self._bits, group_size=group_size).dequantize())
        self._method.process_weights_after_loading(layer)

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
        return self._method.apply(layer, x, bias=bias, residual=residual, out_dtype=out_dtype)

    def embedding(self, layer: MatrixLayer, ids: Tensor) -> Tensor:
        """See LinearMethod."""
        return self._method.embedding(layer, ids)

    def fused_weights(self, layer: MatrixLayer, bias: Tensor | None) -> LinearWeights | None:
        """See LinearMethod."""
        return self._method.fused_weights(layer, bias)


class LinearMethods:
    """Chooses the method of each layer of one model."""

    def __init__(
        self, *, online: OnlineQuantization | None, dtype: torch.dtype, device: torch.device, quantizes_inputs: bool
    ) -> None:
        """`online`: scheme for floats. `quantizes_inputs`: whether integer layers quantize inputs to 8 bits."""
        self._quantizes_inputs = quantizes_inputs and multiplies_integers()
        self._has_rows = triton_kernel("quantized_linear", torch.empty(0, device=device)) is not None
        self._has_experts = triton_kernel("grouped_linear", torch.empty(0, device=device)) is not None
        self._has_tiles = device.type == "cpu" and native("quantized_linear") is not None
        self._floats = choose_linear_method(dtype=dtype, device=device)
        self._is_slow = device.type == "cpu" and dtype == torch.bfloat16 and self._floats is PLAIN
        # Many rows share the reading of a matrix, so that it does not pay to compress it.
        packed = PACKED if self._floats is COMPRESSED else self._floats
        self._of_many_rows = WIDENED if self._is_slow else packed
        self._online = online
        self._quantized: dict[tuple[int, int], QuantizedLinearMethod] = {}
        self._scaled: dict[int, ScaledLinearMethod] = {}

    @property
    def is_online(self) -> bool:
        """Whether floats are quantized."""
        return self._online is not None

    def of_floats(self, layer: MatrixLayer) -> LinearMethod:
        """The method of a layer whose checkpoint has floats."""
        if not layer.is_multiplied:
            return PLAIN
        online = self._online
        if online is None or layer.prefix.endswith(_FLOAT_PREFIXES):
            return self._of_many_rows if layer.takes_many_rows else self._floats
        bits, group_size = online.bits, online.group_size
        if layer.prefix.endswith(_HEADS) and bits < HEAD_BITS:
            bits, group_size = HEAD_BITS, 0
        if self._has_kernel(layer.columns, group_size or layer.columns):
            return self._method(bits, group_size)
        return DequantizedLinearMethod(bits=bits, group_size=group_size, method=self._floats)

    def of_integers(self, matrix: QuantizedMatrix) -> QuantizedLinearMethod | None:
        """The method of a layer whose checkpoint has integers; None: convert to floats."""
        num_inputs, group_size = matrix.numbers.shape[1], matrix.group_size
        if not self._has_kernel(num_inputs, group_size):
            return None
        return self._method(matrix.bits, group_size if group_size < num_inputs else 0)

    def takes_scaled(self, layer: MatrixLayer) -> bool:
        """Whether a layer may keep a checkpoint's small floats; else they are read as floats."""
        return self._has_experts and layer.is_of_experts and not self.is_online

    def of_scaled(self, matrix: ScaledMatrix) -> ScaledLinearMethod | None:
        """The method of a layer for a ScaledMatrix; None: convert to floats."""
        if not matrix.is_readable:
            return None
        return self._scaled.setdefault(matrix.group_size, ScaledLinearMethod(group_size=matrix.group_size))

    def _has_kernel(self, num_inputs: int, group_size: int) -> bool:
        """Whether a kernel supports such groups."""
        if self._has_rows:
            return fits_rows(num_inputs, group_size)
        return self._has_tiles and can_pack(num_inputs, group_size)

    def _method(self, bits: int, group_size: int) -> QuantizedLinearMethod:
        key = bits, group_size
        if key not in self._quantized:
            kind = QuantizedRowsMethod if self._has_rows else QuantizedLinearMethod
            self._quantized[key] = kind(bits=bits, group_size=group_size, quantizes_inputs=self._quantizes_inputs)
        return self._quantized[key]
