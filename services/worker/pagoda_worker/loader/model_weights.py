"""ModelWeights: loads a worker's weights, moves them out of device memory, and replaces them. Knows tensors and
checkpoints; no requests, no gRPC."""

import gc
from collections.abc import Iterator
from dataclasses import replace

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from pagoda_common.config.checkpoint.weights_source import WeightsSource
from pagoda_common.config.engine_config import ModelConfig
from pagoda_common.config.quantization import OnlineQuantization, parse_quantization
from pagoda_common.errors import ModelLoadError, OutOfMemory
from pagoda_common.process.memory import trim_memory
from pagoda_worker.loader.build import ModelBuilder
from pagoda_worker.loader.checkpoint import Checkpoint, open_checkpoint
from pagoda_worker.loader.formats.choose import stored_format
from pagoda_worker.loader.formats.stored_format import StoredFormat
from pagoda_worker.loader.weights import Progress, fill_constants, fill_dummy_weights, load_weights
from pagoda_worker.memory.device import available_memory_bytes, quantizes_inputs
from pagoda_worker.models.layers import Matrix
from pagoda_worker.models.model import Model
from pagoda_worker.models.quantized_method import LinearMethods

HOST = torch.device("cpu")
META = torch.device("meta")


class ModelWeights:
    """The parameters of one model on one device. One caller at a time, except that `prepare` may run concurrently."""

    def __init__(
        self, *, model: Model, config: ModelConfig, dtype: torch.dtype, device: torch.device, builder: ModelBuilder
    ) -> None:
        """
        Args:
            model: this rank's part, on the meta device; `reload` loads its first weights.
            builder: the builder of `model`.
        """
        self._builder = builder
        self._config = config
        self._dtype = dtype
        self._device = device
        self._model = model
        asked = parse_quantization(config.quantization)
        online = asked if isinstance(asked, OnlineQuantization) else None
        self._methods = LinearMethods(
            online=online,
            dtype=dtype,
            device=device,
            quantizes_inputs=quantizes_inputs(config.activation_quantization, dtype, device),
        )
        self._set_methods(model)
        self._in_host: dict[str, Tensor] = {}
        """Parameters that are kept in host memory, by name."""
        self._prepared: tuple[WeightsSource, Model] | None = None
        self._base = WeightsSource(model=config.model, revision=config.revision)
        self._source = self._base

    @property
    def source(self) -> WeightsSource | None:
        """Source of the weights; None: the model's own checkpoint."""
        return None if self._source == self._base else self._source

    @property
    def prepared_source(self) -> WeightsSource | None:
        """Source of the weights that `prepare` has read; None: none."""
        return None if self._prepared is None else self._prepared[0]

    @property
    def _is_missing(self) -> bool:
        """Whether the weights are not on the device."""
        return any(parameter.is_meta for parameter in self._model.parameters())

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights, on device or host."""
        return sum(parameter.numel() * parameter.element_size() for parameter in self._model.parameters())

    @property
    def whole(self) -> Model:
        """The whole model of all ranks, without weights; the model itself for one rank."""
        return self._builder.build_whole(self._model)

    def leave_device(self, *, level: int) -> int:
        """Free the device's memory: move weights to host memory with level 1, unless the device uses host memory; else
        drop them.

        Returns:
            Bytes freed on the device.
        """
        self.forget_prepared()
        self._model.release_kernels()
        freed = 0
        for name, module, leaf, parameter in list(_parameters(self._model)):
            if parameter.is_meta:
                continue
            freed += parameter.numel() * parameter.element_size()
            if level == 1 and self._device.type != "cpu":
                self._in_host[name] = parameter.data.to(HOST)
            empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=META)
            setattr(module, leaf, nn.Parameter(empty, requires_grad=False))
        if level != 1:
            self._in_host.clear()
        release_memory(self._device)
        return freed

    def come_back(self, progress: Progress) -> None:
        """Undo `leave_device`: restore weights from host memory, else from the checkpoint. No-op if they are on the
        device.

        Raises:
            ModelLoadError: the checkpoint has changed.
            OutOfMemory: the device has no room for them.
        """
        if self._in_host:
            self._put(self._in_host)
        elif self._is_missing:
            self._fill(self._source, progress)

    def prepare(self, source: WeightsSource, progress: Progress) -> None:
        """Read other weights into host memory, and check them against the model.

        Raises:
            ModelLoadError: the weights are missing, damaged, or of another model; the message names file, field or
            tensor. OutOfMemory: host memory has no room for them.
        """
        self.forget_prepared()
        available = available_memory_bytes()
        if self.num_bytes > available:
            raise OutOfMemory(
                f"the weights of {source.model} need {self.num_bytes / 2**20:.0f} MiB of host memory beside those in "
                f"use, {available / 2**20:.0f} MiB are available"
            )
        model = self._builder.build()
        self._set_methods(model)
        self._read(source, model, HOST, progress)
        self._prepared = source, model

    def forget_prepared(self) -> None:
        """Drop the prepared weights."""
        if self._prepared is not None:
            self._prepared = None
            release_memory(HOST)

    def reload(self, source: WeightsSource | None, progress: Progress) -> None:
        """Change to the weights of `source` (None: the model's own); weights that were not prepared are read first.

        Raises:
            ModelLoadError, OutOfMemory: as `prepare`; the old weights stay.
        """
        source = source or self._base
        if self._prepared is not None and self._prepared[0] == source:
            pass
        elif source == self._source:
            self.come_back(progress)
            return
        elif self._is_missing and not self._in_host:  # nothing that could stay: straight to the device
            self._fill(source, progress)
            self._source = source
            return
        else:
            self.prepare(source, progress)
        assert self._prepared is not None, "prepare() has read them"
        model, self._prepared = self._prepared[1], None
        self._in_host = {}
        for layer, other in zip(_matrices(self._model), _matrices(model), strict=True):
            layer.take_form(other)
        self._put(dict(model.named_parameters()))
        self._source = source
        del model
        release_memory(self._device)

    def _set_methods(self, model: Model) -> None:
        """Convert the matrices of a model on the meta device to the form of the device's kernels."""
        model.cast(self._dtype)
        for layer in _matrices(model):
            layer.method = self._methods.of_floats(layer)
            layer.begin_loading(self._dtype)
            layer.finish_loading()

    def _fill(self, source: WeightsSource, progress: Progress) -> None:
        """Read weights to the device, all or none."""
        try:
            self._read(source, self._model, self._device, progress)
        except BaseException:
            self.leave_device(level=2)
            for layer in _matrices(self._model):
                layer.finish_loading()
            raise

    def _put(self, tensors: dict[str, Tensor]) -> None:
        """Move host tensors to parameters, one by one, emptying `tensors`."""
        self._model.release_kernels()
        try:
            for name, module, leaf, parameter in list(_parameters(self._model)):
                if name not in tensors:
                    continue
                tensor = tensors[name].detach()
                if parameter.is_meta or self._device.type == "cpu":
                    setattr(module, leaf, nn.Parameter(tensor.to(self._device), requires_grad=False))
                else:
                    parameter.data.copy_(tensor)
                del tensors[name]
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise OutOfMemory(f"the device has no room for the weights: {error}") from error

    def _read(self, source: WeightsSource, model: Model, device: torch.device, progress: Progress) -> None:
        """Fill a model on the meta device. After a failure, some matrices are not in their final form."""
        for layer in _matrices(model):
            layer.method = self._methods.of_floats(layer)
            layer.begin_loading(self._dtype)
        self._read_parameters(source, model, device, progress)
        fill_constants(model, device=device)
        for layer in _matrices(model):
            layer.finish_loading()

    def _read_parameters(self, source: WeightsSource, model: Model, device: torch.device, progress: Progress) -> None:
        config = self._config
        if source != self._base:
            config = replace(config, model=source.model, revision=source.revision, load_format="auto")
        elif config.load_format == "dummy":
            fill_dummy_weights(model, self._builder.build_whole(model), device=device, seed=config.seed)
            return
        checkpoint = open_checkpoint(config)
        if source != self._base:
            _check_same(self._builder.of(checkpoint.config).build(), model, checkpoint)
        found = stored_quantization(config, checkpoint)
        files = checkpoint.weight_files()
        try:
            load_weights(
                model,
                self._builder.build_whole(model),
                files,
                device=device,
                progress=progress,
                methods=self._methods,
                stored=None if found is None else found[1],
            )
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise OutOfMemory(f"no memory for the weights of {config.model}: {error}") from error
        except (OSError, SafetensorError) as error:  # halfway through a file
            raise ModelLoadError(f"cannot read the weights of {config.model}: {error}") from error


def stored_quantization(config: ModelConfig, checkpoint: Checkpoint) -> tuple[str, StoredFormat | None] | None:
    """The method of a checkpoint's quantized matrices and their format (None: their file says it); None: it has floats.

    Raises:
        ModelLoadError: the method is not supported, or differs from --quantization.
    """
    asked = parse_quantization(config.quantization)
    found = stored_format(checkpoint.config)
    method = None if found is None else found[0]
    is_online = (
        isinstance(asked, OnlineQuantization)
        and found is not None
        and found[1] is not None
        and not found[1].makes_floats
    )
    if is_online or (isinstance(asked, str) and asked != method):
        what = "floats" if method is None else f"quantized with {method} already"
        raise ModelLoadError(
            f"quantization is {config.quantization!r}, the weights of {checkpoint.directory} are {what}",
            field="quantization",
        )
    return found


def _check_same(model: Model, served: Model, checkpoint: Checkpoint) -> None:
    """Check that a checkpoint is of the served model.

    Raises:
        ModelLoadError: it is not; the message names what differs.
    """
    theirs = {"architecture": model.architecture, **model.identity}
    ours = {"architecture": served.architecture, **served.identity}
    for name in (*ours, *(theirs.keys() - ours.keys())):
        if theirs.get(name) != ours.get(name):
            raise ModelLoadError(
                f"{checkpoint.directory} is of another model: {name} is {_shown(theirs.get(name))}, the served one has "
                f"{_shown(ours.get(name))}",
                field=name,
            )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "…"


def _matrices(model: Model) -> Iterator[Matrix]:
    return (module for module in model.modules() if isinstance(module, Matrix))


def _parameters(model: Model) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Dotted name, owner, last part of the name, parameter."""
    for prefix, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            yield f"{prefix}.{leaf}".lstrip("."), module, leaf, parameter


def release_memory(device: torch.device) -> None:
    """Return unused memory to the machine."""
    gc.unfreeze()  # a model that is given up may have been kept out of collections
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    trim_memory()
