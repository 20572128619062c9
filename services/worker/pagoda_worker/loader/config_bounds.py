"""Bounds on a config.json, checked before a model is built.

Knows names and numbers; no model. A checkpoint is untrusted: a billion layers must be an error at once, not a worker
that builds for hours.
"""

import re
from typing import Any

from pagoda_common.errors import ModelLoadError

MAX_DEPTH = 32
MAX_VALUES = 1_000_000
"""Maximum number of values in a file, which may have long lists: layer_types, no_rope_layers, layers that are not
quantized."""
MAX_EXPERTS = 2**18
"""Maximum number of experts over all layers."""
_LAYERS = r"(num|n)_(hidden_)?layers?"
_EXPERTS = r"(num|n)_([a-z]+_)?experts"
BOUNDS = (
    (_LAYERS, 1024),
    (_EXPERTS, 65_536),
    (r"num_experts_per_tok|top_k_experts", 65_536),
    (r"altup_num_inputs", 256),
    (r"([a-z]+_)?(num|n)(_[a-z]+)?_(attention_|key_value_|kv_)?heads?", 65_536),
    (r"([a-z_]*_)?intermediate_size|(hidden|head|ffn_hidden|word_embed_proj)_(size|dim)", 2**22),
    (r"([a-z]+_)+head_dim|(q|kv)_lora_rank|mamba_d_(state|conv)|ssm_state_size|(mamba_)?n_groups", 2**22),
    (r"ffn_dim|d_model|n_embd|n_inner|rotary_dim|expansion_ratio", 2**22),
    (r"vocab_size", 2**24),
    (r"(original_)?max_position_embeddings|n_positions|max_seq_len|seq_length", 2**27),
)
"""Patterns of size names, and the maximum of each: several times that of any model."""
_BOUNDS = tuple((re.compile(pattern), most) for pattern, most in BOUNDS)
_TEXTS = ("model_type", "dtype", "torch_dtype")
MAX_TEXT_CHARS = 200


def check_config(config: dict[str, Any], *, file: str = "config.json") -> None:
    """Check types and sizes of names and numbers in a config.json.

    Raises:
        ModelLoadError: a value is out of bounds; the message names the first one.
    """
    names = config.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ModelLoadError(f"architectures is {_shown(names)} in {file}, must be a list of names")
    for name in _TEXTS:
        if not isinstance(config.get(name), str | None):
            raise ModelLoadError(f"{name} is {_shown(config[name])} in {file}, must be a name")
    level: list[tuple[str, Any]] = list(config.items())
    num_values, most = len(level), {_LAYERS: 1, _EXPERTS: 1}
    for _ in range(MAX_DEPTH):
        for name, value in level:
            _check_number(name, value, file)
            for kind in most:
                if isinstance(value, int) and re.fullmatch(kind, name):
                    most[kind] = max(most[kind], value)
        level = [pair for name, value in level for pair in _within(name, value)]
        num_values += len(level)
        if num_values > MAX_VALUES:
            raise ModelLoadError(f"{file} has more than {MAX_VALUES} values")
        if not level:
            break
    else:
        raise ModelLoadError(f"{file} is nested more than {MAX_DEPTH} levels deep")
    num_experts = most[_LAYERS] * most[_EXPERTS]
    if num_experts > MAX_EXPERTS:
        raise ModelLoadError(f"{file} asks for {num_experts} experts in all layers, must be at most {MAX_EXPERTS}")


def _within(name: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return list(value.items())
    return [(name, one) for one in value] if isinstance(value, list) else []


def _check_number(name: str, value: Any, file: str) -> None:
    most = next((most for pattern, most in _BOUNDS if pattern.fullmatch(name)), None)
    if isinstance(value, str | dict) and most is not None:
        raise ModelLoadError(f"{name} is {_shown(value)} in {file}, must be a number")
    if not isinstance(value, int | float) or (isinstance(value, float) and most is None):
        return
    most = 2**63 - 1 if most is None else most
    if not abs(value) <= most:
        raise ModelLoadError(f"{name} is {_shown(value)} in {file}, must be at most {most}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_TEXT_CHARS else f"{text[:MAX_TEXT_CHARS]}…"
