"""Fills a model that was built on the meta device: from safetensors, or with random weights by seed."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from pagoda_common.errors import ModelLoadError
from pagoda_kernels.linear.quantized_matrix import QuantizedMatrix
from pagoda_worker.loader.formats.integers import alike, repeated
from pagoda_worker.loader.formats.stored_format import StoredFormat
from pagoda_worker.loader.gguf_file import GgufWeights, gguf_matrices
from pagoda_worker.loader.mistral_tensors import is_mistral, mistral_tensors
from pagoda_worker.loader.read_buffers import ReadBuffers
from pagoda_worker.loader.stored import InBuffers, Stored, StoredTensor, drop_empty_biases, join_quantized
from pagoda_worker.loader.tensor_file import TensorFile, read_ahead
from pagoda_worker.models.layers import Matrix
from pagoda_worker.models.model import Model, WeightSharding
from pagoda_worker.models.quantized_method import LinearMethods
from pagoda_worker.models.weights import MadeWeights, WeightNames, WeightSource

logger = logging.getLogger(__name__)

Progress: TypeAlias = Callable[[int, int], None]
"""Called with bytes read and bytes to read."""

UNSCALED = ("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8")
"""Data types, as safetensors calls them, of which no parameter is."""
MAX_NAMED = 8
"""Tensors named in one error message."""


def load_weights(
    model: Model,
    whole: Model,
    files: list[Path],
    *,
    device: torch.device,
    progress: Progress,
    methods: LinearMethods,
    stored: StoredFormat | None = None,
) -> None:
    """Read every tensor into the parameter (or its rows) that it fills, the next ones while one is packed or quantized.

    Args:
        model: this rank's part; only what it holds is read.
        whole: what all ranks hold together, without weights.
        methods: how layers hold what is stored as integers.
        stored: how that is; None: all is stored as floats.

    Raises:
        ModelLoadError: a file is damaged; tensors are missing, unexpected or of the wrong shape (they are named).
    """
    with ExitStack() as stack:
        entries = _index(files, stack, stored)
        names = model.weights(entries)
        found: dict[str, Stored] = {_strip(name, names.prefixes): entry for name, entry in entries.items()}
        for name, other in names.aliases.items():
            if name not in found and other in found:
                found[name] = found[other]
        if stored is not None:
            drop_empty_biases(found, names.sources)
        problems = _problems(names, found)
        if problems:
            raise ModelLoadError(f"{files[0].parent} does not fit {model.architecture}; {'; '.join(problems)}")
        _check_shapes(whole, names, found)
        _check_types(names, found)
        made = [name for source in names.made for name in source.names]
        total = sum(found[name].num_bytes for name in [*made, *(source.name for source in names.sources)])
        loaded = 0
        filler = _Filler(model, whole, names, device=device, methods=methods)
        buffers = ReadBuffers()
        stored_values = read_ahead([InBuffers(found[source.name], buffers) for source in names.sources])
        for source in names.sources:
            is_transposed = source.is_transposed and isinstance(found[source.name], StoredTensor)
            value = next(stored_values)
            filler.fill(replace(source, is_transposed=is_transposed), value)
            buffers.give_back(value)  # all of it was copied
            loaded += found[source.name].num_bytes
            progress(loaded, total)
        for several in names.made:
            parts = [found[name] for name in several.names]
            filler.make(several, [_floats(part) for part in parts])
            loaded += sum(part.num_bytes for part in parts)
            progress(loaded, total)
        if filler.num_dequantized:
            logger.warning(
                "%d quantized matrices are held as %s: no kernel of %s reads them as they are",
                filler.num_dequantized,
                filler.float_name,
                device.type,
            )


class _Filler:
    """Gives one parameter after the other its memory and its values, and finishes it once all its parts are there: a
    model that is to be packed or quantized is never in memory as it is stored."""

    def __init__(
        self,
        model: Model,
        whole: Model,
        names: WeightNames,
        *,
        device: torch.device,
        methods: LinearMethods,
    ) -> None:
        self._model = model
        self._device = device
        self._methods = methods
        self._num_missing = Counter(source.parameter for source in names.sources)
        self._num_missing.update(parameter for source in names.made for parameter in source.parameters)
        self._shapes = {name: list(parameter.shape) for name, parameter in whole.named_parameters()}
        self._num_rows = {name: _num_rows(parameter) for name, parameter in whole.named_parameters()}
        self._integers: dict[str, list[tuple[WeightSource, QuantizedMatrix]]] = {}
        """Parts that are there, of parameters that are all integers so far."""
        self.num_dequantized = 0
        """Parameters that are stored as integers and held as floats."""
        self.float_name = ""
        """Data type of the last one of those."""

    def make(self, source: MadeWeights, tensors: list[Tensor]) -> None:
        """Parameters that are made of several tensors.

        Raises:
            ModelLoadError: what is made does not fit.
        """
        made = source.make(tensors)
        for name in source.parameters:
            value = made.get(name)
            shape = [] if value is None else list(value.shape)
            if value is None or _num_rows(value) != self._num_rows[name] or shape[1:] != self._shapes[name][1:]:
                raise ModelLoadError(
                    f"{', '.join(source.names)} make {name} of shape {shape}, must be {self._shapes[name]}"
                )
            self.fill(WeightSource(name=source.names[0], parameter=name), value)

    def fill(self, source: WeightSource, value: Tensor | QuantizedMatrix) -> None:
        """One part of a parameter."""
        name = source.parameter
        owner, _, leaf = name.rpartition(".")
        layer = self._model.get_submodule(owner)
        self._num_missing[name] -= 1
        if isinstance(value, QuantizedMatrix):
            self._integers.setdefault(name, []).append((source, value))
        else:
            self._copy(layer, leaf, source, in_order(value, source))
        if self._num_missing[name]:
            return
        parts = self._integers.pop(name, [])
        if parts and isinstance(layer, Matrix) and not self._hold(layer, parts):
            self.num_dequantized += not self._methods.is_online
            self.float_name = str(layer.dtype).removeprefix("torch.")
            for part, matrix in parts:
                self._copy(layer, leaf, part, in_order(matrix.dequantize(), replace(part, is_transposed=False)))
        if isinstance(layer, Matrix) and leaf == "weight":
            layer.finish_loading()

    def _copy(self, layer: nn.Module, leaf: str, source: WeightSource, tensor: Tensor) -> None:
        _copy_into(layer, leaf, tensor, source, self._model.sharding, self._num_rows[source.parameter], self._device)

    def _hold(self, layer: Matrix, parts: list[tuple[WeightSource, QuantizedMatrix]]) -> bool:
        """Have a layer take integers, if a kernel reads them: of the kind that all its parts can have."""
        if self._methods.is_online:
            return False  # floats, for other integers
        matrices = alike([matrix for _, matrix in parts])
        kinds = {(matrix.bits, matrix.group_size, matrix.numbers.shape[1]) for matrix in matrices}
        method = self._methods.of_integers(matrices[0])
        bits, group_size, num_inputs = next(iter(kinds))
        is_whole = layer.columns % group_size == 0 or (group_size >= num_inputs and num_inputs % layer.columns == 0)
        if method is None or len(kinds) > 1 or not is_whole or not layer.weight.is_meta:
            return False
        group_size = min(group_size, layer.columns)
        device = self._device
        groups, has_zeros = -(-layer.columns // group_size), any(matrix.zeros is not None for matrix in matrices)
        joined = QuantizedMatrix(
            numbers=torch.empty(layer.rows, layer.columns, dtype=torch.int8, device=device),
            scales=torch.empty(layer.rows, groups, device=device),
            zeros=torch.zeros(layer.rows, groups, device=device) if has_zeros else None,
            bits=bits,
            group_size=group_size,
        )
        for (source, _), matrix in zip(parts, matrices, strict=True):
            kept, num_rows = replace(source, is_transposed=False), self._num_rows[source.parameter]
            if matrix.scales.shape[1] == 1:  # of all inputs: each rank's as well
                matrix = repeated(matrix, num_inputs // layer.columns)
            for tensor, target in (
                (matrix.numbers, joined.numbers),
                (matrix.scales, joined.scales),
                (matrix.zeros, joined.zeros),
            ):
                if tensor is not None and target is not None:
                    copy_part(in_order(tensor, kept), kept, target, self._model.sharding, num_rows=num_rows)
        layer.hold(joined, method)
        return True


def fill_dummy_weights(model: Model, whole: Model, *, device: torch.device, seed: int) -> None:
    """Small normal matrices, and what the model wants of others; the same for a seed, on however many ranks."""
    generator = torch.Generator().manual_seed(seed)
    for name in [name for name, _ in model.named_parameters() if name not in model.constants]:
        owner, _, leaf = name.rpartition(".")
        layer = model.get_submodule(owner)
        value = model.dummy_value(name)
        if value is not None:
            _allocate(layer, leaf, device=device)
            layer.get_parameter(leaf).data.fill_(value)
        else:
            shape = whole.get_parameter(name).shape
            tensor = torch.empty(shape).normal_(std=0.02, generator=generator)
            source = WeightSource(name=name, parameter=name)
            _copy_into(layer, leaf, tensor, source, model.sharding, _num_rows(tensor), device)
        if isinstance(layer, Matrix) and leaf == "weight":
            layer.finish_loading()


def fill_constants(model: Model, *, device: torch.device) -> None:
    """Give parameters that are still missing what they hold in any checkpoint."""
    for name, value in model.constants.items():
        owner, _, leaf = name.rpartition(".")
        layer = model.get_submodule(owner)
        if layer.get_parameter(leaf).is_meta:
            source = WeightSource(name=name, parameter=name)
            _copy_into(layer, leaf, value, source, model.sharding, _num_rows(value), device)


def _index(files: list[Path], stack: ExitStack, stored: StoredFormat | None) -> Mapping[str, Stored]:
    """All tensors and quantized matrices by the names that transformers gives them."""
    if files[0].suffix == ".gguf":
        return gguf_matrices([stack.enter_context(GgufWeights(path)) for path in files])
    found: dict[str, StoredTensor] = {}
    for path in files:
        try:
            file = stack.enter_context(TensorFile(path))
            for stored_name, (dtype, shape, _, _) in file.entries.items():
                found[stored_name] = StoredTensor(file, stored_name, shape, dtype)
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"cannot read {path}: {error}") from error
    if is_mistral(files):
        found = mistral_tensors(found, files[0].parent)
    return found if stored is None else join_quantized(found, stored)


def _problems(names: WeightNames, found: dict[str, Stored]) -> list[str]:
    """What is missing and what is too much, with the names that transformers writes."""
    made = [name for source in names.made for name in source.names]
    wanted = dict.fromkeys([*(source.name for source in names.sources), *made])
    missing = [_stored_name(name, names) for name in wanted if name not in found]
    unexpected = [
        entry.stored_name
        for name, entry in found.items()
        if name not in wanted and not any(rule.search(name) for rule in names.ignored)
    ]
    return [
        f"{kind} tensors: {_some(group)}" for kind, group in (("missing", missing), ("unexpected", unexpected)) if group
    ]


def _stored_name(name: str, names: WeightNames) -> str:
    return name if name.startswith(f"{names.lm_head}.") else names.prefixes[0] + name


def _strip(name: str, prefixes: tuple[str, ...]) -> str:
    for prefix in prefixes:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def _some(names: list[str]) -> str:
    rest = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _floats(entry: Stored) -> Tensor:
    value = entry.read()
    return value.dequantize() if isinstance(value, QuantizedMatrix) else value


def _check_shapes(model: Model, names: WeightNames, found: dict[str, Stored]) -> None:
    wrong = []
    for source in names.sources:
        expected = list(model.get_parameter(source.parameter).shape)
        if source.num_rows is not None:
            expected[0] = source.num_rows
        entry = found[source.name]
        if source.is_transposed and isinstance(entry, StoredTensor):
            expected.reverse()
        if source.is_row:
            del expected[0]
        if entry.shape != expected:
            wrong.append(f"{entry.stored_name} has shape {entry.shape}, must be {expected}")
    if wrong:
        raise ModelLoadError(f"tensors do not fit config.json: {_some(wrong)}")


def _check_types(names: WeightNames, found: dict[str, Stored]) -> None:
    """Small numbers mean nothing without their scales."""
    for source in names.sources:
        entry = found[source.name]
        if isinstance(entry, StoredTensor) and entry.dtype in UNSCALED:
            raise ModelLoadError(
                f"{entry.stored_name} is {entry.dtype} without the scale that quantization_config wants beside it"
            )


def _num_rows(tensor: Tensor) -> int:
    return tensor.shape[0] if tensor.dim() else 1


def _allocate(layer: nn.Module, leaf: str, *, device: torch.device) -> None:
    parameter = layer.get_parameter(leaf)
    if parameter.is_meta:
        storage = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        setattr(layer, leaf, nn.Parameter(storage, requires_grad=False))


def in_order(tensor: Tensor, source: WeightSource) -> Tensor:
    """A stored tensor with its dimensions and rows as in the parameter; a view where nothing has to move."""
    if source.is_transposed:
        tensor = tensor.t()
    if source.group_rows:
        groups = tensor.view(-1, sum(source.group_rows), *tensor.shape[1:])
        parts = torch.split(groups, list(source.group_rows), dim=1)
        tensor = torch.cat([part.flatten(0, 1) for part in parts])
    return tensor[None] if source.is_row else tensor


def _copy_into(
    layer: nn.Module,
    leaf: str,
    tensor: Tensor,
    source: WeightSource,
    sharding: WeightSharding,
    num_rows: int,
    device: torch.device,
) -> None:
    """What this rank holds of a tensor, into a layer's parameter, which gets its memory where it has none yet.

    Args:
        num_rows: of the whole parameter.
    """
    if isinstance(layer, Matrix) and leaf == "weight":
        parts = _held_parts(tensor, source, sharding, num_rows=num_rows)
        taken = [layer.fill_rows(part, first_row) for first_row, part in parts]
        if taken and all(taken):
            return
    _allocate(layer, leaf, device=device)
    copy_part(tensor, source, layer.get_parameter(leaf), sharding, num_rows=num_rows)


def copy_part(
    tensor: Tensor, source: WeightSource, parameter: Tensor, sharding: WeightSharding, *, num_rows: int
) -> None:
    """Copy what this rank holds of a tensor into its parameter.

    Args:
        tensor: rows `source.row_start` and on of the whole parameter.
        num_rows: of the whole parameter.
    """
    if not tensor.dim():
        parameter.data.copy_(tensor)
        return
    if not sharding.rows(source.parameter, num_rows):
        parameter.data.zero_()
    for first_row, part in _held_parts(tensor, source, sharding, num_rows=num_rows):
        parameter[first_row : first_row + part.shape[0]].data.copy_(part)


def _held_parts(
    tensor: Tensor, source: WeightSource, sharding: WeightSharding, *, num_rows: int
) -> Iterator[tuple[int, Tensor]]:
    """What this rank holds of a tensor with rows, each part with its first row in the rank's parameter."""
    if tensor.dim() > 1:
        columns = sharding.columns(source.parameter, tensor.shape[1])
        tensor = tensor[:, columns.start : columns.stop]
    offset = 0
    for rows in sharding.rows(source.parameter, num_rows):
        begin = max(rows.start, source.row_start)
        end = min(rows.stop, source.row_start + tensor.shape[0])
        if begin < end:
            yield offset + begin - rows.start, tensor[begin - source.row_start : end - source.row_start]
        offset += len(rows)
