"""Which models ranks, LoRA and integers work with: seen on the meta device, where nothing is computed."""

import json
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from transformers.pytorch_utils import Conv1D

from pagoda_common.errors import PagodaError
from pagoda_worker.loader.build import ModelBuilder
from pagoda_worker.lora.targets import LoraTargets
from pagoda_worker.models.latent_attention import LatentUp
from pagoda_worker.models.layers import Matrix
from pagoda_worker.models.model import BuildConfig, Model
from pagoda_worker.parallel.tensor_parallel import ALONE, TensorParallel

ALL, NONE = "yes", "no"
NUM_RANKS = 2


@dataclass(frozen=True, slots=True)
class Abilities:
    """Of a model: `yes`, `no`, or what is left out."""

    ranks: str
    """Tensor parallelism."""
    adapters: str
    """Matrices that LoRA may change."""
    integers: str
    """Matrices that int8 and int4 hold."""


def abilities_of(directory: Path, model: nn.Module) -> Abilities:
    """Of the checkpoint that transformers has written of `model`.

    Raises:
        PagodaError: it is not served.
    """
    config = BuildConfig(checkpoint=json.loads((directory / "config.json").read_text()))
    ours = ModelBuilder(config=config, parallel=ALONE).build()
    return Abilities(_ranks(config), _adapters(ours, model), _integers(ours))


def _ranks(config: BuildConfig) -> str:
    try:
        ModelBuilder(config=config, parallel=TensorParallel(rank=0, world_size=NUM_RANKS)).build()
    except PagodaError:
        return NONE
    return ALL


def _adapters(ours: Model, model: nn.Module) -> str:
    targets = LoraTargets(model=ours, whole=ours, names=ours.weights(()))
    left_out, num_taken = dict[str, None](), 0
    for name, module in model.named_modules():
        if targets.is_ignored(name) or not (isinstance(module, nn.Linear | Conv1D) or _is_stacked(module)):
            continue
        is_taken = _takes_experts(targets, name, module) if _is_stacked(module) else targets.find(name) is not None
        num_taken += is_taken
        if not is_taken:
            left_out["experts" if _is_stacked(module) else name.rpartition(".")[2]] = None
    return _said(list(left_out), num_taken)


def _takes_experts(targets: LoraTargets, name: str, module: nn.Module) -> bool:
    """Whether what peft makes for stacked experts, [num_experts, out, in] but where they say that they are transposed,
    fits."""
    found = {
        (target.in_features, target.out_features) if target.is_swapped else (target.out_features, target.in_features)
        for pair in targets.experts(name)[:1]
        for target in pair
    }
    shapes = [tuple(parameter.shape[1:]) for parameter in module.parameters(recurse=False) if parameter.dim() == 3]
    is_transposed = getattr(module, "is_transposed", False)
    return all((shape[::-1] if is_transposed else shape) in found for shape in shapes)


def _integers(ours: Model) -> str:
    left_out, num_taken = dict[str, None](), 0
    for module in ours.modules():
        if isinstance(module, LatentUp):
            left_out["kv_b_proj"] = None
        elif isinstance(module, Matrix):
            num_taken += module.is_multiplied
        elif _is_stacked(module):
            left_out["experts"] = None
    return _said(list(left_out), num_taken)


def _is_stacked(module: nn.Module) -> bool:
    """Whether it has matrices of several experts in one parameter."""
    has_stack = any(parameter.dim() == 3 for parameter in module.parameters(recurse=False))
    return has_stack and "expert" in type(module).__name__.lower()


def _said(left_out: list[str], num_taken: int) -> str:
    if not num_taken:
        return NONE
    return f"not {', '.join(left_out)}" if left_out else ALL
