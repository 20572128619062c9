"""Replaces transformers' norms by Pagoda's, and lets projections add residuals. Knows modules; no checkpoints.

Most encoders end each half of a layer with LayerNorm(dense(x) + input). The product adds the input to its sums, which
saves one pass over memory and one rounding.
"""

from typing import Any

import torch
from torch import Tensor, nn

from pagoda_kernels.layers.layer_norm import layer_norm
from pagoda_worker.models.encoders.module_source import does
from pagoda_worker.models.transformers_model.hosted_layers import HostedLinear

_ENDING = (
    "hidden_states = self.dense(hidden_states)",
    "hidden_states = self.dropout(hidden_states)",
    "hidden_states = self.LayerNorm(hidden_states + input_tensor)",
    "return hidden_states",
)
"""BertSelfOutput, BertOutput and their copies."""


class HostedLayerNorm(nn.LayerNorm):
    """A layer norm as a kernel."""

    def forward(self, input: Tensor) -> Tensor:
        """See nn.LayerNorm."""
        return layer_norm(input, self.weight, self.bias, self.eps)


def host_norms(model: nn.Module) -> None:
    """Replace layer norms over the last dimension, and add residuals in modules that do nothing else."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.LayerNorm and child.weight is not None and len(child.normalized_shape) == 1:
                setattr(module, name, _hosted(child))
        if isinstance(getattr(module, "dense", None), HostedLinear) and does(module, _ENDING):
            module.forward = _Ending(module)


def _hosted(norm: nn.LayerNorm) -> HostedLayerNorm:
    with torch.device("meta"):
        hosted = HostedLayerNorm(norm.normalized_shape, eps=norm.eps)
    hosted.weight, hosted.bias = norm.weight, norm.bias
    return hosted.eval().requires_grad_(False)


class _Ending:
    """The forward of such a module, without dropout."""

    def __init__(self, module: Any) -> None:
        self._dense, self._norm = module.dense, module.LayerNorm

    def __call__(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        rows = input_tensor.reshape(-1, input_tensor.shape[-1])
        out: Tensor = self._norm(self._dense(hidden_states, rows))
        return out
