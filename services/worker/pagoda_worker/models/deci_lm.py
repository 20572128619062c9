"""Llama-Nemotron: a Llama whose layers have different sizes; a layer's part may be one matrix, or missing."""

import math
from dataclasses import dataclass
from typing import Any

from pagoda_common.errors import ModelLoadError
from pagoda_worker.models.config_keys import unused
from pagoda_worker.models.hf_config import HfConfig, get, required
from pagoda_worker.models.layer_options import LayerSizes
from pagoda_worker.models.llama import common
from pagoda_worker.models.recurrent_spec import Mixer
from pagoda_worker.models.spec import DecoderSpec

ROUNDED_TO = 256
"""Widths of feed-forwards are multiples of this."""
MAX_INTERMEDIATE_SIZE = 1 << 20


@dataclass(frozen=True, slots=True)
class _Block:
    """One layer. A size is None where the layer has no such part, or one matrix instead."""

    mixer: Mixer = "attention"
    num_kv_heads: int | None = None
    has_feed_forward: bool = True
    is_linear: bool = False
    """The feed-forward is one matrix."""
    intermediate_size: int | None = None


def deci_lm_spec(config: HfConfig) -> DecoderSpec:
    """DeciLMForCausalLM: Llama-Nemotron, whose `block_configs` describe each layer, and DeciLM-7B before it, whose
    layers differ in their KV heads alone (`num_key_value_heads_per_layer`)."""
    blocks = _blocks(config)
    if not any(block.mixer == "attention" for block in blocks):
        raise ModelLoadError("block_configs has no layer with attention, which is not supported")
    if config.get("block_configs") is not None:
        unused(config, "num_key_value_heads", "intermediate_size")
        sizes = {
            "num_key_value_heads": _first(block.num_kv_heads for block in blocks),
            "intermediate_size": _first(block.intermediate_size for block in blocks) or ROUNDED_TO,
        }
        config = config | sizes
    options = common(config)
    bias = bool(get(config, "attention_bias", False))
    return DecoderSpec(
        architecture="DeciLMForCausalLM",
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bool(get(config, "mlp_bias", False)),
        mixers=tuple(block.mixer for block in blocks),
        feed_forwards=tuple(block.has_feed_forward for block in blocks),
        layer_sizes=tuple(
            LayerSizes(
                num_kv_heads=block.num_kv_heads or options["num_kv_heads"],
                head_dim=options["head_dim"],
                intermediate_size=block.intermediate_size or options["intermediate_size"],
                is_linear=block.is_linear,
            )
            for block in blocks
        ),
        **options,
    )


def _first(values: Any) -> int | None:
    """The first value that is set."""
    return next((value for value in values if value is not None), None)


def _blocks(config: HfConfig) -> list[_Block]:
    """The layers by block_configs or num_key_value_heads_per_layer; without these, all layers are the same."""
    num_layers, num_heads = int(required(config, "num_hidden_layers")), int(required(config, "num_attention_heads"))
    given, heads = config.get("block_configs"), config.get("num_key_value_heads_per_layer")
    name = "num_key_value_heads_per_layer" if given is None else "block_configs"
    values = heads if given is None else given
    if values is None:
        return [_Block()] * num_layers
    if not isinstance(values, list) or len(values) != num_layers:
        count = len(values) if isinstance(values, list) else repr(values)
        raise ModelLoadError(f"{name} has {count} entries for {num_layers} layers")
    if given is None:
        return [_Block(num_kv_heads=_kv_heads(count, num_heads, layer)) for layer, count in enumerate(values)]
    hidden_size = int(required(config, "hidden_size"))
    return [_block(block, f"{name}[{layer}]", num_heads, hidden_size) for layer, block in enumerate(values)]


def _kv_heads(count: Any, num_heads: int, layer: int) -> int:
    if not isinstance(count, int) or count < 1 or num_heads % count:
        raise ModelLoadError(
            f"num_key_value_heads_per_layer[{layer}] is {count!r}, must be a divisor of num_attention_heads, "
            f"{num_heads}"
        )
    return count


def _block(block: Any, name: str, num_heads: int, hidden_size: int) -> _Block:
    """One entry of block_configs."""
    if not isinstance(block, dict):
        raise ModelLoadError(f"{name} is {block!r}, must be an object with attention and ffn")
    for part, value in block.items():
        if part not in ("attention", "ffn") and value:
            raise ModelLoadError(f"{name}.{part} is {value!r}, which is not supported")
    attends, mixer = _kind(block.get("attention"), f"{name}.attention", "n_heads_in_group")
    transforms, feed_forward = _kind(block.get("ffn"), f"{name}.ffn", "ffn_mult")
    num_kv_heads = intermediate_size = None
    if mixer == "whole":
        group = attends.get("n_heads_in_group")
        if not isinstance(group, int) or group < 1 or num_heads % group:
            raise ModelLoadError(
                f"{name}.attention.n_heads_in_group is {group!r}, must be a divisor of num_attention_heads, {num_heads}"
            )
        num_kv_heads = num_heads // group
    if feed_forward == "whole":
        intermediate_size = _intermediate_size(transforms.get("ffn_mult"), f"{name}.ffn.ffn_mult", hidden_size)
    kinds: dict[str, Mixer] = {"whole": "attention", "linear": "linear", "none": "none"}
    return _Block(kinds[mixer], num_kv_heads, feed_forward != "none", feed_forward == "linear", intermediate_size)


def _kind(part: Any, name: str, size: str) -> tuple[dict[str, Any], str]:
    """A part of a layer, and whether it is whole, linear or none.

    Raises:
        ModelLoadError: it has an option that changes what it computes in another way.
    """
    if not isinstance(part, dict):
        raise ModelLoadError(f"{name} is {part!r}, must be an object")
    for option, value in part.items():
        if option not in ("no_op", "replace_with_linear", size) and value:
            raise ModelLoadError(f"{name}.{option} is {value!r}, which is not supported; only null and false are")
    if part.get("no_op"):
        return part, "none"
    return part, "linear" if part.get("replace_with_linear") else "whole"


def _intermediate_size(factor: Any, name: str, hidden_size: int) -> int:
    """Two thirds of factor * hidden_size, rounded up to a multiple of ROUNDED_TO."""
    is_number = isinstance(factor, int | float) and not isinstance(factor, bool) and math.isfinite(factor)
    if not is_number or not 0 < 2 * factor * hidden_size / 3 <= MAX_INTERMEDIATE_SIZE:
        raise ModelLoadError(
            f"{name} is {factor!r}, must be a positive number that makes a feed-forward of at most "
            f"{MAX_INTERMEDIATE_SIZE} columns"
        )
    return -(-max(1, int(2 * factor * hidden_size / 3)) // ROUNDED_TO) * ROUNDED_TO
