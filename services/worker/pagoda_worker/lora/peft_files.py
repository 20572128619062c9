"""Reads a PEFT checkpoint into scaled matrices by layer. Anything else is refused by name."""

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from pagoda_common.errors import ModelLoadError, OutOfMemory
from pagoda_kernels.lora.add_lora import LoraPart
from pagoda_worker.loader.tensor_file import TensorFile
from pagoda_worker.lora.adapter import apart
from pagoda_worker.lora.peft_config import CONFIG_FILE, read_peft_config
from pagoda_worker.lora.targets import LoraTargets, Target
from pagoda_worker.memory.device import available_memory_bytes

WEIGHTS_FILE = "adapter_model.safetensors"
PICKLED_FILE = "adapter_model.bin"
MAX_HEADER_BYTES = 32 << 20
"""Maximum bytes of the list of tensors. Reading it blocks the worker's other threads, for a third of a second at this
size."""
_KEY = re.compile(r"(?:base_model\.model\.)?(?P<module>.+?)\.lora_(?P<table>embedding_)?(?P<half>[AB])(?:\.[^.]+)?")
_REASONS = (
    ("lora_magnitude_vector", "DoRA is not supported"),
    ("lora_B.bias", "biases of adapters are not supported"),
    ("modules_to_save", "modules_to_save is not supported: modules cannot be replaced as a whole"),
    ("trainable_tokens", "trained tokens are not supported"),
    (".bias", "biases of adapters are not supported"),
)
"""Reason for refusal by a part of a tensor's name."""
_WRAPPED = ".base_layer"
"""Suffix that peft adds to a module's name if another of its parameters is already changed."""


@dataclass(slots=True)
class _Halves:
    """The two matrices of a module, and the names of their tensors."""

    names: dict[str, str] = field(default_factory=dict)
    """By A and B."""
    is_table: bool = False


def read_adapter(
    directory: Path, *, targets: LoraTargets, dtype: torch.dtype, max_rank: int, only: Collection[str] = ()
) -> dict[str, tuple[LoraPart, ...]]:
    """The parts of each layer, in host memory.

    Args:
        dtype: of the model.
        only: last name parts of the modules to use; empty: all modules.

    Raises:
        ModelLoadError: a file is missing or damaged, a tensor does not fit the model, or asks for more than low-rank
            matrices; the message names it.
        OutOfMemory: host memory has no room for it.
    """
    config = read_peft_config(directory)
    path = directory / WEIGHTS_FILE
    if not path.is_file():
        is_pickled = (directory / PICKLED_FILE).is_file()
        hint = f" ({PICKLED_FILE} is there: pickled weights are not read)" if is_pickled else ""
        raise ModelLoadError(f"{directory} has no {WEIGHTS_FILE}{hint}")
    if path.stat().st_size > (available := available_memory_bytes()):
        size = path.stat().st_size / 2**20
        raise OutOfMemory(f"{path} needs {size:.0f} MiB of host memory, {available / 2**20:.0f} MiB are available")
    layers: dict[str, list[LoraPart]] = defaultdict(list)
    with ExitStack() as stack:
        try:
            file = stack.enter_context(TensorFile(path, max_header_bytes=MAX_HEADER_BYTES))
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"cannot read {path}: {error}") from error
        modules = _modules(file)
        if config.extras:
            raise ModelLoadError(f"{directory}: {config.extras[0]}, which is not supported")
        try:
            scales = config.scales_of({module.removesuffix(_WRAPPED) for module in modules})
        except ModelLoadError as error:
            raise ModelLoadError(f"{directory / CONFIG_FILE}: {error.message}") from error
        reader = _Reader(file, scales, targets, dtype, max_rank)
        for module, halves in modules.items():
            if only and module.removesuffix(_WRAPPED).rpartition(".")[2] not in only:
                continue
            if targets.is_ignored(module):
                continue
            for target, part in reader.parts(module, halves):
                layers[target.layer].append(part)
    return {layer: apart(parts) for layer, parts in layers.items()}


def _modules(file: TensorFile) -> dict[str, _Halves]:
    """The matrices by module.

    Raises:
        ModelLoadError: a tensor is not a low-rank matrix, or its other half is missing.
    """
    modules: dict[str, _Halves] = defaultdict(_Halves)
    for name in file.entries:
        match = _KEY.fullmatch(name.removesuffix(".weight"))
        if match is None or any(part in name for part, _ in _REASONS):
            reason = next((why for part, why in _REASONS if part in name), "it is not a matrix of a low-rank adapter")
            raise ModelLoadError(f"{file.path}: {name} cannot be used: {reason}")
        halves = modules[match["module"]]
        halves.names[match["half"]] = name
        halves.is_table = bool(match["table"])
    if not modules:
        raise ModelLoadError(f"{file.path} has no tensors")
    for halves in modules.values():
        if len(halves.names) < 2:
            name = next(iter(halves.names.values()))
            raise ModelLoadError(f"{file.path}: {name} has no other half")
    return modules


