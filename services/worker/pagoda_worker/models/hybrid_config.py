"""Reads options of recurrent layers from config.json, under their usual names."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pagoda_common.errors import ModelLoadError
from pagoda_worker.models.config_keys import expect, unused
from pagoda_worker.models.hf_config import HfConfig, get, required
from pagoda_worker.models.recurrent_spec import Mamba2Spec, Mixer

MIXERS: dict[str, Mixer] = {
    "linear_attention": "recurrent",
    "mamba": "recurrent",
    "conv": "recurrent",
    "full_attention": "attention",
    "attention": "attention",
}
"""Kinds of layers by name; mamba and attention are the older names."""


def mixers_of(kinds: Sequence[str], num_layers: int) -> tuple[Mixer, ...]:
    """The mixer of each layer before its feed-forward.

    Raises:
        ModelLoadError: a kind is unknown, or there is not one per layer.
    """
    for kind in kinds:
        if kind not in MIXERS:
            raise ModelLoadError(f"layer type {kind!r} is not supported; supported are {', '.join(MIXERS)}")
    if len(kinds) != num_layers:
        raise ModelLoadError(f"layer types are {len(kinds)} for {num_layers} layers")
    return tuple(MIXERS[kind] for kind in kinds)


def step_limits(config: HfConfig) -> tuple[float, float]:
    """time_step_limit: minimum and maximum of a state's step; transformers writes infinity in JSON as an object.

    Raises:
        ModelLoadError: it is not a pair of ascending numbers.
    """
    given = get(config, "time_step_limit", (0.0, float("inf")))
    values = [float(value["__float__"]) if isinstance(value, dict) else float(value) for value in given]
    if len(values) != 2 or not 0 <= values[0] <= values[1]:
        raise ModelLoadError(f"time_step_limit is {given}, must be two numbers from 0 on, rising")
    return values[0], values[1]


def mamba2_of(config: HfConfig, *, hidden_size: int, **options: Any) -> Mamba2Spec:
    """A Mamba-2 layer, with the option names of Bamba, Granite 4 and Falcon-H1.

    Args:
        options: overrides for the Mamba2Spec; num_values: over all heads.
    """
    unused(config, "mamba_chunk_size", "num_logits_to_keep")
    expect(config, hidden_act="silu")
    num_values = options.pop("num_values", None) or int(get(config, "mamba_expand", 2)) * hidden_size
    num_heads, head_dim = int(get(config, "mamba_n_heads", 128)), get(config, "mamba_d_head", "auto")
    head_dim = num_values // max(num_heads, 1) if head_dim == "auto" else int(head_dim)
    if num_heads * head_dim != num_values:
        raise ModelLoadError(f"{num_heads} Mamba heads of {head_dim} values are not {num_values} values")
    num_groups, bias = int(get(config, "mamba_n_groups", 1)), bool(get(config, "mamba_proj_bias", False))
    net = Mamba2Spec(
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=num_groups,
        state_size=int(get(config, "mamba_d_state", 256)),
        conv_width=int(get(config, "mamba_d_conv", 4)),
        conv_bias=bool(get(config, "mamba_conv_bias", True)),
        in_bias=bias,
        out_bias=bias,
        norm_groups=num_groups,
        steps=step_limits(config),
    )
    return replace(net, **options)


def num_layers_of(config: HfConfig) -> int:
    """Layers of a checkpoint."""
    return int(required(config, "num_hidden_layers"))
