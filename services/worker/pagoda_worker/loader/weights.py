"""Fills a model on the meta device with weights from safetensors, or with random weights by seed."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from pagoda_common.errors import ModelLoadError
from pagoda_kernels.linear.quantized_matrix import QuantizedMatrix
from pagoda_kernels.linear.scaled_matrix import ScaledMatrix
from pagoda_worker.loader.formats.integers import alike, repeated
from pagoda_worker.loader.formats.stored_format import StoredFormat
from pagoda_worker.loader.gguf_file import GgufWeights, gguf_matrices
from pagoda_worker.loader.held_parts import copy_part, held_parts, in_order
from pagoda_worker.loader.mistral_tensors import is_mistral, mistral_tensors
from pagoda_worker.loader.parts import InBuffers, InPlace, InRows, InScaled, Part, Reading, rows_of_parts
from pagoda_worker.loader.read_buffers import ReadBuffers
from pagoda_worker.loader.scaled_parts import join_scaled
from pagoda_worker.loader.stored import Stored, StoredMatrix, StoredTensor, drop_empty_biases, join_quantized
from pagoda_worker.loader.tensor_file import DTYPES, TensorFile, read_ahead
from pagoda_worker.memory.weight_memory import WeightMemory
from pagoda_worker.models.layers import Matrix
from pagoda_worker.models.linear_method import PLAIN, SINK_ROWS, RowSink
from pagoda_worker.models.model import Model, WeightSharding
from pagoda_worker.models.quantized_method import LinearMethods
from pagoda_worker.models.weights import MadeWeights, WeightNames, WeightSource

logger = logging.getLogger(__name__)

Progress: TypeAlias = Callable[[int, int], None]
"""Called with bytes read and bytes to read."""

UNSCALED = ("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8")
"""safetensors' names of data types that parameters never have."""
MAX_NAMED = 8
"""Maximum number of tensors named in one error message."""


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
    """Read every tensor into its parameter (or rows of it); the next ones are read while one is packed or quantized.

    Args:
        model: this rank's part; only its tensors are read.
        whole: the model of all ranks, without weights.
        methods: choose how layers hold matrices stored as integers.
        stored: their format; None: all weights are floats.

    Raises:
        ModelLoadError: a file is damaged; tensors are missing, unexpected or of the wrong shape (they are named).
    """
    with ExitStack() as stack:
        stack.enter_context(_half_of_threads())
        entries = _index(files, stack, stored)
        names = model.weights(entries)
        found: dict[str, Stored] = {_strip(name, names.prefixes): entry for name, entry in entries.items()}
        for name, other in names.aliases.items():
            if name not in found and other in found:
                found[name] = found[other]
        for module, name in names.module_names.items():
            if name not in found and module in found:
                found[name] = found.pop(module)
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
        filler = _Filler(model, whole, names, found, device=device, methods=methods)
        buffers = ReadBuffers()
        for part in read_ahead(filler.parts(buffers)):
            if part.is_last:
                filler.fill(part.source, part.value)
            buffers.give_back(part.value)  # all of it was copied
            loaded += part.num_bytes
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
    """Allocates and fills one parameter after the other, and finishes each once all its parts are read, so that a model
    that is packed or quantized is never completely in memory as stored."""

    def __init__(
        self,
        model: Model,
        whole: Model,
        names: WeightNames,
        found: dict[str, Stored],
        *,
        device: torch.device,
        methods: LinearMethods,
    ) -> None:
        self._model = model
        self._memory = WeightMemory()
        self._sources: dict[str, list[tuple[WeightSource, Stored]]] = {}
        """By parameter, in the order in which they are read."""
        for source in names.sources:
            stored = found[source.name]
            is_transposed = source.is_transposed and isinstance(stored, StoredTensor)
            fitting = source if is_transposed == source.is_transposed else replace(source, is_transposed=False)
            self._sources.setdefault(source.parameter, []).append((fitting, stored))
        self._sinks: dict[str, RowSink] = {}
        """By name, of parameters that are being read."""
        self._device = device
        self._methods = methods
        self._num_missing = Counter(source.parameter for source in names.sources)
        self._num_missing.update(parameter for source in names.made for parameter in source.parameters)
        self._shapes = {name: list(parameter.shape) for name, parameter in whole.named_parameters()}
        self._num_rows = {name: _num_rows(parameter) for name, parameter in whole.named_parameters()}
        self._integers: dict[str, list[tuple[WeightSource, QuantizedMatrix]]] = {}
        """Parts that were read, of parameters that are all integers so far."""
        self._scaled: dict[str, list[tuple[WeightSource, ScaledMatrix]]] = {}
        """The same for small floats."""
        self.num_dequantized = 0
        """Parameters that are stored as integers and held as floats."""
        self.float_name = ""
        """Data type of the last of these."""

    def make(self, source: MadeWeights, tensors: list[Tensor]) -> None:
        """Parameters that are made of several tensors.

        Raises:
            ModelLoadError: a result does not fit the model.
        """
        is_scaled = all(self._takes_scaled(name) for name in source.parameters)
        made: Mapping[str, Tensor | ScaledMatrix] = (
            source.make_scaled(tensors) if is_scaled and source.make_scaled is not None else source.make(tensors)
        )
        for name in source.parameters:
            value = made.get(name)
            shape = [] if value is None else list(value.shape)
            num_rows = 1 if not shape else shape[0]
            if value is None or num_rows != self._num_rows[name] or shape[1:] != self._shapes[name][1:]:
                raise ModelLoadError(
                    f"{', '.join(source.names)} make {name} of shape {shape}, must be {self._shapes[name]}"
                )
            self.fill(WeightSource(name=source.names[0], parameter=name), value)

    def _takes_scaled(self, parameter: str) -> bool:
        owner, _, leaf = parameter.rpartition(".")
        layer = self._model.get_submodule(owner)
        return leaf == "weight" and isinstance(layer, Matrix) and self._methods.takes_scaled(layer)

    def parts(self, buffers: ReadBuffers) -> Iterator[Part]:
        """All reads, parameter by parameter; memory is allocated in a parameter's turn."""
        for name, sources in self._sources.items():
            owner, _, leaf = name.rpartition(".")
            layer = self._model.get_submodule(owner)
            sink = self._open_sink(layer, leaf, name)
            if sink is not None:
                self._sinks[name] = sink
            for source, stored in sources:
                readings = list(self._readings(layer, leaf, source, stored, sink, buffers))
                for reading in readings:
                    yield Part(source, reading, is_last=reading is readings[-1])

    def _open_sink(self, layer: nn.Module, leaf: str, name: str) -> RowSink | None:
        """The sink for the rows of a matrix; None: the matrix is read in another way."""
        if self._device.type != "cpu" or not isinstance(layer, Matrix) or leaf != "weight":
            return None
        whole, num_columns = range(self._num_rows[name]), self._shapes[name][-1]
        sharding, sources = self._model.sharding, self._sources[name]
        is_whole = (
            sharding.rows(name, len(whole)) == (whole,) and len(sharding.columns(name, num_columns)) == num_columns
        )
        fits = len(sources) == self._num_missing[name] and all(
            _is_in_order(source, stored) and source.row_start % SINK_ROWS == 0 and not source.is_row
            for source, stored in sources
        )
        return layer.row_sink(self._memory.take) if is_whole and fits else None

    def _readings(
        self,
        layer: nn.Module,
        leaf: str,
        source: WeightSource,
        stored: Stored,
        sink: RowSink | None,
        buffers: ReadBuffers,
    ) -> Iterator[Reading]:
        """The reads of one source."""
        if isinstance(stored, StoredMatrix) and self._takes_scaled(source.parameter):
            yield InScaled(stored)
            return
        if isinstance(stored, StoredTensor) and sink is not None:
            for rows in rows_of_parts(stored):
                yield InRows(stored, rows, source.row_start, sink, buffers)
            return
        place = self._place(layer, leaf, source, stored)
        if isinstance(stored, StoredTensor) and place is not None:
            for rows in rows_of_parts(stored):
                yield InPlace(stored, rows.start * stored.row_bytes, place[rows.start : rows.stop])
            return
        yield InBuffers(stored, buffers)

    def _place(self, layer: nn.Module, leaf: str, source: WeightSource, stored: Stored) -> Tensor | None:
        """The final memory of a source, in its shape, if it is held as stored."""
        if self._device.type != "cpu" or not isinstance(stored, StoredTensor) or not _is_in_order(source, stored):
            return None
        is_taken = isinstance(layer, Matrix) and leaf == "weight" and layer.method.takes_rows
        whole, num_rows = in_order(torch.empty(stored.shape, device="meta"), source), self._num_rows[source.parameter]
        parts = list(held_parts(whole, source, self._model.sharding, num_rows=num_rows))
        is_whole = len(parts) == 1 and parts[0][1].shape == whole.shape  # else other ranks hold some of it
        if is_taken or not is_whole or DTYPES.get(stored.dtype) != layer.get_parameter(leaf).dtype:
            return None
        stays = not isinstance(layer, Matrix) or leaf != "weight" or layer.method is PLAIN
        _allocate(layer, leaf, device=self._device, memory=self._memory if stays else None)
        place = layer.get_parameter(leaf).data[parts[0][0] : parts[0][0] + whole.shape[0]]
        return place[0] if source.is_row else place

    def fill(self, source: WeightSource, value: Tensor | QuantizedMatrix | ScaledMatrix | None) -> None:
        """Fill one part of a parameter; None: it is already in its final memory."""
        name = source.parameter
        owner, _, leaf = name.rpartition(".")
        layer = self._model.get_submodule(owner)
        self._num_missing[name] -= 1
        if isinstance(value, QuantizedMatrix):
            self._integers.setdefault(name, []).append((source, value))
        elif isinstance(value, ScaledMatrix):
            self._scaled.setdefault(name, []).append((source, value))
        elif value is not None:
            self._copy(layer, leaf, source, in_order(value, source))
        if self._num_missing[name]:
            return
        sink = self._sinks.pop(name, None)
        if sink is not None and isinstance(layer, Matrix) and not layer.take_sink(sink):
            for part, stored in self._sources[name]:  # once more, as a whole
                self._copy(layer, leaf, part, _floats(stored))
        parts = self._integers.pop(name, [])
        if parts and isinstance(layer, Matrix) and not self._hold(layer, parts):
            self._note_floats(layer)
            for part, matrix in parts:
                self._copy(layer, leaf, part, in_order(matrix.dequantize(), replace(part, is_transposed=False)))
        self._finish_scaled(layer, source)
        if isinstance(layer, Matrix) and leaf == "weight":
            layer.finish_loading()

    def _finish_scaled(self, layer: nn.Module, source: WeightSource) -> None:
        """Give a layer small floats if a kernel reads them; else convert them to floats."""
        parts = self._scaled.pop(source.parameter, [])
        if not parts or not isinstance(layer, Matrix):
            return
        kept = [(replace(part, is_transposed=False), matrix) for part, matrix in parts]
        joined = None
        if layer.weight.is_meta:  # else some parts of it were stored as floats
            num_rows = self._num_rows[source.parameter]
            joined = join_scaled(kept, layer, self._model.sharding, num_rows=num_rows, device=self._device)
        method = None if joined is None else self._methods.of_scaled(joined)
        if joined is not None and method is not None:
            layer.hold_scaled(joined, method)
            return
        self._note_floats(layer)
        for part, matrix in kept:
            self._copy(layer, "weight", part, in_order(matrix.dequantize(), part))

    def _note_floats(self, layer: Matrix) -> None:
        self.num_dequantized += not self._methods.is_online
        self.float_name = str(layer.dtype).removeprefix("torch.")

    def _copy(self, layer: nn.Module, leaf: str, source: WeightSource, tensor: Tensor) -> None:
        _copy_into(layer, leaf, tensor, source, self._model.sharding, self._num_rows[source.parameter], self._device)

    def _hold(self, layer: Matrix, parts: list[tuple[WeightSource, QuantizedMatrix]]) -> bool:
        """Give a layer integers if a kernel reads them, in a form that fits all its parts."""
        if self._methods.is_online or layer.is_float:
            return False  # floats, perhaps for other integers
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
    """Random weights: small normal matrices, and the model's values for others; the same for a seed, on any number of
    ranks."""
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
    """Fill parameters that a checkpoint may omit with their default values."""
    for name, value in model.constants.items():
        owner, _, leaf = name.rpartition(".")
        layer = model.get_submodule(owner)
        if layer.get_parameter(leaf).is_meta:
            source = WeightSource(name=name, parameter=name)
            _copy_into(layer, leaf, value, source, model.sharding, _num_rows(value), device)


