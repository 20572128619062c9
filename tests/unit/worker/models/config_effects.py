"""What each key of config.json changes of the options of a model, by architecture.

`python -m tests.unit.worker.models.config_effects` writes config_effects.txt from the code: read what changed in it
before you keep it, since it says what each key means.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pagoda_common.errors import ModelLoadError
from pagoda_worker.models.config_keys import ReadConfig
from pagoda_worker.models.registry import family_of
from tests.checkpoints import ARCHITECTURES, CONFIGS

PATH = Path(__file__).with_suffix(".txt")
NESTED = ("text_config", "attn_config")
GONE = "gone"
"""Value of a key that is not there."""
_NO_ROPE, _LISTED = {"rope_parameters": GONE}, {"layer_types": GONE}
TOGETHER: dict[str, tuple[dict[str, Any], ...]] = {
    "activation_function": ({"hidden_act": GONE},),
    "attention_head_dim": ({"head_dim": GONE},),
    "attn_layer_period": ({"num_hidden_layers": 12},),
    "bias": ({"mlp_bias": False}, {"mlp_bias": GONE}),
    "block_ff_dim": ({"block_auto_adjust_ff_dim": False},),
    "block_ffn_dim_multiplier": ({"intermediate_size": 3000},),
    "block_multiple_of": ({"intermediate_size": 3000},),
    "decoder_sparse_step": ({"mlp_only_layers": [], "num_hidden_layers": 4, "layer_types": GONE},),
    "first_k_dense_replace": ({"mlp_layer_types": GONE, "num_hidden_layers": 4},),
    "full_attention_interval": (_LISTED,),
    "full_attn_idxs": (_LISTED,),
    "global_head_dim": ({"per_layer_config": GONE},),
    "hybrid_override_pattern": ({"layers_block_type": GONE},),
    "interleave_moe_layer_step": ({"moe_layers": GONE},),
    "layer_norm_epsilon": ({"rms_norm_eps": GONE},),
    "layer_types": ({"layers_block_type": GONE},),
    "layers_block_type": (_LISTED,),
    "mamba_conv_bias": ({"use_conv_bias": GONE},),
    "mamba_d_conv": ({"conv_kernel": GONE},),
    "mamba_d_head": ({"mamba_n_heads": 3},),
    "mamba_d_ssm": ({"mamba_n_heads": 12},),
    "mamba_expand": ({"mamba_n_heads": 12},),
    "mamba_n_groups": ({"n_groups": GONE},),
    "max_window_layers": ({"use_sliding_window": True, "sliding_window": 9, "layer_types": GONE},),
    "moe_topk": ({"num_experts": 8},),
    "multi_query": ({"new_decoder_architecture": False},),
    "n_embed": ({"hidden_size": GONE},),
    "n_group": ({"n_routed_experts": 12},),
    "n_head": ({"num_attention_heads": GONE},),
    "n_layer": ({"num_hidden_layers": GONE},),
    "no_rope_layer_interval": ({"no_rope_layers": GONE, "num_hidden_layers": 4, "layer_types": GONE},),
    "num_attention_heads": ({"n_head": GONE},),
    "num_experts_per_tok": ({"moe_topk": GONE},),
    "num_global_key_value_heads": ({"per_layer_config": GONE},),
    "num_hidden_layers": ({"layer_types": GONE, "mlp_layer_types": GONE, "no_rope_layers": GONE}, {"n_layer": GONE}),
    "num_key_value_heads_per_layer": ({"block_configs": GONE},),
    "num_key_value_heads": ({"block_configs": GONE, "intermediate_size": 160},),
    "num_layers": ({"num_hidden_layers": GONE},),
    "num_local_experts": ({"num_experts": GONE}, {"n_routed_experts": GONE}),
    "num_ln_in_parallel_attn": ({"new_decoder_architecture": False},),
    "original_max_position_embeddings": (
        {"rope_parameters": {"rope_type": "linear", "factor": 3.0}},
        {"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 64}},
    ),
    "parallel_attn": ({"new_decoder_architecture": False},),
    "partial_rotary_factor": (_NO_ROPE,),
    "qkv_bias": ({"attention_bias": GONE}, {"attention_bias": False}),
    "rms_norm_eps": ({"norm_eps": GONE},),
    "rope_local_base_freq": (_NO_ROPE,),
    "rope_scaling": (_NO_ROPE,),
    "rope_theta": (_NO_ROPE,),
    "rotary_dim": (_NO_ROPE,),
    "rotary_emb_base": (_NO_ROPE,),
    "rotary_pct": (_NO_ROPE,),
    "sliding_window": ({"use_sliding_window": True}, {"use_sliding_window": True, "layer_types": GONE}),
    "sliding_window_pattern": ({"layer_types": GONE, "num_hidden_layers": 8},),
    "_sliding_window_pattern": ({"layer_types": GONE, "num_hidden_layers": 8},),
    "use_sliding_window": ({"sliding_window": 9},),
}
"""By key: values of others without which it means nothing, or where its meaning is another."""
OTHER: dict[str, tuple[Any, ...]] = {
    "attn_layer_indices": ([0, 2],),
    "block_ffn_dim_multiplier": (0.5, None),
    "full_attn_idxs": ([0],),
    "head_dim": (20, 32),
    "hidden_act": ("relu", "gelu"),
    "hybrid_override_pattern": ("M*-EM",),
    "layers_block_type": (["attention", "mamba", "mamba"],),
    "mamba_d_head": (32, "auto"),
    "mamba_dt_rank": (5, "auto"),
    "mlp_only_layers": ([1],),
    "moe_layers": ([1],),
    "num_key_value_heads_per_layer": ([4, 1, 2, 2, 4, 1],),
    "num_ln_in_parallel_attn": (1, 2),
    "partial_rotary_factor": (0.5, 1.0),
    "per_layer_config": ({"0": {"head_dim": 36}, "4": {"num_key_value_heads": 4}},),
    "position_embedding_type": ("rope",),
    "q_lora_rank": (18, None),
    "rope_scaling": ({"type": "linear", "factor": 3.0},),
    "rope_type": ("linear", "other"),
    "rotary_emb_base": (77.0,),
    "rope_theta": (77.0,),
    "rope_local_base_freq": (55.0,),
    "rotary_dim": (8,),
    "rotary_pct": (0.5, 1.0),
    "scale_depth": (0.9, None),
    "sliding_window": (11, None, 0),
    "swiglu_alpha": (1.9,),
    "time_step_limit": ([0.25, 8.0], [0.5], [8.0, 0.25], [-1.0, 1.0]),
    "time_step_rank": (5, "auto"),
    "use_bidirectional_attention": (True, "vision", False),
}
"""By key: values that say more than those of `others`."""


def others(name: str, value: Any) -> tuple[Any, ...]:
    """Values that a key may have instead of one."""
    if name in OTHER:
        return tuple(other for other in OTHER[name] if other != value)
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int):
        return (2 * value, value + 1, value - 1) if value else (1,)
    if isinstance(value, float):
        return (value * 0.75 + 0.125,)
    if isinstance(value, list) and value:
        kinds = {"sliding_attention": "full_attention", "full_attention": "sliding_attention"}
        changed = [kinds.get(value[0], value[-1]) if isinstance(value[0], str) else 0, *value[1:]]
        return tuple(other for other in (value[1:] + value[:1], changed) if other != value)
    return ("other",) if isinstance(value, str) and value != GONE else (6,)


def written(architecture: str) -> dict[str, Any]:
    """The config.json of the small checkpoint of an architecture."""
    from transformers import AutoConfig

    if architecture == "DeciLMForCausalLM":
        import tests.deci_lm  # noqa: F401  # transformers has no such model
    model_type, options = CONFIGS[architecture]
    config = AutoConfig.for_model(model_type, **options).to_json_string(use_diff=False)
    return {**json.loads(config), "architectures": [architecture]}


def effects(architecture: str) -> list[str]:
    """Lines that say what each key changes."""
    config = written(architecture)
    lines: dict[str, None] = {}
    for path in _paths(config):
        names = _names(config, path)
        for name in names:
            if isinstance(_at(config, path).get(name), dict) and name != "per_layer_config":
                continue
            lines |= dict.fromkeys(_lines(config, path, name, {}))
            for given in TOGETHER.get(name, ()):
                if together := {key: value for key, value in given.items() if key in names and key != name}:
                    lines |= dict.fromkeys(_lines(config, path, name, together))
    return list(lines)


def _paths(config: Mapping[str, Any]) -> list[tuple[str, ...]]:
    paths: list[tuple[str, ...]] = [()]
    for path in paths:
        place = _at(config, path)
        inner = [name for name in place if isinstance(place[name], dict) and (name in NESTED or "rope_p" in name)]
        inner += [name for name in place if path and "rope_p" in path[-1] and isinstance(place[name], dict)]
        paths += [(*path, name) for name in inner]
    return paths


def _names(config: dict[str, Any], path: tuple[str, ...]) -> list[str]:
    """Keys in an object of config.json that may mean something: those there, and those that the family looks for."""
    read = ReadConfig(config)
    family_of(config).read(read)
    place = _at(read, path)
    names = place.read if isinstance(place, ReadConfig) else set(place)
    return sorted(names)


def _lines(config: dict[str, Any], path: tuple[str, ...], name: str, together: Mapping[str, Any]) -> Iterator[str]:
    base = json.loads(json.dumps(config))
    place = _at(base, path)
    for key, value in together.items():
        _set(place, key, value)
    before, value = _outcome(base), place.get(name, GONE)
    beside = f" beside {json.dumps(together)}" if together else ""
    for other in others(name, value):
        place[name] = other
        after = _outcome(base)
        effect = _difference(_outcome(config) if "refused" in before else before, after)
        yield f"{'.'.join((*path, name))}: {json.dumps(value)} to {json.dumps(other)}{beside}: {effect}"
        if name not in OTHER and "refused" not in after:
            return


def _set(place: dict[str, Any], key: str, value: Any) -> None:
    if value == GONE:
        place.pop(key, None)
    else:
        place[key] = value


def _at(config: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    place: Any = config
    for name in path:
        place = place[name]
    return place


def _outcome(config: dict[str, Any]) -> dict[str, Any]:
    try:
        return dict(_fields(family_of(config).spec(config), ""))
    except ModelLoadError as error:
        return {"refused": error.message}


def _fields(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Names and values of a model's options, those within others too."""
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _fields(getattr(value, field.name), f"{path}.{field.name}".removeprefix("."))
    elif isinstance(value, tuple) and any(dataclasses.is_dataclass(one) for one in value):
        for index, one in enumerate(value):
            yield from _fields(one, f"{path}[{index}]")
    else:
        yield path, value


def _difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    if "refused" in after:
        return f"refused, {after['refused']}"
    changed = [f"{name}={_shown(value)}" for name, value in after.items() if before.get(name, GONE) != value]
    return ", ".join(changed) or "nothing"


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_shown, value))})"
    return f"{value:.6g}" if isinstance(value, float) else repr(value)


def main() -> None:
    """Write the file."""
    table: dict[str, list[str]] = {}
    for architecture in ARCHITECTURES:
        for line in effects(architecture):
            table.setdefault(line, []).append(architecture)
    PATH.write_text("".join(f"{line} | {' '.join(named)}\n" for line, named in sorted(table.items())))


if __name__ == "__main__":
    main()
