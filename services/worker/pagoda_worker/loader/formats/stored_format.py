"""StoredFormat: the loader's interface of formats of quantized matrices, and shared checks."""

import re
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from pagoda_common.errors import ModelLoadError
from pagoda_kernels.linear.quantized_matrix import QuantizedMatrix
from pagoda_kernels.linear.scaled_matrix import ScaledMatrix


class StoredFormat:
    """How one checkpoint stores its quantized matrices, each as several tensors instead of NAME.weight."""

    first: str = ""
    """Last part of the name of the tensor that marks a matrix as quantized."""
    others: tuple[str, ...] = ()
    """Further names that may be present."""
    optional: tuple[str, ...] = ()
    ignored: re.Pattern[str] | None = None
    """Tensors that are ignored: scales of activations and of the KV cache."""
    makes_floats: bool = False
    """Whether `read` always gives floats, which may be quantized again while they are read."""

    described_by: str = ""
    """Last part of the name of the tensor whose values give the shape; empty: the tensors' shapes do."""

    def parts(self, names: Collection[str]) -> dict[str, dict[str, str]]:
        """The tensors of each quantized matrix.

        Args:
            names: of all tensors of the checkpoint.

        Returns:
            By the matrix's unquantized name: names of its tensors, by their last part.

        Raises:
            ModelLoadError: a tensor of a matrix is missing.
        """
        found: dict[str, dict[str, str]] = {}
        for name in names:
            stem, dot, leaf = name.rpartition(".")
            if leaf != self.first or not dot:
                continue
            parts = {part: f"{stem}.{part}" for part in (self.first, *self.others, *self.optional)}
            missing = [part for part in self.others if parts[part] not in names]
            if missing:
                raise ModelLoadError(f"{name} is there, {parts[missing[0]]} is missing")
            found[f"{stem}.weight"] = {part: full for part, full in parts.items() if full in names}
        return found

    def of(self, name: str) -> "StoredFormat":
        """The format of one matrix, where a checkpoint has several.

        Args:
            name: as in `parts`.
        """
        return self

    def shape(self, shapes: Mapping[str, list[int]]) -> list[int]:
        """[num_outputs, num_inputs] of a matrix, from the shapes of its tensors by the last part of their names."""
        raise NotImplementedError

    def described_shape(self, description: Tensor) -> list[int]:
        """The shape, from the tensor of `described_by`.

        Raises:
            ModelLoadError: the tensor does not give a shape.
        """
        raise NotImplementedError

    def read(self, tensors: Mapping[str, Tensor]) -> QuantizedMatrix | Tensor:
        """A matrix from its tensors; floats if its groups are not of adjacent inputs.

        Raises:
            ModelLoadError: the shapes of the tensors do not fit together.
        """
        raise NotImplementedError

    def read_scaled(self, tensors: Mapping[str, Tensor]) -> QuantizedMatrix | ScaledMatrix | Tensor:
        """As `read`, but small floats with their scales if the matrix is stored so."""
        return self.read(tensors)


def check_option(name: str, value: object, accepted: tuple[object, ...]) -> None:
    """Check that an option of quantization_config is supported.

    Raises:
        ModelLoadError: the option is not supported.
    """
    if value not in accepted:
        raise bad_option(name, value, f"one of {', '.join(repr(choice) for choice in accepted)}")


def bad_option(name: str, value: object, wanted: str) -> ModelLoadError:
    """The error of an option of quantization_config."""
    shown = repr(value)[:200]
    return ModelLoadError(f"quantization_config.{name} is {shown}, must be {wanted}", field="quantization_config")


def read_bits(options: Mapping[str, Any], name: str, accepted: tuple[int, ...] = (4, 8)) -> int:
    """Bits of an integer.

    Raises:
        ModelLoadError: the number of bits is not supported.
    """
    bits = options.get(name)
    check_option(name, bits, accepted)
    assert isinstance(bits, int), "it is one of them"
    return bits


def read_group_size(options: Mapping[str, Any], name: str = "group_size") -> int:
    """Number of inputs in a group; 0: all.

    Raises:
        ModelLoadError: it is not a valid number.
    """
    size = options.get(name)
    if size is None or size == -1:
        return 0
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise bad_option(name, size, "-1 or at least 1")
    return size
