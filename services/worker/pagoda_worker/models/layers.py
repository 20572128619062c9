"""Layers of the decoder core. Every layer is built on the meta device and filled by the loader."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pagoda_common.errors import ModelLoadError
from pagoda_kernels.layers.add_rms_norm import add_rms_norm
from pagoda_kernels.layers.rms_norm import rms_norm
from pagoda_kernels.linear.linear_weights import LinearWeights
from pagoda_kernels.linear.quantized_matrix import Allocate, QuantizedMatrix
from pagoda_kernels.linear.scaled_matrix import ScaledMatrix
from pagoda_worker.lora.lora_rows import LoraRows
from pagoda_worker.models.linear_method import PLAIN, LinearMethod, RowSink
from pagoda_worker.models.quantized_method import QuantizedLinearMethod
from pagoda_worker.models.scaled_method import ScaledLinearMethod
from pagoda_worker.models.spec import DecoderSpec

ACTIVATION_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "relu2": "relu2",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
}
"""From the name in config.json to the one in pagoda_kernels.layers.act_and_mul."""


def activation_name(name: str) -> str:
    """The activation function's name among the kernels.

    Raises:
        ModelLoadError: an unknown name.
    """
    if name not in ACTIVATION_NAMES:
        raise ModelLoadError(f"activation {name!r} is not supported; supported are {', '.join(ACTIVATION_NAMES)}")
    return ACTIVATION_NAMES[name]


class Matrix(nn.Module):
    """A layer around one matrix, whose form is decided by its method."""

    weight: nn.Parameter
    weight_scale: nn.Parameter | None
    """Scales of a matrix of small integers; weight_zero_point likewise."""
    weight_zero_point: nn.Parameter | None
    dtype: torch.dtype
    """Data type of the matrix's rows and of the input."""
    takes_many_rows = False
    """Whether most products have many rows, as in encoders."""
    lora: LoraRows | None = None
    """Adapters of the rows being computed; None: adapters are never used."""
    lora_name = ""
    """Name of the layer for adapters."""
    is_float = False
    """Whether the matrix is kept as loaded, regardless of quantization, because other code reads it too."""
    is_of_experts = False
    """Whether this is an expert of a mixture, whose products may be computed together."""
    takes_adapters = True
    """Whether adapters are applied wherever the matrix is used."""

    def __init__(self, *, rows: int, columns: int, is_multiplied: bool, prefix: str) -> None:
        """`is_multiplied`: vectors are multiplied by the matrix; else only its rows are looked up."""
        super().__init__()
        self.prefix = prefix
        self.rows = rows
        self.columns = columns
        self.is_multiplied = is_multiplied
        self.method: LinearMethod = PLAIN
        self._is_loading = False
        self.begin_loading(torch.get_default_dtype())

    def begin_loading(self, dtype: torch.dtype) -> None:
        """Create the parameters that a checkpoint fills, on the meta device. `dtype`: of unquantized parameters."""
        self.dtype = dtype
        self.weight_scale = self.weight_zero_point = None
        self.method.create_weights(self, dtype)
        self._is_loading = True

    def fill_rows(self, rows: Tensor, first_row: int) -> bool:
        """Take rows [n, columns] of a checkpoint in the final form; False: write them to `weight` instead."""
        return self._is_loading and self.method.fill_rows(self, rows, first_row)

    def row_sink(self, allocate: Allocate) -> RowSink | None:
        """A sink for all rows of a checkpoint, without a temporary copy of the matrix; None if there is none."""
        return self.method.row_sink(self, allocate) if self._is_loading else None

    def take_sink(self, sink: RowSink) -> bool:
        """Use the content of a sink. False: it does not fit, and `weight` must be filled."""
        if sink.finish(self):
            self._is_loading = False
        return not self._is_loading

    def finish_loading(self) -> None:
        """Convert parameters to their final form, filled or still on the meta device; no-op if already done."""
        if self._is_loading:
            self.method.process_weights_after_loading(self)
            self._is_loading = False

    def hold(self, matrix: QuantizedMatrix, method: QuantizedLinearMethod) -> None:
        """Use integers instead of the parameters that a checkpoint fills."""
        self.method = method
        method.hold(self, matrix)
        self._is_loading = False

    def hold_scaled(self, matrix: ScaledMatrix, method: ScaledLinearMethod) -> None:
        """Use small floats instead of the parameters that a checkpoint fills."""
        self.method = method
        method.hold(self, matrix)
        self._is_loading = False

    def take_form(self, other: "Matrix") -> None:
        """Create parameters in the form of another layer's, on the meta device; no-op if already done."""
        if self.method is other.method:
            return
        self.method = other.method
        for name in ("weight", "weight_scale", "weight_zero_point"):
            parameter = getattr(other, name)
            if parameter is not None:
                parameter = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
            setattr(self, name, parameter)


