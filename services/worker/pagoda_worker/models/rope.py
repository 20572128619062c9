"""Rotary frequencies: the scaling rules that checkpoints name, and the table of cosines and sines."""

import math
from typing import Any

import torch
from torch import Tensor

from pagoda_common.errors import ModelLoadError
from pagoda_worker.models.spec import HfConfig, RopeSpec, get

SUPPORTED_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


def rope_spec(config: HfConfig, *, default_theta: float = 10000.0) -> RopeSpec:
    """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

    Raises:
        ModelLoadError: a rope type that is not supported.
    """
    parameters: dict[str, Any] = dict(get(config, "rope_scaling", {}) or {})
    parameters |= dict(get(config, "rope_parameters", {}) or {})
    if parameters and all(isinstance(value, dict) for value in parameters.values()):
        raise ModelLoadError("rope_parameters differ between layer types, which is not supported")
    rope_type = parameters.pop("rope_type", None) or parameters.pop("type", None) or "default"
    parameters.pop("type", None)
    if rope_type not in SUPPORTED_ROPE_TYPES:
        raise ModelLoadError(
            f"rope type {rope_type!r} is not supported; supported are {', '.join(SUPPORTED_ROPE_TYPES)}"
        )
    theta = parameters.pop("rope_theta", None) or get(config, "rope_theta", default_theta)
    if float(parameters.pop("partial_rotary_factor", None) or get(config, "partial_rotary_factor", 1.0)) != 1.0:
        raise ModelLoadError("partial_rotary_factor other than 1 is not supported")
    original = get(config, "original_max_position_embeddings", config.get("max_position_embeddings"))
    if parameters.get("original_max_position_embeddings") is None and original is not None:
        parameters["original_max_position_embeddings"] = original
    known = {name: value for name, value in parameters.items() if isinstance(value, bool | int | float)}
    for name in {"linear": ("factor",), "llama3": _LLAMA3, "yarn": ("factor",)}.get(rope_type, ()):
        if name not in known:
            raise ModelLoadError(f"rope type {rope_type} needs {name} in rope_parameters")
    return RopeSpec(theta=float(theta), rope_type=rope_type, parameters=tuple(sorted(known.items())))


_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def max_positions(spec: RopeSpec, configured: int) -> int:
    """Longest sequence: yarn stretches the original context by its factor, whatever max_position_embeddings says (users
    add yarn to a config and leave that as it is)."""
    if spec.rope_type != "yarn":
        return configured
    parameters = dict(spec.parameters)
    return max(configured, int(parameters["original_max_position_embeddings"] * parameters["factor"]))


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> tuple[Tensor, float]:
    """Angles per position, [head_dim / 2] float32, and the factor on cosines and sines.

    The dynamic type changes nothing within max_position_embeddings, which bounds every sequence here.
    Source: transformers' modeling_rope_utils, whose float32 operations are followed step by step.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (spec.theta**exponents)
    parameters = dict(spec.parameters)
    if spec.rope_type == "linear":
        return frequencies / parameters["factor"], 1.0
    if spec.rope_type == "llama3":
        return _llama3(frequencies, parameters), 1.0
    if spec.rope_type == "yarn":
        return _yarn(spec.theta**exponents, spec.theta, head_dim, parameters)
    return frequencies, 1.0


def _llama3(frequencies: Tensor, parameters: dict[str, Any]) -> Tensor:
    factor, original = parameters["factor"], parameters["original_max_position_embeddings"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    wavelengths = 2 * math.pi / frequencies
    scaled = torch.where(wavelengths > original / low, frequencies / factor, frequencies)
    smooth = (original / wavelengths - low) / (high - low)
    smoothed = (1 - smooth) * scaled / factor + smooth * scaled
    is_medium = ~(wavelengths < original / high) & ~(wavelengths > original / low)
    return torch.where(is_medium, smoothed, scaled)


def _yarn(wavelengths: Tensor, theta: float, head_dim: int, parameters: dict[str, Any]) -> tuple[Tensor, float]:
    factor, original = parameters["factor"], parameters["original_max_position_embeddings"]

    def attention_scale(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    def dimension(rotations: float) -> float:
        return (head_dim * math.log(original / (rotations * 2 * math.pi))) / (2 * math.log(theta))

    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        mscale, mscale_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
        if mscale and mscale_all:
            attention_factor = attention_scale(mscale) / attention_scale(mscale_all)
        else:
            attention_factor = attention_scale(1)
    low, high = dimension(parameters.get("beta_fast") or 32), dimension(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high += 0.001 if low == high else 0
    ramp = torch.clamp((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    extrapolation = 1 - ramp
    frequencies = 1.0 / (factor * wavelengths) * (1 - extrapolation) + 1.0 / wavelengths * extrapolation
    return frequencies, float(attention_factor)


class RotaryTable:
    """Cosines and sines of all positions, float32."""

    def __init__(self, *, spec: RopeSpec, head_dim: int, max_positions: int, device: torch.device) -> None:
        frequencies, factor = inverse_frequencies(spec, head_dim)
        angles = torch.arange(max_positions).float()[:, None] * frequencies
        self._cos = (angles.cos() * factor).to(device)[:, None]  # [max_positions, 1, head_dim / 2]
        self._sin = (angles.sin() * factor).to(device)[:, None]

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, [num_tokens, 1, head_dim / 2]."""
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)
