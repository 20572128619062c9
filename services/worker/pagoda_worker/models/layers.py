"""Layers of the decoder core. Every layer is built on the meta device and filled by the loader."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pagoda_common.errors import ModelLoadError
from pagoda_kernels.add_rms_norm import add_rms_norm
from pagoda_kernels.rms_norm import rms_norm
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
"""From the name in config.json to the one in pagoda_kernels.act_and_mul."""


def activation_name(name: str) -> str:
    """The activation function's name among the kernels.

    Raises:
        ModelLoadError: an unknown name.
    """
    if name not in ACTIVATION_NAMES:
        raise ModelLoadError(f"activation {name!r} is not supported; supported are {', '.join(ACTIVATION_NAMES)}")
    return ACTIVATION_NAMES[name]


class Linear(nn.Module):
    """x W^T + b; one matrix may hold several projections, one behind the other in its rows."""

    def __init__(self, *, in_features: int, out_features: int, bias: bool, prefix: str = "") -> None:
        super().__init__()
        self.prefix = prefix
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[num_tokens, in_features] to [num_tokens, out_features]."""
        return F.linear(x, self.weight, self.bias)


class Embedding(nn.Module):
    """A table of rows."""

    def __init__(self, *, num_rows: int, dim: int, prefix: str = "") -> None:
        super().__init__()
        self.prefix = prefix
        self.weight = nn.Parameter(torch.empty(num_rows, dim), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        """[num_tokens] int64 to [num_tokens, dim]."""
        return F.embedding(ids, self.weight)


class Norm(nn.Module):
    """RMS norm or layer norm over the last dimension, as the spec says.

    A weight of two dimensions, [num_heads, head_dim], gives every head its own.
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
        if self._is_rms and self.weight is not None and self.weight.dim() == 1:
            return add_rms_norm(x, residual, self.weight, self.eps, alpha=alpha, weight_offset=self.offset)
        total = torch.add(residual, x, alpha=alpha)
        return total, self.forward(total)
