"""Reads fields of config.json that most families share, under their usual names."""

from collections.abc import Callable
from typing import Any, TypeAlias

from pagoda_common.errors import ModelLoadError

HfConfig: TypeAlias = dict[str, Any]
"""A parsed config.json."""
LOCAL, GLOBAL = "sliding_attention", "full_attention"
"""Values of layer_types."""


def required(config: HfConfig, name: str) -> Any:
    """A value of config.json.

    Raises:
        ModelLoadError: the value is missing.
    """
    value = config.get(name)
    if value is None:
        raise ModelLoadError(f"config.json has no {name}")
    return value


def get(config: HfConfig, name: str, default: Any) -> Any:
    """A value of config.json, or the default where it is missing or null."""
    value = config.get(name)
    return default if value is None else value


def refuse(config: HfConfig, *names: str) -> None:
    """Refuse options that change the computation in a way that the decoder core does not support.

    Raises:
        ModelLoadError: one of them is set to anything but null, false or zero.
    """
    for name in names:
        if config.get(name):
            raise ModelLoadError(f"{name} is {config[name]!r} in config.json, which is not supported; only false is")


def sizes(
    config: HfConfig, *, num_kv_heads: int | None = None, head_dim: int | None = None, is_tied: bool = False
) -> dict[str, Any]:
    """The sizes of a DecoderSpec, from the names that Llama and most others use.

    Args:
        num_kv_heads, head_dim, is_tied: defaults of missing values. Without them, or for null, num_kv_heads is
        num_attention_heads, and head_dim an equal share of hidden_size.
    """
    hidden_size, num_heads = int(required(config, "hidden_size")), int(required(config, "num_attention_heads"))
    return {
        "vocab_size": int(required(config, "vocab_size")),
        "hidden_size": hidden_size,
        "num_layers": int(required(config, "num_hidden_layers")),
        "num_heads": num_heads,
        "num_kv_heads": int(config.get("num_key_value_heads", num_kv_heads) or num_heads),
        "head_dim": int(config.get("head_dim", head_dim) or hidden_size // max(num_heads, 1)),
        "intermediate_size": int(required(config, "intermediate_size")),
        "tie_word_embeddings": bool(get(config, "tie_word_embeddings", is_tied)),
    }


def layer_kinds(config: HfConfig, num_layers: int, is_local: Callable[[int], bool]) -> list[str]:
    """LOCAL or GLOBAL for each layer: from layer_types, or by `is_local` without them.

    Raises:
        ModelLoadError: a kind is unknown, or there is not one per layer.
    """
    kinds = config.get("layer_types")
    if kinds is None:
        return [LOCAL if is_local(layer) else GLOBAL for layer in range(num_layers)]
    for kind in kinds:
        if kind not in (LOCAL, GLOBAL):
            raise ModelLoadError(f"layer type {kind!r} is not supported; supported are {LOCAL}, {GLOBAL}")
    if len(kinds) != num_layers:
        raise ModelLoadError(f"layer_types has {len(kinds)} entries for {num_layers} layers")
    return list(kinds)


def windows(kinds: list[str], window: int | None) -> tuple[int | None, ...]:
    """The sliding window of each layer; none at all without a window."""
    if not window or LOCAL not in kinds:
        return ()
    return tuple(int(window) if kind == LOCAL else None for kind in kinds)