def _index(files: list[Path], stack: ExitStack, stored: StoredFormat | None) -> Mapping[str, Stored]:
    """All tensors and quantized matrices by transformers' names."""
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
    """Messages about missing and unexpected tensors, with transformers' names."""
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


@contextmanager
def _half_of_threads() -> Iterator[None]:
    """Leave cores to the reading threads: a thread that packs a matrix on a shared core waits for a time slice, and the
    others wait for it."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, before // 2))
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
    """Check that small numbers have scales."""
    for source in names.sources:
        entry = found[source.name]
        if isinstance(entry, StoredTensor) and entry.dtype in UNSCALED:
            raise ModelLoadError(
                f"{entry.stored_name} is {entry.dtype} without the scale that quantization_config wants beside it"
            )


def _num_rows(tensor: Tensor) -> int:
    return tensor.shape[0] if tensor.dim() else 1


def _is_in_order(source: WeightSource, stored: Stored) -> bool:
    """Whether a source's rows are stored like the parameter's."""
    return isinstance(stored, StoredTensor) and not (
        stored.paired_rows
        or source.is_transposed
        or source.group_rows
        or not stored.shape
        or stored.dtype not in DTYPES
    )


def _allocate(layer: nn.Module, leaf: str, *, device: torch.device, memory: WeightMemory | None = None) -> None:
    """`memory`: allocator for weights, which live as long as the model."""
    parameter = layer.get_parameter(leaf)
    if parameter.is_meta:
        if memory is None:
            storage = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        else:
            storage = memory.take(tuple(parameter.shape), parameter.dtype)
        setattr(layer, leaf, nn.Parameter(storage, requires_grad=False))


def _copy_into(
    layer: nn.Module,
    leaf: str,
    tensor: Tensor,
    source: WeightSource,
    sharding: WeightSharding,
    num_rows: int,
    device: torch.device,
) -> None:
    """Copy this rank's part of a tensor into a layer's parameter, allocating it if needed.

    Args:
        num_rows: of the whole parameter.
    """
    if isinstance(layer, Matrix) and leaf == "weight":
        parts = held_parts(tensor, source, sharding, num_rows=num_rows)
        taken = [layer.fill_rows(part, first_row) for first_row, part in parts]
        if taken and all(taken):
            return
    _allocate(layer, leaf, device=device)
    copy_part(tensor, source, layer.get_parameter(leaf), sharding, num_rows=num_rows)
