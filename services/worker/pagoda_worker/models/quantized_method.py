"""How a layer holds its matrix as small integers. Knows tensors and layers; no checkpoints."""

import torch
from torch import Tensor, nn

from pagoda_common.config.quantization import OnlineQuantization
from pagoda_kernels.linear.linear_weights import LinearWeights
from pagoda_kernels.linear.quantize_rows import new_packed, quantize_rows
from pagoda_kernels.linear.quantized_linear import has_kernel_for, multiplies_integers, quantized_linear
from pagoda_kernels.linear.quantized_matrix import (
    PackedMatrix,
    QuantizedMatrix,
    can_pack,
    empty_packed,
    pack,
    quantize,
    unpack_rows,
)
from pagoda_kernels.linear.quantized_rows import RowMatrix, empty_rows, fits_rows, look_up_rows, pack_rows
from pagoda_kernels.native.library import native
from pagoda_kernels.selection import triton_kernel
from pagoda_worker.models.linear_method import PLAIN, LinearMethod, MatrixLayer, PlainLinearMethod, choose_linear_method

HEAD_BITS = 8
"""Of the language model's head, whatever the others have: its errors are those of the logits."""
_HEADS = ("lm_head", "embed_tokens")
_FLOAT_PREFIXES = (".router", ".shared_gate")
"""Layers that decide which experts a token goes to: small, and wrong choices cost more than wrong sums."""


class QuantizedLinearMethod(PlainLinearMethod):
    """Integers as `quantized_linear` reads them: `weight` (codes), `weight_scale`, perhaps `weight_zero_point`."""

    def __init__(self, *, bits: int, group_size: int, quantizes_inputs: bool) -> None:
        """`group_size`: inputs that share a scale; 0 is all. `quantizes_inputs`: of a PackedMatrix."""
        self._bits = bits
        self._group_size = group_size
        self._quantizes_inputs = quantizes_inputs

    def process_weights_after_loading(self, layer: MatrixLayer) -> None:
        """As in LinearMethod; floats become integers."""
        group_size = self._group_size or layer.columns
        if layer.weight.is_meta:
            self._set(layer, self._empty(layer, group_size))
        elif layer.weight_scale is None:
            self._quantize(layer, group_size)

    def fill_rows(self, layer: MatrixLayer, rows: Tensor, first_row: int) -> bool:
        """As in LinearMethod; the layer never holds the floats."""
        if layer.weight_scale is None:
            group_size = self._group_size or layer.columns
            self._set(layer, new_packed(layer.rows, layer.columns, bits=self._bits, group_size=group_size))
        quantize_rows(rows, self._tiles(layer), first_row=first_row, dtype=layer.dtype)
        return True

    def _quantize(self, layer: MatrixLayer, group_size: int) -> None:
        """What the layer holds as floats."""
        packed = new_packed(layer.rows, layer.columns, bits=self._bits, group_size=group_size)
        quantize_rows(layer.weight, packed, first_row=0)
        self._set(layer, packed)

    def hold(self, layer: MatrixLayer, matrix: QuantizedMatrix) -> None:
        """Take integers that are there already. They have this method's bits and groups."""
        self._set(layer, self._pack(matrix))

    def _pack(self, matrix: QuantizedMatrix) -> PackedMatrix | RowMatrix:
        return pack(matrix)

    def _empty(self, layer: MatrixLayer, group_size: int) -> PackedMatrix | RowMatrix:
        """On the meta device."""
        return empty_packed(layer.rows, layer.columns, bits=self._bits, group_size=group_size, device="meta")

    @staticmethod
    def _set(layer: MatrixLayer, packed: PackedMatrix | RowMatrix) -> None:
        layer.weight = nn.Parameter(packed.codes, requires_grad=False)
        layer.weight_scale = nn.Parameter(packed.scales, requires_grad=False)
        zeros = packed.zeros
        layer.weight_zero_point = None if zeros is None else nn.Parameter(zeros, requires_grad=False)

    def _fields(self, layer: MatrixLayer) -> tuple[Tensor, Tensor, Tensor | None, int, int, int, int]:
        """Of a PackedMatrix or RowMatrix."""
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
        """As in LinearMethod."""
        return quantized_linear(x, self._packed(layer), bias, residual, out_dtype=out_dtype)

    def embedding(self, layer: MatrixLayer, ids: Tensor) -> Tensor:
        """As in LinearMethod."""
        return unpack_rows(self._tiles(layer), ids).to(layer.dtype)

    def fused_weights(self, layer: MatrixLayer, bias: Tensor | None) -> LinearWeights | None:
        """As in LinearMethod."""
        packed = self._tiles(layer)
        if not has_kernel_for(packed):
            return None
        return LinearWeights(matrix=packed, bias=bias, out_features=layer.rows, in_features=layer.columns)


