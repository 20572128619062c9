"""Replaces a transformers module's stacked experts by Pagoda's layers. Knows their forms; no routers."""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pagoda_kernels.layers.act_and_mul import ACTIVATIONS, act_and_mul_reference
from pagoda_kernels.moe.experts import (
    ExpertWeights,
    GroupedExperts,
    RoutedExperts,
    mixture_reference,
    routed_experts,
)
from pagoda_worker.models.transformers_model.attention import CURRENT, Probe
from pagoda_worker.models.transformers_model.hosted_layers import HostedLinear

UP, DOWN = ("gate_up_proj", "up_proj"), "down_proj"
"""transformers' names of stacked matrices, with a gate or without."""
FORM = ("has_gate", "has_bias", "is_transposed", "has_post_expert_norm")
"""Attributes of modules whose form transformers' own experts implementations rely on."""


class HostedExperts(nn.Module):
    """Experts of a mixture, with `up` and `down` of each as separate layers. The module's router chooses and weights.

    Uses one kernel if there is one: in bfloat16 on a CPU, on a GPU with plain matrices. Else plain operations, expert
    by expert. Either way, a chosen expert is read once per step.
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
        self._activation = find_activation(module) if self._has_gate else None
        self._kernel: RoutedExperts | GroupedExperts | None = None
        self._is_bound = False
        """Whether a kernel was already looked up for the current weights."""

    def __getattr__(self, name: str) -> Any:
        """An attribute of this module, else of the replaced one, such as the number of experts."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_module")
            if module is None:
                raise
            return getattr(module[0], name)

    def stacked(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """transformers' names of stacked parameters, and the names of each expert's parameters."""
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
        if not self._is_bound:
            self._bind(x.dtype)
        rows = x.reshape(-1, x.shape[-1])
        weights, chosen = weights.reshape(len(rows), -1), chosen.reshape(len(rows), -1)
        if self._kernel is None:
            output = mixture_reference(rows, weights, chosen, self._each())
        else:
            # Some routers count on past the last expert for a choice that computes nothing.
            is_there = (chosen >= 0) & (chosen < len(self.experts))
            output = self._kernel(rows, weights.float() * is_there, torch.where(is_there, chosen, 0))
        return output.to(x.dtype).view(x.shape)

    def release_kernels(self) -> None:
        """Release weights that are about to be replaced."""
        self._kernel, self._is_bound = None, False

    def _bind(self, dtype: torch.dtype) -> None:
        """Look up the kernel for the current weights."""
        self._is_bound = True
        if self._activation is None:
            return
        found: list[ExpertWeights] = []
        for pair in self.experts:
            up, down = pair["up"].fused_weights(), pair["down"].fused_weights()  # type: ignore[index]  # a ModuleDict
            if up is None or down is None:
                return
            found.append(ExpertWeights(gate_up=up, down=down))
        self._kernel = routed_experts(found, activation=self._activation, dtype=dtype)

    def _each(self) -> list[Any]:
        return [self._expert(pair) for pair in self.experts]

    def _expert(self, pair: Any) -> Any:
        module: Any = self._module[0]

        def run(x: Tensor) -> Tensor:
            up = pair["up"](x)
            gated: Tensor = module._apply_gate(up) if self._has_gate else module.act_fn(up)
            return pair["down"](gated)  # type: ignore[no-any-return]  # torch: Module calls are Any

        return run


def find_activation(module: Any) -> str | None:
    """The kernel's gate that a module computes, tested with some values; None: another gate or order."""
    far = torch.tensor([-1e5, -1e3, -50.0, 50.0, 1e3, 1e5], dtype=torch.float64, device="cpu")
    gate = torch.cat([torch.linspace(-12, 12, 97, dtype=torch.float64, device="cpu"), far])
    values = torch.stack([torch.cat([gate, gate.roll(shift) + shift]) for shift in (-7, 1, 40)])
    try:
        with torch.inference_mode():
            actual = module._apply_gate(values)
    except Exception:  # whatever modules raise
        return None
    if actual.is_meta or actual.shape != (len(values), len(gate)):
        return None
    for name in ACTIVATIONS:
        if torch.allclose(act_and_mul_reference(values, name), actual.double(), rtol=1e-9, atol=1e-9):
            return name
    return None


def host_experts(model: nn.Module, *, prefix: str) -> None:
    """Replace stacked experts."""
    for name, module in list(model.named_modules()):
        if can_host(module):
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, HostedExperts(module, prefix=f"{prefix}{name}"))


def can_host(module: nn.Module) -> bool:
    """Whether a module's experts have a form that transformers' own experts implementations support."""
    if not all(hasattr(module, name) for name in FORM) or getattr(module, "has_post_expert_norm", True):
        return False
    names = {name for name in UP if name in module._parameters}
    expected = {*names, DOWN} | ({f"{name}_bias" for name in (*names, DOWN)} if module.has_bias else set())
    arguments = inspect.signature(type(module).forward).parameters
    return len(names) == 1 and set(module._parameters) == expected and len(arguments) == 4
