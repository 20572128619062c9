"""HostedModel: base class of models that run a transformers module. Knows no attention and no steps."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pagoda_worker.models.model import Model
from pagoda_worker.models.transformers_model.names import backbone_weights
from pagoda_worker.models.weights import WeightNames

VOLATILE = frozenset({"_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "use_cache"})
"""Entries of config.json without effect on a model's computation."""


class HostedModel(Model):
    """A transformers module: its parameters come from checkpoints, its buffers from the module."""

    backbone: PreTrainedModel

    def take_buffers(self) -> None:
        """Turn persistent buffers into parameters, which a checkpoint may fill."""
        self._constants: dict[str, Tensor] = {}
        for name, module in self.backbone.named_modules():
            for leaf, buffer in list(module.named_buffers(recurse=False)):
                if leaf in module._non_persistent_buffers_set or not buffer.is_floating_point():
                    continue
                delattr(module, leaf)
                module.register_parameter(leaf, nn.Parameter(buffer.to("meta"), requires_grad=False))
                self._constants[f"{name}.{leaf}".lstrip(".")] = buffer

    @property
    def identity(self) -> Mapping[str, object]:
        """config.json, completed with transformers' defaults."""
        options = {"model_type": None} | self.backbone.config.to_dict()  # first: it says the most
        return {name: value for name, value in options.items() if name not in VOLATILE}

    @property
    def what_waits(self) -> str | None:
        """See Model."""
        return "modules of transformers run one after the other"

    def weights(self, stored: Collection[str]) -> WeightNames:
        """See Model, by this module's names."""
        buffers = frozenset(name for name, _ in self.backbone.named_buffers())
        return backbone_weights(self.backbone, stored, buffers, self._constants).within("backbone.")

    @property
    def constants(self) -> Mapping[str, Tensor]:
        """See Model."""
        return {f"backbone.{name}": value for name, value in self._constants.items()}

    def dummy_value(self, parameter: str) -> float | None:
        """Norms are ones, biases zeros; other values are computed by the modules."""
        if parameter.endswith("bias"):
            return 0.0
        return 1.0 if "norm" in parameter.lower() or "ln_" in parameter else None

    def cast(self, dtype: torch.dtype) -> None:
        """See Model; parameters that transformers keeps in float32 stay so, as do buffers."""
        strict = list(self.backbone._keep_in_fp32_modules_strict or ())
        if dtype == torch.float16:
            strict += list(self.backbone._keep_in_fp32_modules or ())
        for name, module in self.named_modules():
            for leaf, parameter in list(module.named_parameters(recurse=False)):
                if parameter.is_floating_point() and not any(part in f"{name}.{leaf}" for part in strict):
                    setattr(module, leaf, nn.Parameter(parameter.to(dtype), requires_grad=False))

    def prepare(self, *, max_model_len: int, device: torch.device) -> None:
        """Move buffers to the device."""
        for module in self.backbone.modules():
            for leaf, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, leaf, buffer.to(device))
