"""Matrices of small integers as checkpoints store them: GPTQ, AWQ and compressed-tensors. Knows tensors; no files.

Sources: the layouts of AutoGPTQ's and AutoAWQ's qweight, qzeros and scales, and compressed-tensors' pack-quantized.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pagoda_common.errors import ModelLoadError
from pagoda_kernels.linear.quantized_matrix import QuantizedMatrix
from pagoda_worker.models.hf_config import HfConfig

METHODS = ("awq", "gptq", "compressed-tensors")
"""What quantization_config.quant_method may be."""
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word of eight codes the code of each output is."""


class StoredFormat:
    """How one checkpoint stores its quantized matrices, each as several tensors in place of NAME.weight."""

    first: str
    """Last part of the name of the tensor that tells that a matrix is quantized."""
    others: tuple[str, ...]
    """Of those that are there besides."""
    optional: tuple[str, ...] = ()

    def shape(self, shapes: Mapping[str, list[int]]) -> list[int]:
        """[num_outputs, num_inputs] of a matrix, from the shapes of its tensors by the last part of their names."""
        raise NotImplementedError

    def read(self, tensors: Mapping[str, Tensor]) -> QuantizedMatrix | Tensor:
        """A matrix from its tensors; floats, if its inputs are in no groups of neighbours.

        Raises:
            ModelLoadError: the shapes of the tensors do not fit together.
        """
        raise NotImplementedError


def stored_format(config: HfConfig) -> tuple[str, StoredFormat] | None:
    """The method that config.json names and its format; None: weights are floats.

    Raises:
        ModelLoadError: a method, or an option of one, that is not supported.
    """
    options = config.get("quantization_config") or config.get("compression_config")
    if not options:
        return None
    if not isinstance(options, dict):
        raise ModelLoadError(f"quantization_config is {options!r}, must be an object", field="quantization_config")
    method = str(options.get("quant_method", "unknown"))
    if method == "gptq":
        return method, _Gptq(options)
    if method == "awq":
        return method, _Awq(options)
    if method == "mxfp4":  # experts alone, which their family makes floats of
        return None
    if method == "compressed-tensors":
        return method, _CompressedTensors(options)
    raise ModelLoadError(
        f"the checkpoint is quantized with {method!r}, must be one of {', '.join(METHODS)}", field="quantization_config"
    )


def _check(name: str, value: object, accepted: tuple[object, ...]) -> None:
    if value not in accepted:
        raise ModelLoadError(
            f"quantization_config.{name} is {value!r}, must be one of {', '.join(repr(choice) for choice in accepted)}",
            field="quantization_config",
        )


def _bits(options: Mapping[str, Any], name: str) -> int:
    bits = options.get(name)
    _check(name, bits, (4, 8))
    assert isinstance(bits, int), "it is one of them"
    return bits


def _group_size(options: Mapping[str, Any], name: str = "group_size") -> int:
    """Inputs in a group; 0 is all."""
    size = options.get(name)
    if size is None or size == -1:
        return 0
    if not isinstance(size, int) or size < 1:
        raise ModelLoadError(
            f"quantization_config.{name} is {size!r}, must be -1 or at least 1", field="quantization_config"
        )
    return size


