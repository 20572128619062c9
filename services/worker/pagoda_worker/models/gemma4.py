"""Gemma 4 (text part): layers with and without a window have different heads, some have experts next to the
feed-forward, some read the keys and values of earlier ones."""

import dataclasses
import re
from typing import Any

from pagoda_common.errors import ModelLoadError
from pagoda_worker.models.config_keys import unused
from pagoda_worker.models.expert_tensors import stacked_experts
from pagoda_worker.models.gemma import GEMMA2_NAMES
from pagoda_worker.models.gemma3n import cache_owners, shared_left_out
from pagoda_worker.models.hf_config import GLOBAL, LOCAL, HfConfig, get, layer_kinds, required, sizes, windows
from pagoda_worker.models.layer_options import LayerInputsSpec, LayerSizes
from pagoda_worker.models.rope import max_positions, rope_specs_by_kind
from pagoda_worker.models.spec import DecoderSpec, MoeSpec
from pagoda_worker.models.weights import TensorNames, WeightNames, weight_names

ROPES = {
    LOCAL: {"rope_type": "default", "rope_theta": 1e4},
    GLOBAL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
NAMES = dataclasses.replace(GEMMA2_NAMES, router="router.proj", expert="experts.{}")
MULTIMODAL_NAMES = dataclasses.replace(
    NAMES,
    prefixes=("model.language_model.", "model."),
    ignored=(re.compile(r"^(vision_tower|audio_tower|embed_vision|embed_audio)\."),),
)


def gemma4_spec(config: HfConfig) -> DecoderSpec:
    """Gemma4ForCausalLM. use_bidirectional_attention "vision" affects only images."""
    if config.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise ModelLoadError(
            f"use_bidirectional_attention is {config['use_bidirectional_attention']!r} in config.json, which is not "
            "supported; only null and 'vision' are"
        )
    options = sizes({"vocab_size": 262144} | config, num_kv_heads=4, head_dim=256, is_tied=True)
    num_layers = options["num_layers"]
    kinds = layer_kinds(config, num_layers, lambda layer: (layer + 1) % 6 != 0)
    kinds[-1:] = [GLOBAL]  # whatever layer_types says, as in transformers
    layers = _layer_sizes(config, kinds, options)
    ropes = rope_specs_by_kind(
        config | {"rope_parameters": get(config, "rope_parameters", ROPES)}, default_thetas={GLOBAL: 1e6, LOCAL: 1e4}
    )
    turned = tuple(
        dataclasses.replace(ropes[kind], head_dim=None if one.head_dim == options["head_dim"] else one.head_dim)
        for kind, one in zip(kinds, layers, strict=True)
    )
    bias, width = bool(get(config, "attention_bias", False)), int(get(config, "hidden_size_per_layer_input", 256))
    num_rows = int(get(config, "vocab_size_per_layer_input", 262144))
    return DecoderSpec(
        architecture="Gemma4ForCausalLM",
        max_position_embeddings=max_positions(ropes[GLOBAL], int(get(config, "max_position_embeddings", 131072))),
        activation=str(get(config, "hidden_activation", "gelu_pytorch_tanh")),
        norm_eps=float(get(config, "rms_norm_eps", 1e-6)),
        norms="both",
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        norms_values=True,
        rope=turned[-1],
        layer_ropes=turned,
        windows=windows(kinds, config.get("sliding_window", 512)),
        scales=(1.0,) * num_layers,
        logit_softcap=config.get("final_logit_softcapping"),
        embedding_multiplier=options["hidden_size"] ** 0.5,
        moe=_moe(config),
        has_layer_scale=True,
        layer_sizes=layers,
        layer_inputs=LayerInputsSpec(width=width, vocab_size=num_rows) if width else None,
        **options,
    )


def gemma4_multimodal_spec(config: HfConfig) -> DecoderSpec:
    """Gemma4ForConditionalGeneration: the text part; what sees and hears is left out."""
    unused(config, "vocab_size", "audio_config", "vision_soft_tokens_per_image")
    text_config = required(config, "text_config")
    if config.get("tie_word_embeddings") is not None:
        text_config = text_config | {"tie_word_embeddings": config["tie_word_embeddings"]}
    return dataclasses.replace(gemma4_spec(text_config), architecture="Gemma4ForConditionalGeneration")


def _layer_sizes(config: HfConfig, kinds: list[str], options: dict[str, Any]) -> tuple[LayerSizes, ...]:
    """Options of each layer: shared ones may have a feed-forward twice as wide, those without a window other heads."""
    owners = cache_owners(kinds, int(get(config, "num_kv_shared_layers", 0)))
    is_doubled = bool(get(config, "use_double_wide_mlp", False))
    has_keys_alone = bool(get(config, "attention_k_eq_v", False))
    of_layers = _heads(config, kinds, has_keys_alone)
    return tuple(
        LayerSizes(
            num_kv_heads=int(heads.get("num_key_value_heads", options["num_kv_heads"])),
            head_dim=int(heads.get("head_dim", options["head_dim"])),
            intermediate_size=options["intermediate_size"] * (2 if is_doubled and owner is not None else 1),
            cache_of=owner,
            values_are_keys=has_keys_alone and kind == GLOBAL,
        )
        for kind, owner, heads in zip(kinds, owners, of_layers, strict=True)
    )


def _heads(config: HfConfig, kinds: list[str], has_keys_alone: bool) -> list[dict[str, Any]]:
    """head_dim and num_key_value_heads of each layer, where they are not the model's: from per_layer_config, or
    global_head_dim and num_global_key_value_heads (before)."""
    given, num_kv_heads = config.get("per_layer_config"), config.get("num_global_key_value_heads")
    if given is None:
        of_global = {"head_dim": get(config, "global_head_dim", 512)}
        if has_keys_alone and num_kv_heads is not None:
            of_global["num_key_value_heads"] = num_kv_heads
        return [of_global if kind == GLOBAL else {} for kind in kinds]
    unused(config, "global_head_dim")
    found: list[dict[str, Any]] = [{} for _ in kinds]
    for layer, values in given.items():
        if unknown := set(values) - {"head_dim", "num_key_value_heads"}:
            raise ModelLoadError(f"per_layer_config has {sorted(unknown)} for layer {layer}, which is not supported")
        found[int(layer)] = values
    return found


def _moe(config: HfConfig) -> MoeSpec | None:
    names = ("num_experts", "top_k_experts", "moe_intermediate_size")
    if not get(config, "enable_moe_block", False):
        unused(config, *names)
        return None
    num_experts, top_k, size = (int(required(config, name)) for name in names)
    return MoeSpec(num_experts=num_experts, num_experts_per_token=top_k, intermediate_size=size, is_beside=True)


def gemma4_weights(spec: DecoderSpec) -> WeightNames:
    """All tensors of a text-only checkpoint, with stacked experts."""
    return _stacked(spec, NAMES)


def gemma4_multimodal_weights(spec: DecoderSpec) -> WeightNames:
    """All tensors of the text part of a multimodal checkpoint."""
    return _stacked(spec, MULTIMODAL_NAMES)


def _stacked(spec: DecoderSpec, tensor_names: TensorNames) -> WeightNames:
    names = shared_left_out(spec, weight_names(spec, tensor_names))
    if (moe := spec.moe) is None:
        return names
    made = [
        stacked_experts(
            f"layers.{layer}.experts.{stored}",
            tuple(f"layers.{layer}.experts.experts.{index}.{ours}.weight" for index in range(moe.num_experts)),
        )
        for layer in range(spec.num_layers)
        for stored, ours in (("gate_up_proj", "up_proj"), ("down_proj", "down_proj"))
    ]
    sources = [source for source in names.sources if ".experts.experts." not in source.parameter]
    return dataclasses.replace(names, sources=sources, made=tuple(made))
