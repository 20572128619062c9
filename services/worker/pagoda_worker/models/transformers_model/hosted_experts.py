"""Pagoda's matrices in the places of a transformers module's stacked experts. Knows their forms; no routers."""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pagoda_kernels.moe.experts import mixture_reference
from pagoda_worker.models.transformers_model.attention import CURRENT, Probe
from pagoda_worker.models.transformers_model.hosted_layers import HostedLinear

UP, DOWN = ("gate_up_proj", "up_proj"), "down_proj"
"""What transformers calls stacked matrices: with a gate or without; and back."""
FORM = ("has_gate", "has_bias", "is_transposed", "has_post_expert_norm")
"""Attributes of modules whose form transformers' own experts implementations rely on."""


class HostedExperts(nn.Module):
    """Experts of a mixture: `up` and `down` of each as a layer of its own. The module's router chooses and weighs.

    Plain operations, one expert after the other: each expert that a token has is read once a step.
    """

    def __init__(self, module: nn.Module, *, prefix: str) -> None:
        """`module`: one that `can_host`; its gate and activation stay in use."""
        super().__init__()
        self._module = (module,)  # in a tuple: its parameters are no part of this module
        self._arguments = inspect.signature(type(module).forward)
        self.up_name = next(name for name in UP if name in module._parameters)
        self._has_gate, self._is_transposed = bool(module.has_gate), bool(module.is_transposed)
        num_experts, *up = module.get_parameter(self.up_name).shape
        down = list(module.get_parameter(DOWN).shape[1:])
        if self._is_transposed:
            up.reverse()
            down.reverse()
        self.experts = nn.ModuleList()
        for index in range(num_experts):
            pair = nn.ModuleDict()
            for name, (rows, columns) in (("up", up), ("down", down)):
                pair[name] = HostedLinear(
                    in_features=columns,
                    out_features=rows,
                    bias=bool(module.has_bias),
                    prefix=f"{prefix}.{index}.{name}",
                )
            self.experts.append(pair)
        module._parameters.clear()

    def __getattr__(self, name: str) -> Any:
        """Its own, else what the module has: others may ask for the number of experts."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_module")
            if module is None:
                raise
            return getattr(module[0], name)

    def stacked(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Names of stacked parameters as transformers has them, and of those of each expert that hold them."""
        first: Any = self.experts[0]
        for stacked, name in ((self.up_name, "up"), (DOWN, "down")):
            for suffix, leaf in (("", "weight"), ("_bias", "bias")):
                if getattr(first[name], leaf) is not None:
                    places = (f"experts.{index}.{name}.{leaf}" for index in range(len(self.experts)))
                    yield stacked + suffix, tuple(places)

    def split(self, stacked: Tensor) -> list[Tensor]:
        """One tensor for each expert, of a stacked one."""
        return [part.t() if self._is_transposed and part.dim() == 2 else part for part in stacked.unbind(0)]

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """[num_tokens, hidden_size] to the same, with the router's indices and weights, [num_tokens, top_k]."""
        bound = self._arguments.bind(self, *args, **kwargs).arguments
        x, chosen, weights = list(bound.values())[1:4]
        if isinstance(CURRENT.running, Probe):
            return torch.zeros_like(x)
        rows = x.reshape(-1, x.shape[-1])
        output = mixture_reference(rows, weights.reshape(len(rows), -1), chosen.reshape(len(rows), -1), self._each())
        return output.to(x.dtype).view(x.shape)

    def _each(self) -> list[Any]:
        return [self._expert(pair) for pair in self.experts]

    def _expert(self, pair: Any) -> Any:
        module: Any = self._module[0]

        def run(x: Tensor) -> Tensor:
            up = pair["up"](x)
            gated: Tensor = module._apply_gate(up) if self._has_gate else module.act_fn(up)
            return pair["down"](gated)  # type: ignore[no-any-return]  # torch: Module calls are Any

        return run


def host_experts(model: nn.Module, *, prefix: str) -> None:
    """Replace stacked experts."""
    for name, module in list(model.named_modules()):
        if can_host(module):
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, HostedExperts(module, prefix=f"{prefix}{name}"))


def can_host(module: nn.Module) -> bool:
    """Whether a module holds experts in a form that transformers' own experts implementations know."""
    if not all(hasattr(module, name) for name in FORM) or getattr(module, "has_post_expert_norm", True):
        return False
    names = {name for name in UP if name in module._parameters}
    expected = {*names, DOWN} | ({f"{name}_bias" for name in (*names, DOWN)} if module.has_bias else set())
    arguments = inspect.signature(type(module).forward).parameters
    return len(names) == 1 and set(module._parameters) == expected and len(arguments) == 4
