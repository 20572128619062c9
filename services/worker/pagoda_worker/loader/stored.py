"""What the files of a checkpoint hold under one name of the model: a tensor, or those of a quantized matrix."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from torch import Tensor

from pagoda_common.errors import ModelLoadError
from pagoda_kernels.linear.quantized_matrix import QuantizedMatrix
from pagoda_worker.loader.quantized_tensors import StoredFormat
from pagoda_worker.loader.tensor_file import TensorFile
from pagoda_worker.models.weights import WeightSource

_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4}


class StoredTensor(NamedTuple):
    """One tensor of an open file."""

    file: TensorFile
    stored_name: str
    shape: list[int]
    dtype: str
    """As safetensors calls it."""

    @property
    def num_bytes(self) -> int:
        """In the file."""
        return math.prod(self.shape) * _ITEM_BYTES.get(self.dtype, 1)

    def read(self) -> Tensor:
        """The tensor, in host memory."""
        return self.file.read(self.stored_name)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredMatrix:
    """The tensors of one quantized matrix, by the last part of their names."""

    format: StoredFormat
    stored_name: str
    parts: dict[str, StoredTensor]

    @property
    def shape(self) -> list[int]:
        """Of the matrix, [num_outputs, num_inputs]."""
        return self.format.shape({leaf: part.shape for leaf, part in self.parts.items()})

    @property
    def num_bytes(self) -> int:
        """In the files."""
        return sum(part.num_bytes for part in self.parts.values())

    def read(self) -> Tensor | QuantizedMatrix:
        """As in StoredFormat."""
        try:
            return self.format.read({leaf: part.read() for leaf, part in self.parts.items()})
        except (ModelLoadError, RuntimeError, IndexError) as error:
            raise ModelLoadError(f"{self.stored_name} cannot be read: {error}") from error


Stored: TypeAlias = StoredTensor | StoredMatrix


def join_quantized(found: dict[str, Stored], sources: Sequence[WeightSource], stored: StoredFormat) -> None:
    """Put matrices in place of the tensors that they are stored as.

    Args:
        found: what the files hold, by the names of the model.

    Raises:
        ModelLoadError: a tensor of a quantized matrix is missing, or no matrix is quantized.
    """
    num_joined = 0
    for source in sources:
        stem = source.name.removesuffix(".weight")
        first = found.get(f"{stem}.{stored.first}")
        if source.name in found or not isinstance(first, StoredTensor):
            continue
        parts: dict[str, StoredTensor] = {}
        for leaf in (stored.first, *stored.others, *stored.optional):
            part = found.pop(f"{stem}.{leaf}", None)
            if isinstance(part, StoredTensor):
                parts[leaf] = part
            elif leaf not in stored.optional:
                raise ModelLoadError(f"{first.stored_name} is there, {stem}.{leaf} is missing")
        found[source.name] = StoredMatrix(format=stored, stored_name=first.stored_name, parts=parts)
        num_joined += 1
    if not num_joined:
        raise ModelLoadError("config.json has a quantization_config, but no tensor is quantized")
    _drop_empty_biases(found, sources)


def _drop_empty_biases(found: dict[str, Stored], sources: Sequence[WeightSource]) -> None:
    """GPTQ's writers give every layer a bias, of zeros where the model has none."""
    wanted = {source.name for source in sources}
    for source in sources:
        name = source.name.removesuffix(".weight") + ".bias"
        bias = found.get(name)
        if name not in wanted and isinstance(bias, StoredTensor) and not bool(bias.read().any()):
            del found[name]
