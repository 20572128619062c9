"""Matrices of 8-bit floats or integers with scales: FP8 as DeepSeek, Qwen, NVIDIA and Mistral write it.

Scales for activations, which some checkpoints have, are ignored: only weights are quantized.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from pagoda_common.errors import ModelLoadError
from pagoda_kernels.linear.quantized_matrix import QuantizedMatrix
from pagoda_kernels.linear.scaled_matrix import ScaledMatrix
from pagoda_worker.loader.formats.stored_format import StoredFormat, bad_option, check_option

SCALES_OF_OTHERS = re.compile(
    r"(\.(input|output|activation|act|[kqv]|attn|prob)_(scale|zero_point|global_scale)(_inv|_ub)?"
    r"|\.qscale_act|_proj_activation_scale)$"
)
"""Suffixes of scales of activations and of the KV cache, which keep the engine's precision."""
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class Float8(StoredFormat):
    """NAME in FP8 and NAME_scale_inv or NAME_scale (or qscale_weight): one number, one per output, or one per block."""

    makes_floats = True
    ignored = SCALES_OF_OTHERS

    def __init__(self, options: Mapping[str, Any]) -> None:
        block = options.get("weight_block_size")
        is_pair = isinstance(block, list) and len(block) == 2
        if block is not None and not (is_pair and all(isinstance(size, int) and size >= 1 for size in block)):
            raise bad_option("weight_block_size", block, "two numbers of at least 1")
        self._block: tuple[int, int] | None = None if block is None else (block[0], block[1])
        if "fmt" in options:
            check_option("fmt", options["fmt"], ("e4m3", "e5m2", "float8_e4m3fn", "float8_e5m2"))

    def parts(self, names: Collection[str]) -> dict[str, dict[str, str]]:
        """See StoredFormat. Also stacked experts, whose names have no .weight."""
        found: dict[str, dict[str, str]] = {}
        for name in names:
            for mark in ("_scale_inv", "_scale"):
                matrix = name.removesuffix(mark)
                if matrix != name and matrix in names:
                    found[matrix] = {"weight": matrix, "scale": name}
            if name.endswith(".qscale_weight"):
                matrix = name.removesuffix("qscale_weight") + "weight"
                if matrix not in names:
                    raise ModelLoadError(f"{name} is there, {matrix} is missing")
                found[matrix] = {"weight": matrix, "scale": name}
        return found

    def shape(self, shapes: Mapping[str, list[int]]) -> list[int]:
        """See StoredFormat; stacked ones have one dimension more."""
        return shapes["weight"]

    def read(self, tensors: Mapping[str, Tensor]) -> QuantizedMatrix | Tensor:
        """See StoredFormat: float32."""
        weight, scale = tensors["weight"], tensors["scale"]
        if weight.dtype not in FLOAT8:
            raise ModelLoadError(f"data type is {str(weight.dtype).removeprefix('torch.')}, must be FP8")
        return scale_blocks(weight, scale, self._block)

    def read_scaled(self, tensors: Mapping[str, Tensor]) -> QuantizedMatrix | ScaledMatrix | Tensor:
        """See StoredFormat."""
        return scaled_matrix(tensors["weight"], tensors["scale"], self._block) or self.read(tensors)


def modelopt_format(options: Mapping[str, Any]) -> StoredFormat:
    """The format of NVIDIA's ModelOpt.

    Raises:
        ModelLoadError: the algorithm is not FP8.
    """
    check_option("quant_algo", options.get("quant_algo"), ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"))
    return Float8({})


def scaled_matrix(weight: Tensor, scale: Tensor, block: tuple[int, int] | None) -> ScaledMatrix | None:
    """The operands of `scale_blocks`, with a scale for each output; None: another type or shape.

    Args:
        weight: [rows, columns].
    """
    if weight.dim() != 2 or weight.dtype != torch.float8_e4m3fn:
        return None
    (rows, columns), scale = weight.shape, scale.float()
    if scale.numel() == 1:
        return ScaledMatrix(weight, scale.reshape(1, 1).repeat(rows, 1), columns)
    if block is not None:
        if list(scale.shape) != [-(-rows // block[0]), -(-columns // block[1])]:
            return None
        return ScaledMatrix(weight, scale.repeat_interleave(block[0], 0)[:rows].contiguous(), block[1])
    if list(scale.shape) not in ([rows], [rows, 1]):
        return None
    return ScaledMatrix(weight, scale.reshape(rows, 1).contiguous(), columns)


def scale_blocks(weight: Tensor, scale: Tensor, block: tuple[int, int] | None) -> Tensor:
    """Multiply numbers by their scales, float32.

    Args:
        weight: [..., rows, columns], any type.
        scale: one number; [rows] or [..., rows, 1]; one for each of the stacked; or [..., blocks, blocks] with `block`,
            whose last ones may be smaller.

    Raises:
        ModelLoadError: the scales have another shape.
    """
    values, scale = weight.float(), scale.float()
    *stack, rows, columns = weight.shape
    if scale.numel() == 1:
        return values.mul_(scale.reshape(()))
    if block is not None:
        counts = [*stack, -(-rows // block[0]), -(-columns // block[1])]
        if list(scale.shape) != counts:
            raise ModelLoadError(
                f"scales are {list(scale.shape)}, must be {counts} for {list(weight.shape)} in blocks of {list(block)}"
            )
        spread = scale.repeat_interleave(block[0], -2)[..., :rows, :].repeat_interleave(block[1], -1)
        return values.mul_(spread[..., :columns])
    if list(scale.shape) == [rows]:
        scale = scale[:, None]
    if stack and scale.numel() == stack[0]:
        scale = scale.reshape(-1, *(1 for _ in weight.shape[1:]))
    if list(scale.shape) not in ([*stack, rows, 1], [*stack, 1, 1]):
        raise ModelLoadError(f"scales are {list(scale.shape)}, must be one, or one for each of {rows} outputs")
    return values.mul_(scale)
