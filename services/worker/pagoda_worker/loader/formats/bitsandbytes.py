"""bitsandbytes: NF4 and FP4 in blocks, with absolute maxima that may be quantized themselves, and int8 by output.

Sources: QLoRA (Dettmers et al. 2023, arXiv 2305.14314), section 3; LLM.int8() (arXiv 2208.07339); and the names that
the package bitsandbytes gives the parts of its QuantState.
"""

import json
import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from pagoda_common.errors import ModelLoadError
from pagoda_kernels.linear.quantized_matrix import QuantizedMatrix
from pagoda_worker.loader.formats.integers import integer_matrix
from pagoda_worker.loader.formats.stored_format import StoredFormat, bad_option

_STATE = ".quant_state.bitsandbytes__"
_KINDS = ("nf4", "fp4")


def bitsandbytes_format(options: Mapping[str, Any]) -> StoredFormat:
    """The format of a checkpoint, by its quantization_config.

    Raises:
        ModelLoadError: neither of 4 nor of 8 bits.
    """
    if options.get("load_in_4bit"):
        return FourBits()
    if options.get("load_in_8bit"):
        return EightBits()
    raise bad_option("load_in_4bit", options.get("load_in_4bit"), "true, or load_in_8bit")


class EightBits(StoredFormat):
    """weight int8 [outputs, inputs]; SCB float32 [outputs], what 127 stands for; weight_format, how rows lie."""

    first = "SCB"
    others = ("weight",)
    optional = ("weight_format",)

    def shape(self, shapes: Mapping[str, list[int]]) -> list[int]:
        """See StoredFormat."""
        return shapes["weight"]

    def read(self, tensors: Mapping[str, Tensor]) -> QuantizedMatrix | Tensor:
        """See StoredFormat."""
        numbers, largest = tensors["weight"], tensors["SCB"].float()
        if numbers.dtype != torch.int8:
            raise ModelLoadError(f"data type is {str(numbers.dtype).removeprefix('torch.')}, must be int8")
        if "weight_format" in tensors and int(tensors["weight_format"]):
            raise ModelLoadError(f"weight_format is {int(tensors['weight_format'])}, must be 0 (row)")
        return integer_matrix(numbers, largest.reshape(-1, 1) / 127, None, bits=8, group_size=0)


class FourBits(StoredFormat):
    """weight uint8 [numbers / 2, 1], the upper bits first; absmax of each block; quant_map, what 16 codes stand for."""

    makes_floats = True
    described_by = "state"

    def parts(self, names: Collection[str]) -> dict[str, dict[str, str]]:
        """See StoredFormat."""
        found: dict[str, dict[str, str]] = {}
        for name in names:
            matrix, mark, kind = name.partition(_STATE)
            if not mark or kind not in _KINDS:
                continue
            parts = {"state": name, "weight": matrix, "absmax": f"{matrix}.absmax", "quant_map": f"{matrix}.quant_map"}
            missing = [part for part in parts.values() if part not in names]
            if missing:
                raise ModelLoadError(f"{name} is there, {missing[0]} is missing")
            nested = {part: f"{matrix}.{part}" for part in ("nested_absmax", "nested_quant_map")}
            found[matrix] = parts | {part: full for part, full in nested.items() if full in names}
        return found

    def shape(self, shapes: Mapping[str, list[int]]) -> list[int]:
        """Only the state tells: `described_shape`."""
        raise NotImplementedError

    def described_shape(self, description: Tensor) -> list[int]:
        """See StoredFormat."""
        shape = _state(description).get("shape")
        if not isinstance(shape, list) or not shape or not all(isinstance(size, int) and size > 0 for size in shape):
            raise ModelLoadError(f"quant_state has shape {shape!r}, must be positive numbers")
        return shape

    def read(self, tensors: Mapping[str, Tensor]) -> QuantizedMatrix | Tensor:
        """See StoredFormat: float32."""
        state, packed = _state(tensors["state"]), tensors["weight"].flatten()
        shape, block = self.described_shape(tensors["state"]), _size(state, "blocksize")
        count = math.prod(shape)
        if packed.dtype != torch.uint8 or len(packed) != -(-count // 2):
            raise ModelLoadError(f"{len(packed)} bytes for {shape} numbers, must be {-(-count // 2)}")
        largest = _largest(tensors, state)
        if len(largest) != -(-count // block):
            raise ModelLoadError(f"{len(largest)} values of absmax, must be {-(-count // block)} (blocks of {block})")
        values = tensors["quant_map"].float()
        if len(values) != 16:
            raise ModelLoadError(f"quant_map has {len(values)} values, must be 16")
        numbers = values[torch.stack((packed >> 4, packed & 15), dim=-1).flatten()[:count].long()]
        return numbers.mul_(largest.repeat_interleave(block)[:count]).view(shape)


def _largest(tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> Tensor:
    """The value of 1 in each block, float32."""
    stored = tensors["absmax"]
    if "nested_absmax" not in tensors:
        return stored.float()
    outer, values = tensors["nested_absmax"].float(), tensors.get("nested_quant_map")
    block, offset = _size(state, "nested_blocksize"), state.get("nested_offset")
    if values is None or len(values) != 256 or stored.dtype != torch.uint8 or not isinstance(offset, int | float):
        raise ModelLoadError("absmax is quantized, but nested_quant_map or nested_offset do not tell how")
    if len(outer) != -(-len(stored) // block):
        raise ModelLoadError(f"{len(outer)} values of nested_absmax, must be {-(-len(stored) // block)}")
    return values.float()[stored.long()] * outer.repeat_interleave(block)[: len(stored)] + offset


def _state(tensor: Tensor) -> dict[str, Any]:
    try:
        state = json.loads(bytes(tensor.tolist()))
    except (ValueError, TypeError, RecursionError):
        state = None
    if not isinstance(state, dict):
        raise ModelLoadError("quant_state is not a JSON object")
    return state


def _size(state: Mapping[str, Any], name: str) -> int:
    size = state.get(name)
    if not isinstance(size, int) or size < 1:
        raise ModelLoadError(f"quant_state has {name} {size!r}, must be at least 1")
    return size
