"""GPTQ and AWQ.

Sources: the layouts of AutoGPTQ's, GPTQModel's and AutoAWQ's qweight, qzeros and scales.
"""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pagoda_common.errors import ModelLoadError
from pagoda_kernels.linear.quantized_matrix import QuantizedMatrix
from pagoda_worker.loader.formats.integers import integer_matrix, regroup, signed, unpack_bits
from pagoda_worker.loader.formats.stored_format import (
    StoredFormat,
    bad_option,
    check_option,
    read_bits,
    read_group_size,
)

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word of eight codes the code of each output is, in version gemm."""


class Gptq(StoredFormat):
    """qweight int32 [inputs / n, outputs], qzeros int32 [groups, outputs / n], scales [groups, outputs]; n a word."""

    first = "qweight"
    others = ("scales", "qzeros")
    optional = ("g_idx",)

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._bits = read_bits(options, "bits", (2, 3, 4, 8))
        check_option("checkpoint_format", options.get("checkpoint_format", "gptq"), ("gptq", "gptq_v2"))
        self._group_size = read_group_size(options)
        self._offset = 0 if options.get("checkpoint_format") == "gptq_v2" else 1  # what is stored is one too low
        self._rules = _dynamic_rules(options)

    def of(self, name: str) -> StoredFormat:
        """See StoredFormat; GPTQModel's `dynamic` has other bits and groups for names that match a pattern."""
        stem = name.removesuffix(".weight")
        return next((format for pattern, format in self._rules if pattern.match(stem)), self)

    def shape(self, shapes: Mapping[str, list[int]]) -> list[int]:
        """See StoredFormat."""
        words, num_outputs = shapes["qweight"]
        return [num_outputs, words * 32 // self._bits]

    def read(self, tensors: Mapping[str, Tensor]) -> QuantizedMatrix | Tensor:
        """See StoredFormat."""
        bits = self._bits
        numbers = signed(unpack_bits(tensors["qweight"].t(), bits), bits)
        zeros = unpack_bits(tensors["qzeros"], bits).float() + (self._offset - (1 << (bits - 1)))
        scales = tensors["scales"].t()
        zeros = zeros.t()[: scales.shape[0]]
        matrix = integer_matrix(numbers, scales, zeros, bits=bits, group_size=self._group_size)
        return regroup(matrix, tensors.get("g_idx"))


def _dynamic_rules(options: Mapping[str, Any]) -> list[tuple[re.Pattern[str], Gptq]]:
    """Patterns of names and the format of those, the first that matches counts. "-:" leaves out: these are floats."""
    rules, dynamic = [], options.get("dynamic") or {}
    if not isinstance(dynamic, dict) or not all(isinstance(change, dict) for change in dynamic.values()):
        raise bad_option("dynamic", dynamic, "an object of objects")
    for pattern, changes in dynamic.items():
        if pattern.startswith("-:"):
            continue
        try:
            compiled = re.compile(pattern.removeprefix("+:"))
        except re.error:
            raise bad_option("dynamic", pattern, "patterns") from None
        rules.append((compiled, Gptq({**options, **changes, "dynamic": None})))
    return rules


class Awq(StoredFormat):
    """Version gemm: qweight int32 [inputs, outputs / 8], qzeros int32 [groups, outputs / 8], scales [groups, outputs].
    Version gemv: qweight [outputs, inputs / 8], qzeros [outputs, words], scales [outputs, 8 * words], both filled up,
    and codes in their own order."""

    first = "qweight"
    others = ("scales", "qzeros")

    def __init__(self, options: Mapping[str, Any]) -> None:
        check_option("bits", options.get("bits", options.get("w_bit", 4)), (4,))
        version = str(options.get("version", "gemm")).lower()
        check_option("version", version, ("gemm", "gemv"))
        self._is_by_output = version == "gemv"
        self._group_size = read_group_size(options, "group_size" if "group_size" in options else "q_group_size")

    def shape(self, shapes: Mapping[str, list[int]]) -> list[int]:
        """See StoredFormat."""
        rows, words = shapes["qweight"]
        return [rows, words * 8] if self._is_by_output else [words * 8, rows]

    def read(self, tensors: Mapping[str, Tensor]) -> QuantizedMatrix | Tensor:
        """See StoredFormat."""
        scales = tensors["scales"]
        if self._is_by_output:
            numbers = signed(unpack_bits(tensors["qweight"], 4), 4)
            zeros = unpack_bits(tensors["qzeros"], 4).float() - 8
            count = -(-numbers.shape[1] // (self._group_size or numbers.shape[1]))
            if min(zeros.shape[1], scales.shape[1]) < count:
                raise ModelLoadError(f"{scales.shape[1]} groups of scales, must be at least {count}")
            scales, zeros = scales[:, :count], zeros[:, :count]
        else:
            numbers = signed(self._ordered(tensors["qweight"]).t().contiguous(), 4)
            zeros = self._ordered(tensors["qzeros"]).t().float() - 8
            scales = scales.t()
        return integer_matrix(numbers, scales, zeros, bits=4, group_size=self._group_size)

    @staticmethod
    def _ordered(words: Tensor) -> Tensor:
        """[rows, outputs / 8] int32 to [rows, outputs] uint8."""
        return unpack_bits(words, 4).view(words.shape[0], -1, 8)[:, :, list(_AWQ_ORDER)].flatten(1)
