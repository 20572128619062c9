"""Llama 4 (and the text part of multimodal checkpoints): experts in some layers, chunked attention, and layers without
positions."""

import dataclasses
import re
from typing import Any

from torch import Tensor

from pagoda_common.errors import ModelLoadError
from pagoda_worker.models.config_keys import unused
from pagoda_worker.models.expert_tensors import stacked_experts
from pagoda_worker.models.hf_config import GLOBAL, HfConfig, get, required
from pagoda_worker.models.llama import common
from pagoda_worker.models.rope import inverse_frequencies
from pagoda_worker.models.spec import DecoderSpec, MoeSpec, TemperatureSpec
from pagoda_worker.models.weights import TensorNames, WeightNames, weight_names

CHUNKED = "chunked_attention"
LLAMA4_NAMES = TensorNames(
    up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down_proj="feed_forward.down_proj",
    router="feed_forward.router",
    shared_expert="feed_forward.shared_expert",
    expert="feed_forward.experts.{}",
)
MULTIMODAL_NAMES = dataclasses.replace(
    LLAMA4_NAMES,
    prefixes=("language_model.model.", "model.language_model.", "language_model.", "model."),
    ignored=(*LLAMA4_NAMES.ignored, re.compile(r"^(vision_model|multi_modal_projector)\.")),
)


def llama4_spec(config: HfConfig) -> DecoderSpec:
    """Llama4ForCausalLM: the router's sigmoid scales an expert's input; a shared expert sees every token."""
    options = common(
        {"intermediate_size": 8192} | config,
        num_kv_heads=8,
        head_dim=128,
        default_theta=500000.0,
        default_eps=1e-5,
        default_max_positions=131072,
        is_interleaved=True,
    )
    num_layers, rope, expert_size = options["num_layers"], options["rope"], options["intermediate_size"]
    unused(config, "no_rope_layer_interval", "interleave_moe_layer_step")  # where there are lists
    has_rope = _layers_with_rope(config, num_layers)
    has_norm = bool(get(config, "use_qk_norm", True))
    if has_norm and inverse_frequencies(rope, rope.rotary_dim(options["head_dim"]), 1)[1] != 1.0:
        raise ModelLoadError(
            f"rope_type {rope.rope_type} makes queries longer before their norm, which is not supported"
        )
    bias = bool(get(config, "attention_bias", False))
    is_tuned = bool(get(config, "attn_temperature_tuning", True))
    unused(config, "floor_scale", "attn_scale", "for_llm_compressor")
    return DecoderSpec(
        architecture="Llama4ForCausalLM",
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="plain" if has_norm else None,
        layer_ropes=tuple(rope if is_rotated else None for is_rotated in has_rope),
        chunks=_chunks(config, has_rope),
        temperature=TemperatureSpec(
            step=float(get(config, "floor_scale", 8192)), scale=float(get(config, "attn_scale", 0.1))
        )
        if is_tuned
        else None,
        moe=MoeSpec(
            num_experts=int(get(config, "num_local_experts", 16)),
            num_experts_per_token=int(get(config, "num_experts_per_tok", 1)),
            intermediate_size=expert_size,
            is_normalized=False,
            scoring="top_sigmoid",
            scales_input=True,
            shared_intermediate_size=expert_size,
            shared_is_gated=False,
            sparse_layers=_sparse(config, num_layers),
        ),
        **options | {"intermediate_size": int(get(config, "intermediate_size_mlp", 16384))},
    )


def llama4_multimodal_spec(config: HfConfig) -> DecoderSpec:
    """Llama4ForConditionalGeneration: the text part; what sees images is left out."""
    unused(config, "vocab_size")
    text_config: HfConfig = required(config, "text_config")
    if config.get("tie_word_embeddings") is not None:
        text_config = text_config | {"tie_word_embeddings": config["tie_word_embeddings"]}
    return dataclasses.replace(llama4_spec(text_config), architecture="Llama4ForConditionalGeneration")


def llama4_weights(spec: DecoderSpec) -> WeightNames:
    """All tensors; the experts of a layer stacked, or one by one."""
    is_multimodal = spec.architecture.endswith("ForConditionalGeneration")
    names, moe = weight_names(spec, MULTIMODAL_NAMES if is_multimodal else LLAMA4_NAMES), spec.moe
    assert moe is not None, "Llama 4 has experts"
    made = tuple(
        stacked_experts(
            f"layers.{layer}.feed_forward.experts.{leaf}",
            tuple(f"layers.{layer}.mlp.experts.{index}.{ours}.weight" for index in range(moe.num_experts)),
            unpack=Tensor.t,
            is_swapped=True,
        )
        for layer in range(spec.num_layers)
        if moe.is_sparse(layer)
        for leaf, ours in (("gate_up_proj", "up_proj"), ("down_proj", "down_proj"))
    )
    return dataclasses.replace(names, made=made)


def _layers_with_rope(config: HfConfig, num_layers: int) -> list[bool]:
    """Which layers have a rotation; an empty list means the same as none."""
    interval = int(get(config, "no_rope_layer_interval", 4))
    listed: list[Any] = get(config, "no_rope_layers", []) or [(layer + 1) % interval for layer in range(num_layers)]
    if len(listed) < num_layers:
        raise ModelLoadError(f"no_rope_layers has {len(listed)} entries for {num_layers} layers")
    return [bool(entry) for entry in listed[:num_layers]]


def _chunks(config: HfConfig, has_rope: list[bool]) -> tuple[int | None, ...]:
    """The chunk of each layer."""
    size = config.get("attention_chunk_size", 8192)
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = [CHUNKED if is_rotated and size is not None else GLOBAL for is_rotated in has_rope]
    if len(kinds) != len(has_rope) or not set(kinds) <= {CHUNKED, GLOBAL}:
        raise ModelLoadError(f"layer_types must be {CHUNKED} or {GLOBAL} for each of {len(has_rope)} layers")
    if CHUNKED not in kinds:
        return ()
    if size is None or size < 1:
        raise ModelLoadError(f"attention_chunk_size is {size}, must be at least 1")
    return tuple(int(size) if kind == CHUNKED else None for kind in kinds)


def _sparse(config: HfConfig, num_layers: int) -> tuple[bool, ...]:
    """Which layers have experts."""
    step = int(get(config, "interleave_moe_layer_step", 1))
    listed = get(config, "moe_layers", range(step - 1, num_layers, step))
    return tuple(layer in listed for layer in range(num_layers))