class QuantizedRowsMethod(QuantizedLinearMethod):
    """The same in the order of the Triton kernel."""

    def fill_rows(self, layer: MatrixLayer, rows: Tensor, first_row: int) -> bool:
        """As in LinearMethod: a device quantizes whole matrices."""
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
        """As in LinearMethod."""
        return look_up_rows(RowMatrix(*self._fields(layer)), ids).to(layer.dtype)

    def fused_weights(self, layer: MatrixLayer, bias: Tensor | None) -> LinearWeights | None:
        """As in LinearMethod."""
        return None


class DequantizedLinearMethod(PlainLinearMethod):
    """Floats that are as if they had been quantized, held as another method holds them: where there is no kernel."""

    def __init__(self, *, bits: int, group_size: int, method: LinearMethod) -> None:
        self._bits = bits
        self._group_size = group_size
        self._method = method

    def process_weights_after_loading(self, layer: MatrixLayer) -> None:
        """As in LinearMethod."""
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
        """As in LinearMethod."""
        return self._method.apply(layer, x, bias=bias, residual=residual, out_dtype=out_dtype)

    def embedding(self, layer: MatrixLayer, ids: Tensor) -> Tensor:
        """As in LinearMethod."""
        return self._method.embedding(layer, ids)

    def fused_weights(self, layer: MatrixLayer, bias: Tensor | None) -> LinearWeights | None:
        """As in LinearMethod."""
        return self._method.fused_weights(layer, bias)


class LinearMethods:
    """Chooses the method of each layer of one model."""

    def __init__(
        self, *, online: OnlineQuantization | None, dtype: torch.dtype, device: torch.device, quantizes_inputs: bool
    ) -> None:
        """`online`: what floats become. `quantizes_inputs`: whether layers of integers take their inputs to 8 bits."""
        self._quantizes_inputs = quantizes_inputs and multiplies_integers()
        self._has_rows = triton_kernel("quantized_linear", torch.empty(0, device=device)) is not None
        self._has_tiles = device.type == "cpu" and native("quantized_linear") is not None
        self._floats = choose_linear_method(dtype=dtype, device=device)
        self._online = online
        self._quantized: dict[tuple[int, int], QuantizedLinearMethod] = {}

    @property
    def is_online(self) -> bool:
        """Whether floats become integers."""
        return self._online is not None

    def of_floats(self, layer: MatrixLayer) -> LinearMethod:
        """How a layer holds what a checkpoint has as floats."""
        if not layer.is_multiplied:
            return PLAIN
        online = self._online
        if online is None or layer.prefix.endswith(_FLOAT_PREFIXES):
            return self._floats
        bits, group_size = online.bits, online.group_size
        if layer.prefix.endswith(_HEADS) and bits < HEAD_BITS:
            bits, group_size = HEAD_BITS, 0
        if self._has_kernel(layer.columns, group_size or layer.columns):
            return self._method(bits, group_size)
        return DequantizedLinearMethod(bits=bits, group_size=group_size, method=self._floats)

    def of_integers(self, matrix: QuantizedMatrix) -> QuantizedLinearMethod | None:
        """How a layer holds what a checkpoint has as integers; None: as floats."""
        num_inputs, group_size = matrix.numbers.shape[1], matrix.group_size
        if not self._has_kernel(num_inputs, group_size):
            return None
        return self._method(matrix.bits, group_size if group_size < num_inputs else 0)

    def _has_kernel(self, num_inputs: int, group_size: int) -> bool:
        """Whether a kernel reads such groups."""
        if self._has_rows:
            return fits_rows(num_inputs, group_size)
        return self._has_tiles and can_pack(num_inputs, group_size)

    def _method(self, bits: int, group_size: int) -> QuantizedLinearMethod:
        key = bits, group_size
        if key not in self._quantized:
            kind = QuantizedRowsMethod if self._has_rows else QuantizedLinearMethod
            self._quantized[key] = kind(bits=bits, group_size=group_size, quantizes_inputs=self._quantizes_inputs)
        return self._quantized[key]
