"""Reads peft's adapter_config.json, and refuses options beyond low-rank matrices. Knows no tensors."""

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagoda_common.errors import ModelLoadError
from pagoda_worker.lora.module_patterns import places_of

CONFIG_FILE = "adapter_config.json"
MAX_CONFIG_BYTES = 16 << 20
MAX_NUMBER = 1e9
"""Maximum of ranks and of their scales."""
MAX_SHOWN_CHARS = 200
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
    "alora_invocation_tokens": (None, []),
    "megatron_config": (None, {}),
}
"""Values of fields that change nothing. Other values are refused, unless a tensor reports them first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PeftConfig:
    """Settings of the scale of matrices."""

    rank: int
    alpha: float
    is_rank_stabilized: bool = False
    """rslora: scale by the square root of the rank."""
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    """By regular expression for the end of a module's name."""
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    extras: tuple[str, ...] = ()
    """Fields that ask for unsupported options, as in `use_dora is True`."""

    def scales_of(self, modules: Collection[str]) -> dict[str, float]:
        """Factor of the product of each module's matrices.

        Raises:
            ModelLoadError: a pattern is not a regular expression, or the search takes too much time or memory.
        """
        ranks, alphas = _matching(self.rank_pattern, modules), _matching(self.alpha_pattern, modules)
        scales = {}
        for module in modules:
            rank, alpha = ranks.get(module, self.rank), alphas.get(module, self.alpha)
            scales[module] = alpha / math.sqrt(rank) if self.is_rank_stabilized else alpha / rank
        return scales


def _matching(pattern: Mapping[str, float], modules: Collection[str]) -> dict[str, float]:
    """For each module, the first value whose key matches the end of its name; only for modules with a match."""
    values = list(pattern.values())
    return {module: values[place] for module, place in places_of(list(pattern), modules).items()} if values else {}


def read_peft_config(directory: Path) -> PeftConfig:
    """The config of an adapter.

    Raises:
        ModelLoadError: the file is missing, not an object, or not of LoRA, or a field is out of bounds.
    """
    path = directory / CONFIG_FILE
    try:
        if path.exists() and not path.is_file():  # a pipe or a device would be read without end
            raise ModelLoadError(f"{path} must be a file")
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ModelLoadError(f"{path} has {path.stat().st_size} bytes, must have at most {MAX_CONFIG_BYTES}")
        given = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"cannot read {path}: {error}") from error
    if not isinstance(given, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, got {type(given).__name__}")
    if given.get("peft_type") != "LORA":
        raise ModelLoadError(f"{path}: peft_type is {_shown(given.get('peft_type'))}, must be 'LORA'")
    extras = tuple(
        f"{name} is {_shown(given[name])}" for name, neutral in _NEUTRAL.items() if given.get(name) not in neutral
    )
    ranks = _pattern(path, given, "rank_pattern")
    if any(rank < 1 or rank != int(rank) for rank in ranks.values()):
        raise ModelLoadError(f"{path}: rank_pattern must have whole numbers of at least 1")
    return PeftConfig(
        rank=int(_number(path, given, "r", 8, low=1)),
        alpha=_number(path, given, "lora_alpha", 8),
        is_rank_stabilized=bool(given.get("use_rslora")),
        rank_pattern={name: int(rank) for name, rank in ranks.items()},
        alpha_pattern=_pattern(path, given, "alpha_pattern"),
        extras=extras,
    )


def _number(path: Path, given: dict[str, Any], name: str, default: float, *, low: float = -MAX_NUMBER) -> float:
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= MAX_NUMBER:
        bound = f"a number from {low:g} to {MAX_NUMBER:g}"
        raise ModelLoadError(f"{path}: {name[:100]} is {_shown(value)}, must be {bound}")
    return value


def _pattern(path: Path, given: dict[str, Any], name: str) -> dict[str, float]:
    pattern = given.get(name) or {}
    if not isinstance(pattern, dict):
        raise ModelLoadError(f"{path}: {name} is {_shown(pattern)}, must be an object")
    for key in pattern:
        _number(path, pattern, key, 0)
    return pattern


def _shown(value: Any) -> str:
    """A value of any size, shortened for a message."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}…"