def _check_groups(num_groups: int, num_inputs: int, group_size: int) -> None:
    expected = -(-num_inputs // group_size)
    if num_groups != expected:
        raise ModelLoadError(
            f"{num_groups} groups of scales for {num_inputs} inputs, must be {expected} (group_size {group_size})"
        )


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """int32 [rows, columns] to codes uint8 [rows, columns * (32 / bits)], the lowest bits first."""
    as_bytes = words.contiguous().view(torch.uint8)  # a machine whose lowest byte comes first, as all that are served
    if bits == 8:
        return as_bytes
    return torch.stack((as_bytes & 15, as_bytes >> 4), dim=-1).flatten(-2)


def _signed(codes: Tensor, bits: int) -> Tensor:
    """Codes uint8 to numbers int8: less half of the range."""
    return (codes ^ 128).view(torch.int8) if bits == 8 else codes.view(torch.int8) - 8


def _matrix(numbers: Tensor, scales: Tensor, zeros: Tensor | None, *, bits: int, group_size: int) -> QuantizedMatrix:
    group_size = group_size or numbers.shape[1]
    _check_groups(scales.shape[1], numbers.shape[1], group_size)
    if zeros is not None and not bool(zeros.any()):
        zeros = None
    return QuantizedMatrix(
        numbers=numbers.contiguous(),
        scales=scales.float().contiguous(),
        zeros=None if zeros is None else zeros.float().contiguous(),
        bits=bits,
        group_size=group_size,
    )


def _regrouped(matrix: QuantizedMatrix, groups: Tensor | None) -> QuantizedMatrix | Tensor:
    """What an order of inputs by activation makes of a matrix: floats, unless it is the usual order.

    Args:
        groups: [num_inputs], the group of each input.
    """
    num_inputs = matrix.numbers.shape[1]
    usual = torch.arange(num_inputs) // matrix.group_size
    if groups is None or torch.equal(groups.long(), usual):
        return matrix
    if groups.shape != (num_inputs,) or int(groups.min()) < 0 or int(groups.max()) >= matrix.scales.shape[1]:
        raise ModelLoadError(
            f"g_idx of shape {list(groups.shape)} names groups {int(groups.min())} to {int(groups.max())}: must be one "
            f"of {matrix.scales.shape[1]} groups for each of {num_inputs} inputs"
        )
    groups = groups.long()
    numbers = matrix.numbers.float()
    if matrix.zeros is not None:
        numbers = numbers - matrix.zeros[:, groups]
    return numbers * matrix.scales[:, groups]


class _Gptq(StoredFormat):
    """qweight int32 [inputs / n, outputs], qzeros int32 [groups, outputs / n], scales [groups, outputs]; n a word."""

    first = "qweight"
    others = ("scales", "qzeros")
    optional = ("g_idx",)

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._bits = _bits(options, "bits")
        _check("checkpoint_format", options.get("checkpoint_format", "gptq"), ("gptq", "gptq_v2"))
        _check("dynamic", options.get("dynamic") or None, (None,))
        self._group_size = _group_size(options)
        self._offset = 0 if options.get("checkpoint_format") == "gptq_v2" else 1  # what is stored is one too low

    def shape(self, shapes: Mapping[str, list[int]]) -> list[int]:
        """As in StoredFormat."""
        words, num_outputs = shapes["qweight"]
        return [num_outputs, words * 32 // self._bits]

    def read(self, tensors: Mapping[str, Tensor]) -> QuantizedMatrix | Tensor:
        """As in StoredFormat."""
        bits = self._bits
        numbers = _signed(_unpacked(tensors["qweight"].t(), bits), bits)
        zeros = _unpacked(tensors["qzeros"], bits).float() + (self._offset - (1 << (bits - 1)))
        scales = tensors["scales"].t()
        zeros = zeros.t()[: scales.shape[0]]
        matrix = _matrix(numbers, scales, zeros, bits=bits, group_size=self._group_size)
        return _regrouped(matrix, tensors.get("g_idx"))


class _Awq(StoredFormat):
    """qweight int32 [inputs, outputs / 8], qzeros int32 [groups, outputs / 8], scales [groups, outputs]."""

    first = "qweight"
    others = ("scales", "qzeros")

    def __init__(self, options: Mapping[str, Any]) -> None:
        _check("bits", options.get("bits", options.get("w_bit", 4)), (4,))
        _check("version", str(options.get("version", "gemm")).lower(), ("gemm",))
        self._group_size = _group_size(options, "group_size" if "group_size" in options else "q_group_size")

    def shape(self, shapes: Mapping[str, list[int]]) -> list[int]:
        """As in StoredFormat."""
        num_inputs, words = shapes["qweight"]
        return [words * 8, num_inputs]

    def read(self, tensors: Mapping[str, Tensor]) -> QuantizedMatrix | Tensor:
        """As in StoredFormat."""
        numbers = _signed(self._ordered(tensors["qweight"]).t().contiguous(), 4)
        zeros = self._ordered(tensors["qzeros"]).t().float() - 8
        return _matrix(numbers, tensors["scales"].t(), zeros, bits=4, group_size=self._group_size)

    @staticmethod
    def _ordered(words: Tensor) -> Tensor:
        """[rows, outputs / 8] int32 to [rows, outputs] uint8."""
        return _unpacked(words, 4).view(words.shape[0], -1, 8)[:, :, list(_AWQ_ORDER)].flatten(1)


class _CompressedTensors(StoredFormat):
    """weight_packed int32 [outputs, inputs / per word], weight_scale [outputs, groups], weight_shape [2], and
    weight_zero_point int32 [outputs / per word, groups] where they are not symmetric."""

    first = "weight_packed"
    others = ("weight_scale",)
    optional = ("weight_shape", "weight_zero_point", "weight_g_idx")

    def __init__(self, options: Mapping[str, Any]) -> None:
        _check("format", options.get("format"), ("pack-quantized",))
        groups = options.get("config_groups")
        if not isinstance(groups, dict) or len(groups) != 1:
            raise ModelLoadError(
                f"quantization_config.config_groups has {len(groups) if isinstance(groups, dict) else 'no'} groups, "
                "must have 1",
                field="quantization_config",
            )
        (scheme,) = groups.values()
        _check("input_activations", scheme.get("input_activations"), (None,))
        _check("output_activations", scheme.get("output_activations"), (None,))
        weights = scheme.get("weights") or {}
        self._bits = _bits(weights, "num_bits")
        _check("weights.type", weights.get("type", "int"), ("int",))
        strategy = weights.get("strategy", "channel" if weights.get("group_size") in (None, -1) else "group")
        _check("weights.strategy", strategy, ("group", "channel"))
        self._group_size = _group_size(weights) if strategy == "group" else 0

    def shape(self, shapes: Mapping[str, list[int]]) -> list[int]:
        """As in StoredFormat."""
        num_outputs, words = shapes["weight_packed"]
        return [num_outputs, words * 32 // self._bits]

    def read(self, tensors: Mapping[str, Tensor]) -> QuantizedMatrix | Tensor:
        """As in StoredFormat."""
        numbers = _signed(_unpacked(tensors["weight_packed"], self._bits), self._bits)
        scales = tensors["weight_scale"]
        if "weight_shape" in tensors:
            num_outputs, num_inputs = (int(size) for size in tensors["weight_shape"])
            if num_outputs != numbers.shape[0] or num_inputs > numbers.shape[1]:
                raise ModelLoadError(f"weight_shape is {[num_outputs, num_inputs]}, packed are {list(numbers.shape)}")
            numbers = numbers[:, :num_inputs]
        zeros = None
        if "weight_zero_point" in tensors:
            stored = tensors["weight_zero_point"]
            codes = _unpacked(stored.t(), self._bits).t() if stored.dtype == torch.int32 else None
            zeros = stored.float() if codes is None else codes.float() - (1 << (self._bits - 1))
            zeros = zeros[: scales.shape[0]]
        matrix = _matrix(numbers, scales, zeros, bits=self._bits, group_size=self._group_size)
        return _regrouped(matrix, tensors.get("weight_g_idx"))
