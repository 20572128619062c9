"""Checkpoints as GPTQ, AWQ and compressed-tensors write them, made of a float one, and their twins of floats.

The packing is written out code by code from the public descriptions of the formats; nothing is shared with the reader.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column that each nibble of an AWQ word holds, the lowest first."""


def packed_columns(codes: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """[rows, columns] codes to [rows, columns / per word] int32, filled up with zeros."""
    if 32 % bits:
        return packed_stream(codes, bits)
    per_word = 32 // bits
    codes = torch.nn.functional.pad(codes.long(), (0, -codes.shape[1] % per_word))
    words = torch.zeros(codes.shape[0], codes.shape[1] // per_word, dtype=torch.int64)
    for nibble in range(per_word):
        column = order[nibble] if order else nibble
        words |= codes[:, column::per_word] << (bits * nibble)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def packed_stream(codes: Tensor, bits: int) -> Tensor:
    """The same for codes that cross the borders of words: bit by bit, the lowest first."""
    rows = []
    for row in codes.tolist():
        number = sum(code << (bits * place) for place, code in enumerate(row))
        words = [number >> (32 * word) & 0xFFFFFFFF for word in range(-(-len(row) * bits // 32))]
        rows.append([word - 2**32 if word >= 2**31 else word for word in words])
    return torch.tensor(rows, dtype=torch.int32)


def quantized(weight: Tensor, *, bits: int, groups: Tensor, is_symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [rows, columns] from 0, zeros [rows, groups] and scales [rows, groups] float16.

    Args:
        groups: [columns], the group of each.
    """
    most, count = (1 << bits) - 1, int(groups.max()) + 1
    zeros, scales = torch.zeros(weight.shape[0], count), torch.zeros(weight.shape[0], count)
    for group in range(count):
        part = weight[:, groups == group]
        least, greatest = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if is_symmetric:
            scales[:, group] = 2 * torch.maximum(-least, greatest) / most
            zeros[:, group] = (most + 1) // 2
        else:
            scales[:, group] = (greatest - least) / most
            zeros[:, group] = (-least / scales[:, group]).round().clamp(0, most)
    scales = scales.half()
    codes = (weight / scales.float()[:, groups] + zeros[:, groups]).round().clamp(0, most)
    return codes.long(), zeros.long(), scales


def quantize_checkpoint(
    source: Path,
    target: Path,
    twin: Path,
    *,
    method: str,
    bits: int = 4,
    group_size: int = 32,
    is_symmetric: bool = True,
    is_reordered: bool = False,
    checkpoint_format: str = "gptq",
    ignored: tuple[str, ...] = (),
) -> None:
    """Write `target`, whose projections are integers, and `twin`, which holds the same numbers as float32.

    Args:
        group_size: -1 is one group for all inputs.
        is_reordered: inputs are in groups by activation (desc_act).
        ignored: parts of names of projections that stay floats.
    """
    generator = torch.Generator().manual_seed(3)
    stored: dict[str, Tensor] = {}
    floats: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        if not stem.endswith(("_proj", "c_attn", "c_proj", "c_fc")) or any(part in name for part in ignored):
            stored[name] = floats[name] = tensor
            continue
        if name.endswith(".bias") or tensor.dim() != 2:
            stored[name] = floats[name] = tensor
            continue
        is_transposed = stem.endswith(("c_attn", "c_proj", "c_fc"))  # GPT-2 stores [inputs, outputs]
        weight = tensor.float().t() if is_transposed else tensor.float()
        groups = torch.arange(weight.shape[1]) // (weight.shape[1] if group_size == -1 else group_size)
        if is_reordered:
            groups = groups[torch.randperm(len(groups), generator=generator)]
        codes, zeros, scales = quantized(weight, bits=bits, groups=groups, is_symmetric=is_symmetric)
        value = scales.float()[:, groups] * (codes - zeros[:, groups])
        floats[name] = (value.t() if is_transposed else value).contiguous()
        if method == "gptq":
            shift = 1 if checkpoint_format == "gptq" else 0
            stored[f"{stem}.qweight"] = packed_columns(codes, bits).t().contiguous()
            stored[f"{stem}.qzeros"] = packed_columns((zeros - shift).t().clamp(min=0), bits)
            stored[f"{stem}.scales"] = scales.t().contiguous()
            stored[f"{stem}.g_idx"] = groups.int()
            stored.setdefault(f"{stem}.bias", torch.zeros(weight.shape[0]))
        elif method == "awq" and checkpoint_format == "gemv":
            words = -(-zeros.shape[1] // 8)
            filled = torch.nn.functional.pad(scales, (0, 8 * words - scales.shape[1]))
            stored[f"{stem}.qweight"] = packed_columns(codes, 4)
            stored[f"{stem}.qzeros"] = packed_columns(zeros, 4)
            stored[f"{stem}.scales"] = filled
        elif method == "awq":
            stored[f"{stem}.qweight"] = packed_columns(codes.t(), 4, AWQ_COLUMNS)
            stored[f"{stem}.qzeros"] = packed_columns(zeros.t(), 4, AWQ_COLUMNS)
            stored[f"{stem}.scales"] = scales.t().contiguous()
        else:
            stored[f"{stem}.weight_packed"] = packed_columns(codes, bits)
            stored[f"{stem}.weight_scale"] = scales
            stored[f"{stem}.weight_shape"] = torch.tensor(weight.shape)
            if not is_symmetric:
                stored[f"{stem}.weight_zero_point"] = packed_columns(zeros.t(), bits).t().contiguous()
    for directory, tensors in ((target, stored), (twin, floats)):
        directory.mkdir(parents=True, exist_ok=True)
        for path in source.iterdir():
            if path.suffix == ".json":
                (directory / path.name).write_bytes(path.read_bytes())
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] = options(
        method, bits, group_size, is_symmetric, is_reordered, checkpoint_format=checkpoint_format
    )
    (target / "config.json").write_text(json.dumps(config))


def options(
    method: str, bits: int, group_size: int, is_symmetric: bool, is_reordered: bool, *, checkpoint_format: str
) -> dict[str, Any]:
    """quantization_config, as each method's tools write it."""
    if method == "gptq":
        return {
            "quant_method": "gptq",
            "bits": bits,
            "group_size": group_size,
            "sym": is_symmetric,
            "desc_act": is_reordered,
            "checkpoint_format": checkpoint_format,
        }
    if method == "awq":
        return {
            "quant_method": "awq",
            "bits": bits,
            "group_size": group_size,
            "zero_point": not is_symmetric,
            "version": "gemv" if checkpoint_format == "gemv" else "gemm",
        }
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": is_symmetric,
        "strategy": "channel" if group_size == -1 else "group",
        "group_size": None if group_size == -1 else group_size,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "ignore": ["lm_head"],
    }
