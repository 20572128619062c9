"""Checkpoints of 8-bit numbers beside their scales, FP8 and int8, and their twins of the floats that these stand for.

Scales are applied here block by block, from the public descriptions of the formats; nothing is shared with the reader.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoints import make_checkpoint

FP8 = torch.float8_e4m3fn
MOST = 448.0
"""Of FP8 (e4m3)."""
E2M1 = [sign * magnitude for sign in (1.0, -1.0) for magnitude in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]
"""Numbers of MXFP4's codes."""


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How the projections of a checkpoint are stored."""

    config: dict[str, Any]
    """quantization_config."""
    kind: str = "fp8"
    """fp8 or int8."""
    rows: int = 0
    """Of a block that shares a scale; 0 is all."""
    columns: int = 0
    scale: str = "weight_scale"
    """Last part of its name."""
    scale_dtype: torch.dtype = torch.float32
    is_flat: bool = False
    """The scale of all is a number without dimensions."""
    extra: dict[str, Callable[[], Tensor]] = field(default_factory=dict)
    """Further tensors of each projection."""
    has_zeros: bool = False


def write_scaled(
    source: Path, target: Path, twin: Path, scheme_of: Callable[[str], Scheme | None], config: dict[str, Any]
) -> None:
    """Write `target` and `twin`, which holds the same numbers as float32.

    Args:
        scheme_of: of a projection, by its name without .weight; None: it stays floats.
        config: quantization_config of all.
    """
    stored: dict[str, Tensor] = {}
    floats: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        is_projection = stem.endswith(("_proj", ".w1", ".w2", ".w3")) and name.endswith(".weight")
        scheme = scheme_of(stem) if is_projection else None
        if scheme is None:
            stored[name] = floats[name] = tensor
            continue
        codes, scales, zeros, value = scaled(tensor.float(), scheme)
        floats[name] = value
        stored[name] = codes
        stored[f"{stem}.{scheme.scale}"] = scales
        if zeros is not None:
            stored[f"{stem}.weight_zero_point"] = zeros
        stored |= {f"{stem}.{leaf}": make() for leaf, make in scheme.extra.items()}
    for directory, tensors in ((target, stored), (twin, floats)):
        directory.mkdir(parents=True, exist_ok=True)
        for path in source.iterdir():
            if path.suffix == ".json":
                (directory / path.name).write_bytes(path.read_bytes())
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    written = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(written | {"quantization_config": config}))


def scaled(weight: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Codes, scales, zero points and the floats that they stand for, block by block."""
    height, width = scheme.rows or weight.shape[0], scheme.columns or weight.shape[1]
    counts = -(-weight.shape[0] // height), -(-weight.shape[1] // width)
    scales, zeros = torch.zeros(counts), torch.zeros(counts, dtype=torch.int8)
    codes = torch.zeros(weight.shape, dtype=FP8 if scheme.kind == "fp8" else torch.int8)
    value = torch.zeros(weight.shape)
    for row in range(counts[0]):
        for column in range(counts[1]):
            place = (slice(row * height, (row + 1) * height), slice(column * width, (column + 1) * width))
            part = weight[place]
            scale = (part.abs().max() / (MOST if scheme.kind == "fp8" else 100)).to(scheme.scale_dtype).float()
            zero = (row + column) % 5 if scheme.has_zeros else 0
            if scheme.kind == "fp8":
                codes[place] = (part / scale).clamp(-MOST, MOST).to(FP8)
            else:
                codes[place] = (part / scale + zero).round().clamp(-128, 127).to(torch.int8)
            value[place] = (codes[place].float() - zero) * scale
            scales[row, column], zeros[row, column] = scale, zero
    scales = scales.to(scheme.scale_dtype)
    return codes, scales.reshape(()) if scheme.is_flat else scales, zeros if scheme.has_zeros else None, value


def compressed(kind: str, strategy: str, *, activations: bool | None = True, **weights: Any) -> dict[str, Any]:
    """One of config_groups of compressed-tensors. `activations`: dynamic, static (False), or none."""
    inputs = {"num_bits": 8, "type": kind, "dynamic": activations, "strategy": "token" if activations else "tensor"}
    return {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": kind, "strategy": strategy, "symmetric": True} | weights,
        "input_activations": None if activations is None else inputs,
    }


def write_mxfp4(directory: Path) -> tuple[Path, Path]:
    """Two small checkpoints of gpt-oss: experts as floats, and in MXFP4 with the same values."""
    options = {"hidden_size": 64, "intermediate_size": 128, "num_local_experts": 4, "num_experts_per_tok": 2}
    floats, packed = (
        make_checkpoint("GptOssForCausalLM", directory / name, **options) for name in ("floats", "packed")
    )
    tensors, of_floats = load_file(packed / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        blocks, scales, values = _mxfp4(tensors.pop(name).transpose(1, 2))
        tensors |= {f"{name}_blocks": blocks.contiguous(), f"{name}_scales": scales}
        of_floats[name] = values.transpose(1, 2).contiguous()
    save_file(tensors, packed / "model.safetensors", {"format": "pt"})
    save_file(load_file(floats / "model.safetensors") | of_floats, floats / "model.safetensors", {"format": "pt"})
    config = json.loads((packed / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (packed / "config.json").write_text(json.dumps(config))
    return floats, packed


def _mxfp4(weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks and scales near [experts, rows, columns], and the floats that they stand for."""
    groups = weights.unflatten(-1, (-1, 32))
    exponents = (groups.abs().amax(-1) / 6).log2().ceil()
    levels = torch.tensor(E2M1)
    scaled = groups / exponents.exp2()[..., None]
    codes = (scaled[..., None] - levels).abs().argmin(-1).to(torch.uint8)
    floats = (levels[codes.long()] * exponents.exp2()[..., None]).flatten(-2)
    pairs = codes.unflatten(-1, (-1, 2))
    return pairs[..., 0] | pairs[..., 1] << 4, (exponents + 127).to(torch.uint8), floats
