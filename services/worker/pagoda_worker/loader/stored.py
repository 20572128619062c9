"""The content of a checkpoint under the model's names: tensors, or the tensors of a quantized matrix."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, TypeVar

from torch import Tensor

from pagoda_common.errors import ModelLoadError
from pagoda_kernels.linear.quantized_matrix import QuantizedMatrix
from pagoda_kernels.linear.scaled_matrix import ScaledMatrix
from pagoda_worker.loader.formats.stored_format import StoredFormat
from pagoda_worker.loader.gguf_file import GgufMatrix
from pagoda_worker.loader.tensor_file import TensorFile, in_halves
from pagoda_worker.models.weights import WeightSource

Read = TypeVar("Read")
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2}


class StoredTensor(NamedTuple):
    """One tensor of an open file."""

    file: TensorFile
    stored_name: str
    shape: list[int]
    dtype: str
    """Name of the data type in safetensors."""
    paired_rows: int = 0
    """Number of rows of a head, which are stored as adjacent pairs and needed as halves; 0: rows are in order."""

    @property
    def num_bytes(self) -> int:
        """In the file."""
        return math.prod(self.shape) * _ITEM_BYTES.get(self.dtype, 1)

    @property
    def row_bytes(self) -> int:
        """Bytes of each entry of the first dimension, which must exist."""
        return math.prod(self.shape[1:]) * _ITEM_BYTES.get(self.dtype, 1)

    def read(self) -> Tensor:
        """The tensor, in host memory."""
        tensor = self.file.read(self.stored_name)
        return in_halves(tensor, self.paired_rows) if self.paired_rows else tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredMatrix:
    """The tensors of one quantized matrix, by the last part of their names."""

    format: StoredFormat
    stored_name: str
    parts: dict[str, StoredTensor]

    @property
    def shape(self) -> list[int]:
        """Shape of the matrix, [num_outputs, num_inputs]."""
        try:
            if self.format.described_by:
                return self.format.described_shape(self.parts[self.format.described_by].read())
            return self.format.shape({leaf: part.shape for leaf, part in self.parts.items()})
        except ModelLoadError as error:
            raise ModelLoadError(f"{self.stored_name} cannot be read: {error}") from error
        except ValueError:
            shapes = ", ".join(f"{leaf} {part.shape}" for leaf, part in self.parts.items())
            raise ModelLoadError(f"{self.stored_name} is not a matrix: {shapes}") from None

    @property
    def num_bytes(self) -> int:
        """In the files."""
        return sum(part.num_bytes for part in self.parts.values())

    def read(self) -> Tensor | QuantizedMatrix:
        """See StoredFormat."""
        return self._read(self.format.read)

    def read_scaled(self) -> Tensor | QuantizedMatrix | ScaledMatrix:
        """See StoredFormat."""
        return self._read(self.format.read_scaled)

    def _read(self, read: Callable[[Mapping[str, Tensor]], Read]) -> Read:
        try:
            return read({leaf: part.read() for leaf, part in self.parts.items()})
        except (ModelLoadError, RuntimeError, IndexError, ValueError) as error:
            raise ModelLoadError(f"{self.stored_name} cannot be read: {error}") from error


Stored: TypeAlias = StoredTensor | StoredMatrix | GgufMatrix


def join_quantized(stored: Mapping[str, StoredTensor], format: StoredFormat) -> dict[str, Stored]:
    """The content of the files, with the tensors of each quantized matrix joined.

    Args:
        stored: by the names in the files.

    Raises:
        ModelLoadError: a tensor of a quantized matrix is missing, or no matrix is quantized.
    """
    matrices = format.parts(stored)
    if not matrices:
        raise ModelLoadError("config.json has a quantization_config, but no tensor is quantized")
    taken = {name for parts in matrices.values() for name in parts.values()}
    joined: dict[str, Stored] = {
        name: tensor
        for name, tensor in stored.items()
        if name not in taken and (format.ignored is None or not format.ignored.search(name))
    }
    for name, parts in matrices.items():
        joined[name] = StoredMatrix(
            format=format.of(name),
            stored_name=next(iter(parts.values())),
            parts={leaf: stored[full] for leaf, full in parts.items()},
        )
    return joined


def drop_empty_biases(found: dict[str, Stored], sources: Sequence[WeightSource]) -> None:
    """Drop biases that the model does not have: GPTQ's writers give every layer a bias, which may be zeros.

    Args:
        found: content of the files, by the model's names.
    """
    wanted = {source.name for source in sources}
    for source in sources:
        name = source.name.removesuffix(".weight") + ".bias"
        bias = found.get(name)
        if name not in wanted and isinstance(bias, StoredTensor) and not bool(bias.read().any()):
            del found[name]