class Linear(Matrix):
    """x W^T + b; one matrix may hold several projections, stacked in its rows."""

    def __init__(self, *, in_features: int, out_features: int, bias: bool, prefix: str = "") -> None:
        super().__init__(rows=out_features, columns=in_features, is_multiplied=True, prefix=prefix)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[num_tokens, in_features] to [num_tokens, out_features], with `residual` of that shape added."""
        return self.multiply(x, residual)

    def multiply(self, x: Tensor, residual: Tensor | None = None, *, out_dtype: torch.dtype | None = None) -> Tensor:
        """The product of this rank's part, in a given data type."""
        out = self.method.apply(self, x, bias=self.bias, residual=residual, out_dtype=out_dtype)
        return out if self.lora is None else self.lora.add(self.lora_name, x, out)

    def fused_weights(self) -> LinearWeights | None:
        """The matrix for a call of all layers; None if there is no kernel for its form."""
        weights = self.method.fused_weights(self, self.bias)
        return None if weights is None else replace(weights, name=self.lora_name)


class Embedding(Matrix):
    """A table of rows."""

    def __init__(self, *, num_rows: int, dim: int, is_head: bool = False, prefix: str = "") -> None:
        """`is_head`: the table is also the matrix of the language model head."""
        super().__init__(rows=num_rows, columns=dim, is_multiplied=is_head, prefix=prefix)

    def forward(self, ids: Tensor) -> Tensor:
        """[num_tokens] int64 to [num_tokens, dim]."""
        rows = self.method.embedding(self, ids)
        return rows if self.lora is None else self.lora.embed(self.lora_name, ids, rows)


class Norm(nn.Module):
    """RMS norm or layer norm over the last dimension, as in the spec.

    A weight [num_heads, head_dim] has a row for each head.
    """

    def __init__(self, *, spec: DecoderSpec, shape: tuple[int, ...], prefix: str = "") -> None:
        super().__init__()
        self.prefix = prefix
        self._is_rms = spec.norm == "rms_norm"
        self.eps = spec.norm_eps
        self.offset = spec.norm_weight_offset
        has_weights = spec.norm_has_weights
        self.weight = nn.Parameter(torch.empty(shape), requires_grad=False) if has_weights else None
        has_bias = has_weights and not self._is_rms and spec.norm_has_bias and len(shape) == 1
        self.bias = nn.Parameter(torch.empty(shape), requires_grad=False) if has_bias else None

    @property
    def rms_weight(self) -> Tensor | None:
        """The weight, if this is a root-mean-square norm over the whole last dimension."""
        return self.weight if self._is_rms and self.weight is not None and self.weight.dim() == 1 else None

    def forward(self, x: Tensor) -> Tensor:
        """The same shape: [..., dim], or [num_tokens, num_heads, head_dim]."""
        if self.weight is not None and self.weight.dim() > 1:
            wide = x.float()
            normed = F.rms_norm if self._is_rms else F.layer_norm
            return (normed(wide, x.shape[-1:], eps=self.eps) * self.weight.float()).to(x.dtype)
        if self._is_rms and self.weight is not None:
            return rms_norm(x, self.weight, self.eps, weight_offset=self.offset)
        if self.weight is not None and self.offset:
            return F.layer_norm(x, x.shape[-1:], self.weight + self.offset, self.bias, self.eps)
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)

    def add(self, residual: Tensor, x: Tensor, *, alpha: float) -> tuple[Tensor, Tensor]:
        """residual + alpha * x, all [num_tokens, dim], and its norm."""
        if self.rms_weight is not None:
            return add_rms_norm(x, residual, self.rms_weight, self.eps, alpha=alpha, weight_offset=self.offset)
        total = torch.add(residual, x, alpha=alpha)
        return total, self.forward(total)
