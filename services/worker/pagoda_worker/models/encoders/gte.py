"""Translates the config.json of Alibaba's GTE to transformers' names. Knows no tensors.

The models of 2024 (`Alibaba-NLP/new-impl`: gte-base-en-v1.5, gte-multilingual-base, their rerankers,
snowflake-arctic-embed-m-v2.0) came with their own code before transformers added them as `gte`.
"""

import math
from typing import Any

from pagoda_common.errors import ModelLoadError
from pagoda_worker.models.hf_config import HfConfig

MODEL_TYPES = ("new", "gte")
_MEANINGLESS = frozenset(
    {"auto_map", "pack_qkv", "unpad_inputs", "use_memory_efficient_attention", "layer_norm_type", "rope_scaling"}
    | {"position_embedding_type", "logn_attention_scale", "logn_attention_clip1"}
)
"""Entries that transformers does not use."""


def gte_config(config: HfConfig) -> HfConfig:
    """The config with model_type gte, and rotations that transformers knows.

    Raises:
        ModelLoadError: it has an option that no published checkpoint has.
    """
    needed = {
        "position_embedding_type": "rope",
        "layer_norm_type": "layer_norm",
        "pack_qkv": True,
        "logn_attention_scale": False,
    }
    for name, only in needed.items():
        if config.get(name, only) not in (only, None):
            raise ModelLoadError(f"{name} is {str(config[name])[:40]!r}, must be {only!r}")
    kept = {name: value for name, value in config.items() if name not in _MEANINGLESS}
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if scaling is None or not isinstance(scaling, dict):
        scaling = {}
    theta = config.get("rope_theta", scaling.get("rope_theta"))
    if theta is None and config.get("model_type") == "new":
        theta = 10_000.0
    if scaling.get("rope_type", scaling.get("type")) == "ntk":
        kept["rope_parameters"] = _ntk(config, scaling, theta)
    elif scaling or theta is not None:
        rope = {name: value for name, value in scaling.items() if name != "type"}
        rope.setdefault("rope_type", scaling.get("type", "default"))
        kept["rope_parameters"] = rope if theta is None else rope | {"rope_theta": theta}
    return kept | {"model_type": "gte"}


def _ntk(config: HfConfig, scaling: dict[str, Any], theta: Any) -> dict[str, Any]:
    """Rotations of fixed NTK scaling (type "ntk"): frequencies are those of the base times `factor`, divided by
    factor^(2 / head_dim); with `mixed_b`, frequency i, from 1, is divided by e^(a i^mixed_b), and the last by `factor`.
    """
    try:
        factor, base = float(scaling["factor"]), float(theta)
        head_dim = int(config["hidden_size"]) // int(config["num_attention_heads"])
        mixed = None if scaling.get("mixed_b") is None else float(scaling["mixed_b"])
        if not (factor > 0 and base > 0 and head_dim > 1):
            raise ValueError("numbers must be positive")
        if factor <= 1:
            return {"rope_type": "default", "rope_theta": base}
        if mixed is None:
            return {"rope_type": "linear", "rope_theta": base * factor, "factor": factor ** (2 / head_dim)}
        pairs = head_dim // 2
        slope = math.log(factor) / pairs**mixed
        factors = [math.exp(slope * place**mixed) for place in range(1, pairs + 1)]
        longest = int(config["max_position_embeddings"])
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise ModelLoadError(f"rope_scaling of type 'ntk' cannot be understood: {error}") from error
    named = {"short_factor": factors, "long_factor": factors, "attention_factor": 1.0, "factor": factor}
    return {"rope_type": "longrope", "rope_theta": base, "original_max_position_embeddings": longest, **named}
