"""compressed-tensors: integers and FP8, packed or not, by groups of layers.

Source: the compressors of the package compressed-tensors, whose quantization_config is its QuantizationConfig.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from pagoda_common.errors import ModelLoadError
from pagoda_kernels.linear.quantized_matrix import QuantizedMatrix
from pagoda_kernels.linear.scaled_matrix import ScaledMatrix
from pagoda_worker.loader.formats.integers import integer_matrix, regroup, signed, unpack_bits
from pagoda_worker.loader.formats.scaled import FLOAT8, SCALES_OF_OTHERS, scale_blocks, scaled_matrix
from pagoda_worker.loader.formats.stored_format import (
    StoredFormat,
    bad_option,
    check_option,
    read_bits,
    read_group_size,
)

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
"""Formats that are read; mixed-precision consists of several."""


class CompressedTensors(StoredFormat):
    """One format for each of quantization_config.config_groups."""

    ignored = SCALES_OF_OTHERS

    def __init__(self, options: Mapping[str, Any]) -> None:
        groups, overall = options.get("config_groups"), options.get("format")
        if not isinstance(groups, dict) or not groups or not all(isinstance(one, dict) for one in groups.values()):
            raise bad_option("config_groups", groups, "at least one object by name")
        if overall != "mixed-precision":
            check_option("format", overall, FORMATS)
        self._groups: list[tuple[list[str], _Group]] = []
        for name, scheme in groups.items():
            targets = scheme.get("targets") or ["Linear"]
            if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
                raise bad_option(f"config_groups.{name}.targets", targets, "a list of names")
            self._groups.append((targets, _group(f"config_groups.{name}", scheme, overall)))
        self.makes_floats = all(isinstance(group, _Float8Group) for _, group in self._groups)

    def parts(self, names: Collection[str]) -> dict[str, dict[str, str]]:
        """See StoredFormat: of all groups."""
        found: dict[str, dict[str, str]] = {}
        for name in self._matrices(names):
            group = self._find(name)
            if group is None:
                raise ModelLoadError(f"{name} is quantized, but no target of quantization_config.config_groups fits it")
            found |= group.parts_of(name.removesuffix(".weight"), names)
        return found

    @staticmethod
    def _matrices(names: Collection[str]) -> Iterator[str]:
        for name in names:
            if name.endswith(".weight_scale"):
                yield name.removesuffix("_scale")

    def _find(self, name: str) -> "_Group | None":
        """By whole name, then by pattern, then by class: all that is quantized is a Linear."""
        stem = name.removesuffix(".weight")
        for fits in (_is_name, _is_pattern, _is_class):
            for targets, group in self._groups:
                if any(fits(target, stem) for target in targets):
                    return group
        return None

    def of(self, name: str) -> StoredFormat:
        """See StoredFormat."""
        group = self._find(name)
        assert group is not None, "parts() has found one"
        return group


def _is_name(target: str, stem: str) -> bool:
    return stem == target or stem.endswith(f".{target}")


def _is_pattern(target: str, stem: str) -> bool:
    return target.startswith("re:") and re.match(target[3:], stem) is not None


def _is_class(target: str, stem: str) -> bool:
    return target in ("Linear", "LinearBase", "FusedMoE")


def _group(name: str, scheme: Mapping[str, Any], overall: object) -> "_Group":
    """One of config_groups."""
    form = scheme.get("format") or overall
    check_option(f"{name}.format", form, FORMATS)
    weights = scheme.get("weights")
    if not isinstance(weights, dict):
        raise bad_option(f"{name}.weights", weights, "an object")
    check_option(f"{name}.output_activations", scheme.get("output_activations"), (None,))
    kind = weights.get("type", "int")
    check_option(f"{name}.weights.type", kind, ("int", "float"))
    if kind == "float":
        check_option(f"{name}.weights.num_bits", weights.get("num_bits", 8), (8,))
        return _Float8Group(weights)
    return _PackedGroup(weights) if form == "pack-quantized" else _IntegerGroup(weights)


class _Group(StoredFormat):
    """Matrices of one scheme."""

    def __init__(self, weights: Mapping[str, Any]) -> None:
        default = "channel" if weights.get("group_size") in (None, -1) else "group"
        strategy = weights.get("strategy") or default
        check_option("weights.strategy", strategy, ("group", "channel", "tensor", "block"))
        self._strategy = str(strategy)
        self._group_size = read_group_size(weights) if strategy == "group" else 0
        block = weights.get("block_structure")
        self._block = (int(block[0]), int(block[1])) if isinstance(block, list) and len(block) == 2 else (128, 128)

    def parts_of(self, stem: str, names: Collection[str]) -> dict[str, dict[str, str]]:
        """As `parts`, of one matrix."""
        leaves = (self.first, *self.others, *self.optional)
        return StoredFormat.parts(self, [name for leaf in leaves if (name := f"{stem}.{leaf}") in names])


class _PackedGroup(_Group):
    """weight_packed int32 [outputs, inputs / per word], weight_scale [outputs, groups], weight_shape [2], and
    weight_zero_point int32 [outputs / per word, groups] where they are not symmetric."""

    first = "weight_packed"
    others = ("weight_scale",)
    optional = ("weight_shape", "weight_zero_point", "weight_g_idx")

    def __init__(self, weights: Mapping[str, Any]) -> None:
        super().__init__(weights)
        self._bits = read_bits(weights, "num_bits")
        check_option("weights.strategy", self._strategy, ("group", "channel"))

    def shape(self, shapes: Mapping[str, list[int]]) -> list[int]:
        """See StoredFormat."""
        num_outputs, words = shapes["weight_packed"]
        return [num_outputs, words * 32 // self._bits]

    def read(self, tensors: Mapping[str, Tensor]) -> QuantizedMatrix | Tensor:
        """See StoredFormat."""
        numbers = signed(unpack_bits(tensors["weight_packed"], self._bits), self._bits)
        scales = tensors["weight_scale"]
        if "weight_shape" in tensors:
            num_outputs, num_inputs = (int(size) for size in tensors["weight_shape"])
            if num_outputs != numbers.shape[0] or num_inputs > numbers.shape[1]:
                raise ModelLoadError(f"weight_shape is {[num_outputs, num_inputs]}, packed are {list(numbers.shape)}")
            numbers = numbers[:, :num_inputs]
        zeros = None
        if "weight_zero_point" in tensors:
            stored = tensors["weight_zero_point"]
            codes = unpack_bits(stored.t(), self._bits).t() if stored.dtype == torch.int32 else None
            zeros = stored.float() if codes is None else codes.float() - (1 << (self._bits - 1))
            zeros = zeros[: scales.shape[0]]
        matrix = integer_matrix(numbers, scales, zeros, bits=self._bits, group_size=self._group_size)
        return regroup(matrix, tensors.get("weight_g_idx"))


class _IntegerGroup(_Group):
    """weight int8 [outputs, inputs], weight_scale [outputs, groups] or [1], perhaps weight_zero_point of that shape."""

    first = "weight"
    others = ("weight_scale",)
    optional = ("weight_zero_point", "weight_g_idx")

    def __init__(self, weights: Mapping[str, Any]) -> None:
        super().__init__(weights)
        self._bits = read_bits(weights, "num_bits")
        check_option("weights.strategy", self._strategy, ("group", "channel", "tensor"))

    def shape(self, shapes: Mapping[str, list[int]]) -> list[int]:
        """See StoredFormat."""
        return shapes["weight"]

    def read(self, tensors: Mapping[str, Tensor]) -> QuantizedMatrix | Tensor:
        """See StoredFormat."""
        numbers = tensors["weight"]
        if numbers.dtype != torch.int8:
            raise ModelLoadError(f"data type is {str(numbers.dtype).removeprefix('torch.')}, must be int8")
        scales, zeros = self._by_output(tensors["weight_scale"], numbers), tensors.get("weight_zero_point")
        if zeros is not None:
            zeros = self._by_output(zeros.float(), numbers)
        matrix = integer_matrix(numbers, scales, zeros, bits=self._bits, group_size=self._group_size)
        return regroup(matrix, tensors.get("weight_g_idx"))

    @staticmethod
    def _by_output(scales: Tensor, numbers: Tensor) -> Tensor:
        """[outputs, groups], of what may be one number or [outputs]."""
        return scales.reshape(-1, 1).expand(numbers.shape[0], 1) if scales.dim() < 2 or scales.numel() == 1 else scales


class _Float8Group(_Group):
    """weight FP8 [outputs, inputs] and weight_scale: [1], [outputs, 1] or by blocks."""

    first = "weight"
    others = ("weight_scale",)
    makes_floats = True

    def shape(self, shapes: Mapping[str, list[int]]) -> list[int]:
        """See StoredFormat."""
        return shapes["weight"]

    def read(self, tensors: Mapping[str, Tensor]) -> QuantizedMatrix | Tensor:
        """See StoredFormat."""
        weight = tensors["weight"]
        if weight.dtype not in FLOAT8:
            raise ModelLoadError(f"data type is {str(weight.dtype).removeprefix('torch.')}, must be FP8")
        return scale_blocks(weight, tensors["weight_scale"], self._blocks(weight))

    def read_scaled(self, tensors: Mapping[str, Tensor]) -> QuantizedMatrix | ScaledMatrix | Tensor:
        """See StoredFormat."""
        weight = tensors["weight"]
        return scaled_matrix(weight, tensors["weight_scale"], self._blocks(weight)) or self.read(tensors)

    def _blocks(self, weight: Tensor) -> tuple[int, int] | None:
        if self._strategy == "group":
            return 1, self._group_size or weight.shape[1]
        return self._block if self._strategy == "block" else None