class _Reader:
    """Reads the matrices of one module after the other."""

    def __init__(
        self, file: TensorFile, scales: Mapping[str, float], targets: LoraTargets, dtype: torch.dtype, max_rank: int
    ) -> None:
        """`scales`: by module."""
        self._file = file
        self._scales = scales
        self._targets = targets
        self._dtype = dtype
        self._max_rank = max_rank

    def parts(self, module: str, halves: _Halves) -> Iterator[tuple[Target, LoraPart]]:
        """The parts of a module, which may be the module of all experts.

        Raises:
            ModelLoadError: the module is not in the model, or does not fit.
        """
        a, b = (self._read(halves.names[half]) for half in "AB")
        name, owner = halves.names["B"], module.removesuffix(_WRAPPED)
        scale = self._scales[owner]
        if experts := self._targets.experts(owner):
            yield from self._of_experts(name, experts, a, b, scale)
            return
        target = self._targets.find(module)
        if target is None or target.is_table != halves.is_table:
            raise ModelLoadError(
                f"{self._file.path}: {name} cannot be used: the model has no such matrix that adapters can change"
            )
        self._check(name, a, b, target)
        yield from self._scaled(name, target, a, b, scale)

    def _of_experts(
        self, name: str, experts: list[tuple[Target, Target]], a: Tensor, b: Tensor, scale: float
    ) -> Iterator[tuple[Target, LoraPart]]:
        """The parts of a module with the matrices of all experts: a [experts * rank, in], b [out, rank * experts]."""
        count = len(experts)
        fitting = [place for place, target in enumerate(experts[0]) if (a.shape[-1], b.shape[0]) == self._sizes(target)]
        if len(fitting) != 1 or a.shape[0] % count or b.shape[1] != a.shape[0]:
            shapes = f"{list(a.shape)} and {list(b.shape)}"
            raise ModelLoadError(
                f"{self._file.path}: {name} cannot be used: {shapes} fit no matrices of {count} experts"
            )
        each_a = a.reshape(count, -1, a.shape[1])
        each_b = b.reshape(b.shape[0], -1, count).permute(2, 0, 1)
        for index, pair in enumerate(experts):
            target = pair[fitting[0]]
            one_a, one_b = each_a[index], each_b[index]
            if target.is_swapped:
                one_a, one_b = one_b.t(), one_a.t()
            self._check(name, one_a, one_b, target)
            yield from self._scaled(name, target, one_a, one_b, scale)

    @staticmethod
    def _sizes(target: Target) -> tuple[int, int]:
        """Columns of A and rows of B."""
        sizes = target.in_features, target.out_features
        return sizes[::-1] if target.is_swapped else sizes

    def _scaled(
        self, name: str, target: Target, a: Tensor, b: Tensor, scale: float
    ) -> Iterator[tuple[Target, LoraPart]]:
        a, scaled = a.to(self._dtype), (b.float() * scale).to(self._dtype)
        if not bool(a.isfinite().all()) or not bool(scaled.isfinite().all()):
            raise ModelLoadError(f"{self._file.path}: {name} or its other half has numbers that are not finite, scaled")
        for part in self._targets.parts(target, a, scaled):
            yield target, part

    def _read(self, name: str) -> Tensor:
        try:
            tensor = self._file.read(name)
        except OSError as error:
            raise ModelLoadError(str(error)) from error
        if not tensor.is_floating_point() or tensor.dim() != 2:
            form = f"shape {list(tensor.shape)} of {tensor.dtype}"
            raise ModelLoadError(f"{self._file.path}: {name} has {form}, must be a matrix of floats")
        return tensor

    def _check(self, name: str, a: Tensor, b: Tensor, target: Target) -> None:
        rank = a.shape[0]
        if rank > self._max_rank or rank < 1:
            raise ModelLoadError(
                f"{self._file.path}: {name} has rank {rank}, must be between 1 and max_lora_rank, {self._max_rank}"
            )
        wanted = [target.out_features, rank], [rank, target.in_features]
        for tensor, shape in zip((b, a), wanted, strict=True):
            if list(tensor.shape) != shape:
                half = f"{name} and its other half have" if tensor is a else f"{name} has"
                raise ModelLoadError(f"{self._file.path}: {half} shape {list(tensor.shape)}, must be {shape}")
