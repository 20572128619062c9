"""Reads adapter_config.json as peft writes it, and refuses what is more than low-rank matrices. Knows no tensors."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagoda_common.errors import ModelLoadError

CONFIG_FILE = "adapter_config.json"
MAX_CONFIG_BYTES = 16 << 20
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
"""Values of fields that add nothing to low-rank matrices. Others are refused, where no tensor shows them first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PeftConfig:
    """What decides how matrices are scaled."""

    rank: int
    alpha: float
    is_rank_stabilized: bool = False
    """rslora: scales by the root of the rank."""
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    """By regular expression of the end of a module's name."""
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    extras: tuple[str, ...] = ()
    """Fields that ask for more than low-rank matrices, as in `use_dora is True`."""

    def rank_of(self, module: str) -> int:
        """Columns of a module's matrices."""
        return int(_matching(self.rank_pattern, module, self.rank))

    def scale_of(self, module: str) -> float:
        """What the product of a module's matrices is multiplied with."""
        rank, alpha = self.rank_of(module), float(_matching(self.alpha_pattern, module, self.alpha))
        return alpha / math.sqrt(rank) if self.is_rank_stabilized else alpha / rank


def _matching(pattern: Mapping[str, Any], module: str, default: Any) -> Any:
    """The first value whose key is the end of the name, at a dot, as a regular expression."""
    for key, value in pattern.items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return default


def read_peft_config(directory: Path) -> PeftConfig:
    """The config of an adapter.

    Raises:
        ModelLoadError: it is missing, no object, or of another method than LoRA; a field is out of bounds.
    """
    path = directory / CONFIG_FILE
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ModelLoadError(f"{path} has {path.stat().st_size} bytes, must have at most {MAX_CONFIG_BYTES}")
        given = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"cannot read {path}: {error}") from error
    if not isinstance(given, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, got {type(given).__name__}")
    if given.get("peft_type") != "LORA":
        raise ModelLoadError(f"{path}: peft_type is {given.get('peft_type')!r}, must be 'LORA'")
    extras = tuple(f"{name} is {given[name]!r}" for name, neutral in _NEUTRAL.items() if given.get(name) not in neutral)
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


def _number(path: Path, given: dict[str, Any], name: str, default: float, *, low: float = -math.inf) -> float:
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value < math.inf:
        bound = "a number" if low == -math.inf else f"a number of at least {low:g}"
        raise ModelLoadError(f"{path}: {name} is {value!r}, must be {bound}")
    return value


def _pattern(path: Path, given: dict[str, Any], name: str) -> dict[str, float]:
    pattern = given.get(name) or {}
    if not isinstance(pattern, dict):
        raise ModelLoadError(f"{path}: {name} is {pattern!r}, must be an object")
    for key in pattern:
        try:
            re.compile(key)
        except re.error as error:
            raise ModelLoadError(f"{path}: {name} has {key!r}, which is no regular expression: {error}") from error
        _number(path, pattern, key, 0)
    return pattern
