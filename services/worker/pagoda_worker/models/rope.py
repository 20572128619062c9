"""Rotary frequencies: scaling rules of checkpoints, and the table of cosines and sines."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pagoda_common.errors import ModelLoadError
from pagoda_worker.models.hf_config import GLOBAL, LOCAL, HfConfig, get
from pagoda_worker.models.spec import RopeSpec

_FACTORS = ("short_factor", "long_factor")
_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("factor", *_FACTORS, "original_max_position_embeddings"),
    "proportional": (),
}
"""Supported types, and their required parameters."""
_KNOWN = frozenset(
    """
    type rope_type rope_theta partial_rotary_factor factor original_max_position_embeddings attention_factor finetuned
    low_freq_factor high_freq_factor beta_fast beta_slow mscale mscale_all_dim truncate short_factor long_factor
    """.split()  # noqa: SIM905
)
"""All known parameters; finetuned has no effect."""


def rope_spec(
    config: HfConfig,
    *,
    default_theta: float = 10000.0,
    default_partial: float = 1.0,
    default_original: int | None = None,
    is_interleaved: bool = False,
) -> RopeSpec:
    """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

    Args:
        default_theta, default_partial, default_original: the family's defaults of base, partial_rotary_factor and
        original_max_position_embeddings.

    Raises:
        ModelLoadError: the rope type is not supported, or lacks a parameter.
    """
    parameters = dict(get(config, "rope_scaling", {})) | dict(get(config, "rope_parameters", {}))
    if _is_nested(parameters):
        raise ModelLoadError("rope_parameters differ between layer types, which this architecture does not support")
    defaults = {"rope_theta": default_theta, "partial_rotary_factor": default_partial}
    defaults |= {name: config[name] for name in defaults if config.get(name) is not None}
    original = get(config, "original_max_position_embeddings", default_original)
    return _parse(parameters, config, defaults, original, is_interleaved)


def rope_specs_by_kind(
    config: HfConfig, *, default_thetas: Mapping[str, float], is_interleaved: bool = False
) -> dict[str, RopeSpec]:
    """One rotation for layers with a sliding window, one for the others: from nested `rope_parameters` (transformers
    5), or `rope_theta` and `rope_scaling` for the others and `rope_local_base_freq` (before).

    Args:
        default_thetas: default base of each kind.

    Raises:
        ModelLoadError: as in rope_spec.
    """
    parameters = dict(get(config, "rope_parameters", {}))
    if not _is_nested(parameters):
        local_theta = config.get("rope_local_base_freq")
        parameters = {
            GLOBAL: {"rope_theta": config.get("rope_theta")} | dict(get(config, "rope_scaling", {})) | parameters,
            LOCAL: {"rope_theta": local_theta},
        }
    specs = {}
    for kind in (GLOBAL, LOCAL):
        given = dict(get(parameters, kind, {}))
        defaults = {"rope_theta": default_thetas[kind], "partial_rotary_factor": 1.0}
        specs[kind] = _parse(given, config, defaults, config.get("original_max_position_embeddings"), is_interleaved)
    return specs


def _is_nested(parameters: Mapping[str, Any]) -> bool:
    return bool(parameters) and all(isinstance(value, dict | None) for value in parameters.values())


def _parse(
    parameters: dict[str, Any], config: HfConfig, defaults: dict[str, Any], original: int | None, is_interleaved: bool
) -> RopeSpec:
    parameters = defaults | {name: value for name, value in parameters.items() if value is not None}
    rope_type = parameters.pop("rope_type", parameters.get("type", "default"))
    rope_type = "longrope" if rope_type == "su" else rope_type  # its first name
    if rope_type not in _NEEDED:
        raise ModelLoadError(f"rope type {rope_type!r} is not supported; supported are {', '.join(_NEEDED)}")
    for name, value in parameters.items():
        if name not in _KNOWN and value:
            raise ModelLoadError(
                f"config.json has {name} {value!r} among the rope parameters, which is not supported and may change "
                "what the model computes"
            )
    theta, partial = parameters.pop("rope_theta"), parameters.pop("partial_rotary_factor")
    max_length = config.get("max_position_embeddings")
    if original is not None:
        parameters["original_max_position_embeddings"] = original
    elif max_length is not None:
        parameters.setdefault("original_max_position_embeddings", max_length)
    if rope_type in ("yarn", "longrope") and "factor" not in parameters and max_length is not None:
        parameters["factor"] = max_length / parameters["original_max_position_embeddings"]
    known: dict[str, Any] = {name: value for name, value in parameters.items() if isinstance(value, bool | int | float)}
    known |= {name: tuple(parameters[name]) for name in _FACTORS if isinstance(parameters.get(name), list)}
    if rope_type == "proportional":  # all values are rotated, most of them by nothing
        known = {name: value for name, value in known.items() if name == "factor"} | {"proportion": float(partial)}
        partial = 1.0
    for name in _NEEDED[rope_type]:
        if name not in known:
            raise ModelLoadError(f"rope type {rope_type} needs {name} in rope_parameters")
    return RopeSpec(
        theta=float(theta),
        rope_type=rope_type,
        parameters=tuple(sorted(known.items())) if rope_type != "default" else (),
        partial_rotary_factor=float(partial),
        is_interleaved=is_interleaved,
    )


def max_positions(spec: RopeSpec, configured: int) -> int:
    """Maximum sequence length: yarn extends the original context by its factor, whatever max_position_embeddings says
    (users add yarn to a config without changing it)."""
    if spec.rope_type != "yarn":
        return configured
    parameters = dict(spec.parameters)
    return max(configured, int(parameters["original_max_position_embeddings"] * parameters["factor"]))


def inverse_frequencies(spec: RopeSpec, rotary_dim: int, max_positions: int) -> tuple[Tensor, float]:
    """Angles per position, [rotary_dim / 2] float32, and the factor on cosines and sines.

    The dynamic type changes nothing within max_position_embeddings, which bounds every sequence here. longrope has
    factors for short and for long sequences: `max_positions` chooses one set for all, because otherwise a sequence that
    grows long would have to be recomputed, and blocks could not be shared between short and long sequences. Source:
    transformers' modeling_rope_utils, whose float32 operations are followed step by step.
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    frequencies = 1.0 / (spec.theta**exponents)
    parameters = dict(spec.parameters)
    if spec.rope_type == "linear":
        return frequencies / parameters["factor"], 1.0
    if spec.rope_type == "llama3":
        return _llama3(frequencies, parameters), 1.0
    if spec.rope_type == "yarn":
        return _yarn(spec.theta**exponents, spec.theta, rotary_dim, parameters)
    if spec.rope_type == "longrope":
        return _longrope(spec.theta**exponents, parameters, max_positions)
    if spec.rope_type == "proportional":
        frequencies[int(parameters["proportion"] * rotary_dim // 2) :] = 0.0
        return frequencies / parameters.get("factor", 1.0), 1.0
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


def _yarn(wavelengths: Tensor, theta: float, rotary_dim: int, parameters: dict[str, Any]) -> tuple[Tensor, float]:
    factor, original = parameters["factor"], parameters["original_max_position_embeddings"]

    def attention_scale(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    def dimension(rotations: float) -> float:
        return (rotary_dim * math.log(original / (rotations * 2 * math.pi))) / (2 * math.log(theta))

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
    low, high = max(low, 0), min(high, rotary_dim - 1)
    high += 0.001 if low == high else 0
    ramp = torch.clamp((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    extrapolation = 1 - ramp
    frequencies = 1.0 / (factor * wavelengths) * (1 - extrapolation) + 1.0 / wavelengths * extrapolation
    return frequencies, float(attention_factor)


def _longrope(wavelengths: Tensor, parameters: dict[str, Any], max_positions: int) -> tuple[Tensor, float]:
    factor, original = parameters["factor"], parameters["original_max_position_embeddings"]
    factors = torch.tensor(parameters["long_factor" if max_positions > original else "short_factor"]).float()
    if factors.shape != wavelengths.shape:
        raise ModelLoadError(f"longrope has {factors.numel()} factors for {wavelengths.numel()} frequencies")
    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return 1.0 / (factors * wavelengths), float(attention_factor)


class RotaryTable:
    """Cosines and sines of all positions, float32."""

    def __init__(self, *, spec: RopeSpec, head_dim: int, max_positions: int, device: torch.device) -> None:
        frequencies, factor = inverse_frequencies(spec, spec.rotary_dim(head_dim), max_positions)
        angles = torch.arange(max_positions).float()[:, None] * frequencies
        self._cos = (angles.cos() * factor).to(device)[:, None]  # [max_positions, 1, rotary_dim / 2]
        self._sin = (angles.sin() * factor).to(device)[:, None]

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines of every position, [max_positions, 1, rotary_dim / 2]."""
        return self._cos, self._sin

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, [num_tokens, 1, rotary_dim / 2]."""
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)
