"""Replaces transformers' activation modules by Pagoda's kernels. Knows modules; no checkpoints."""

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from pagoda_kernels.layers.activate import activate
from pagoda_kernels.linear.packed_gelu_linear import packed_gelu_linear
from pagoda_worker.models.encoders.module_source import does
from pagoda_worker.models.layers import ACTIVATION_NAMES
from pagoda_worker.models.linear_method import PACKED
from pagoda_worker.models.transformers_model.hosted_layers import HostedLinear

_UP = (
    "hidden_states = self.dense(hidden_states)",
    "hidden_states = self.intermediate_act_fn(hidden_states)",
    "return hidden_states",
)
"""BertIntermediate and its copies."""


class HostedActivation(nn.Module):
    """An activation with a kernel, by its name there."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        """Apply the activation to a tensor of any shape."""
        return activate(x, self.name)


class _Up:
    """The forward of a projection followed by GELU, as one kernel if there is one."""

    def __init__(self, module: Any) -> None:
        self._dense: HostedLinear = module.dense
        self._act = HostedActivation("gelu")

    def __call__(self, hidden_states: Tensor) -> Tensor:
        dense = self._dense
        if dense.method is not PACKED or dense.lora is not None:
            out: Tensor = self._act(dense(hidden_states))
            return out
        rows = hidden_states.reshape(-1, dense.columns)
        made = packed_gelu_linear(rows, dense.weight, dense.rows, bias=dense.bias)
        return made.view(*hidden_states.shape[:-1], dense.rows)


def host_activations(model: PreTrainedModel) -> None:
    """Replace activations that have a kernel, and projections with GELU; call it after `host_layers`."""
    for module in model.modules():
        act = getattr(module, "intermediate_act_fn", None)
        if isinstance(getattr(module, "dense", None), HostedLinear) and does(module, _UP):
            is_gelu = type(act) is type(ACT2FN["gelu"])
            module.forward = _Up(module) if is_gelu else module.forward
    kernels = {type(ACT2FN[name]): kernel for name, kernel in ACTIVATION_NAMES.items() if name in ACT2FN}
    for name, module in list(model.named_modules()):
        kernel = kernels.get(type(module))
        if kernel is not None and name:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, HostedActivation(kernel))
