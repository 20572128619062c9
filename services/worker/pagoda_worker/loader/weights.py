"""Fills a decoder that was built on the meta device: from safetensors, or with random weights by seed."""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from pagoda_common.errors import ModelLoadError
from pagoda_worker.models.decoder import Decoder
from pagoda_worker.models.sharding import Sharding
from pagoda_worker.models.weights import WeightNames, WeightSource

Progress: TypeAlias = Callable[[int, int], None]
"""Called with bytes read and bytes to read."""

MAX_NAMED = 8
"""Tensors named in one error message."""


def load_weights(
    model: Decoder,
    names: WeightNames,
    files: list[Path],
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
    sharding: Sharding,
) -> None:
    """Read every tensor straight from the mapped files into the parameter (or its rows) that it fills.

    Args:
        model: this rank's part; only what it holds is read.

    Raises:
        ModelLoadError: a file is damaged; tensors are missing, unexpected or of the wrong shape (they are named).
    """
    with ExitStack() as stack:
        found = _index(files, names, stack)
        embedding = next(source.name for source in names.sources if source.parameter == "embed_tokens.weight")
        head = f"{names.lm_head}.weight"
        if model.lm_head is None and embedding not in found and head in found:
            found[embedding] = found[head]  # tied weights may be stored under either name
        problems = _problems(names, found)
        if problems:
            raise ModelLoadError(f"{files[0].parent} does not fit {model.spec.architecture}; {'; '.join(problems)}")
        whole = _whole(model, sharding)
        _check_shapes(whole, names, found)
        total = sum(found[source.name].num_bytes for source in names.sources)
        loaded = 0
        _allocate(model, dtype=dtype, device=device)
        for source in names.sources:
            entry = found[source.name]
            tensor = _in_order(entry.file.get_tensor(entry.stored_name), source)
            parameter = model.get_parameter(source.parameter)
            num_rows = whole.get_parameter(source.parameter).shape[0]
            copy_part(tensor, source, parameter, sharding, num_rows=num_rows)
            loaded += entry.num_bytes
            progress(loaded, total)


def fill_dummy_weights(
    model: Decoder, *, dtype: torch.dtype, device: torch.device, seed: int, sharding: Sharding
) -> None:
    """Small normal matrices, norms of ones, biases of zeros; the same for a seed, on however many ranks."""
    generator = torch.Generator().manual_seed(seed)
    whole = _whole(model, sharding)
    _allocate(model, dtype=dtype, device=device)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.zero_()
        elif "norm" in name:
            parameter.data.fill_(1.0 - model.spec.norm_weight_offset)
        else:
            shape = whole.get_parameter(name).shape
            tensor = torch.empty(shape).normal_(std=0.02, generator=generator)
            source = WeightSource(name=name, parameter=name)
            copy_part(tensor, source, parameter, sharding, num_rows=shape[0])


def _whole(model: Decoder, sharding: Sharding) -> Decoder:
    """The model that all ranks hold together, without weights."""
    if sharding.parallel.world_size == 1:
        return model
    with torch.device("meta"):
        return Decoder(spec=sharding.spec)


_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4}


class _Entry(NamedTuple):
    """One tensor of an open file."""

    file: Any
    stored_name: str
    shape: list[int]
    item_bytes: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.item_bytes


def _index(files: list[Path], names: WeightNames, stack: ExitStack) -> dict[str, _Entry]:
    """All tensors by their name without prefix."""
    found: dict[str, _Entry] = {}
    for path in files:
        try:
            file = stack.enter_context(safe_open(str(path), framework="pt", device="cpu"))
            for stored_name in file.keys():  # noqa: SIM118
                view = file.get_slice(stored_name)
                item_bytes = _ITEM_BYTES.get(view.get_dtype(), 1)
                found[_strip(stored_name, names.prefixes)] = _Entry(file, stored_name, view.get_shape(), item_bytes)
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"cannot read {path}: {error}") from error
    return found


def _problems(names: WeightNames, found: dict[str, _Entry]) -> list[str]:
    """What is missing and what is too much, with the names that transformers writes."""
    wanted = {source.name for source in names.sources}
    missing = [_stored_name(source.name, names) for source in names.sources if source.name not in found]
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


def _check_shapes(model: Decoder, names: WeightNames, found: dict[str, _Entry]) -> None:
    wrong = []
    for source in names.sources:
        expected = list(model.get_parameter(source.parameter).shape)
        if source.num_rows is not None:
            expected[0] = source.num_rows
        if source.is_transposed:
            expected.reverse()
        if source.is_row:
            del expected[0]
        entry = found[source.name]
        if entry.shape != expected:
            wrong.append(f"{entry.stored_name} has shape {entry.shape}, must be {expected}")
    if wrong:
        raise ModelLoadError(f"tensors do not fit config.json: {_some(wrong)}")


def _allocate(model: Decoder, *, dtype: torch.dtype, device: torch.device) -> None:
    for module, name, parameter in _parameters(model):
        if parameter.is_meta:
            storage = torch.empty(parameter.shape, dtype=dtype, device=device)
            setattr(module, name, nn.Parameter(storage, requires_grad=False))


def _parameters(model: Decoder) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            yield module, name, parameter


def _in_order(tensor: Tensor, source: WeightSource) -> Tensor:
    """A stored tensor with its dimensions and rows as in the parameter; a view where nothing has to move."""
    if source.is_transposed:
        tensor = tensor.t()
    if source.group_rows:
        groups = tensor.view(-1, sum(source.group_rows), *tensor.shape[1:])
        parts = torch.split(groups, list(source.group_rows), dim=1)
        tensor = torch.cat([part.flatten(0, 1) for part in parts])
    return tensor[None] if source.is_row else tensor


def copy_part(tensor: Tensor, source: WeightSource, parameter: Tensor, sharding: Sharding, *, num_rows: int) -> None:
    """Copy what this rank holds of a tensor into its parameter.

    Args:
        tensor: rows `source.row_start` and on of the whole parameter.
        num_rows: of the whole parameter.
    """
    if tensor.dim() > 1:
        columns = sharding.columns(source.parameter, tensor.shape[1])
        tensor = tensor[:, columns.start : columns.stop]
    held = sharding.rows(source.parameter, num_rows)
    if not held:
        parameter.data.zero_()
    offset = 0
    for rows in held:
        begin = max(rows.start, source.row_start)
        end = min(rows.stop, source.row_start + tensor.shape[0])
        if begin < end:
            target = parameter[offset + begin - rows.start : offset + end - rows.start]
            target.data.copy_(tensor[begin - source.row_start : end - source.row_start])
        offset += len(rows)
