"""Qwen3.5, dense and with experts: gated delta nets in three layers of four, a gate on attention in the others."""

import dataclasses
import re
from typing import Any

from pagoda_worker.models.config_keys import unused
from pagoda_worker.models.expert_tensors import stacked_experts
from pagoda_worker.models.hf_config import HfConfig, get, required
from pagoda_worker.models.llama import common
from pagoda_worker.models.moe import qwen_moe
from pagoda_worker.models.qwen3_next import delta_net_mixers, delta_net_of
from pagoda_worker.models.spec import DecoderSpec
from pagoda_worker.models.weights import TensorNames, WeightNames, weight_names

QWEN3_5_NAMES = TensorNames(
    delta_net_in=("in_proj_qkv", "in_proj_z"),
    delta_net_beta=("in_proj_b", "in_proj_a"),
    ignored=(*TensorNames().ignored, re.compile(r"^(mtp|visual|model\.visual)\.")),
)
MULTIMODAL_NAMES = dataclasses.replace(
    QWEN3_5_NAMES, prefixes=("model.language_model.", "language_model.model.", "language_model.", "model.")
)


def qwen3_5_spec(config: HfConfig) -> DecoderSpec:
    """Qwen3_5ForCausalLM."""
    return DecoderSpec(architecture="Qwen3_5ForCausalLM", **_options(config, num_kv_heads=4))


def qwen3_5_moe_spec(config: HfConfig) -> DecoderSpec:
    """Qwen3_5MoeForCausalLM."""
    options = _options({"intermediate_size": 512} | config, num_kv_heads=2)
    defaults = {"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512, "norm_topk_prob": True}
    shared = int(get(config, "shared_expert_intermediate_size", 512))
    moe = qwen_moe(defaults | config, options["num_layers"], shared_intermediate_size=shared)
    return DecoderSpec(architecture="Qwen3_5MoeForCausalLM", moe=moe, **options)


def qwen3_5_multimodal_spec(config: HfConfig) -> DecoderSpec:
    """Qwen3_5ForConditionalGeneration: the text part; what sees images is left out."""
    return dataclasses.replace(qwen3_5_spec(_text_config(config)), architecture="Qwen3_5ForConditionalGeneration")


def qwen3_5_moe_multimodal_spec(config: HfConfig) -> DecoderSpec:
    """Qwen3_5MoeForConditionalGeneration: the text part; what sees images is left out."""
    return dataclasses.replace(
        qwen3_5_moe_spec(_text_config(config)), architecture="Qwen3_5MoeForConditionalGeneration"
    )


def _text_config(config: HfConfig) -> HfConfig:
    unused(config, "vocab_size")
    text_config: HfConfig = required(config, "text_config")
    if config.get("tie_word_embeddings") is not None:
        text_config = text_config | {"tie_word_embeddings": config["tie_word_embeddings"]}
    return text_config


def _options(config: HfConfig, *, num_kv_heads: int) -> dict[str, Any]:
    """What all have: all three positions of a text's token are the same, so sections of them (mrope) mean nothing."""
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(given := config.get(name), dict):
            kept = {key: value for key, value in given.items() if key not in ("mrope_section", "mrope_interleaved")}
            config = config | {name: kept}
    unused(config, "mamba_ssm_dtype", "attn_output_gate", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
    options = common(
        {"partial_rotary_factor": 0.25} | config, num_kv_heads=num_kv_heads, head_dim=256, default_max_positions=32768
    )
    bias = bool(get(config, "attention_bias", False))
    return options | {
        "norm_weight_offset": 1.0,
        "qk_norm": "head",
        "qkv_bias": bias,
        "o_bias": bias,
        "has_attention_gate": True,
        "recurrence": delta_net_of(config),
        "mixers": delta_net_mixers(config, options["num_layers"]),
    }


def qwen3_5_weights(spec: DecoderSpec) -> WeightNames:
    """All tensors; the experts of a layer one by one, or stacked."""
    is_multimodal = spec.architecture.endswith("ForConditionalGeneration")
    names = weight_names(spec, MULTIMODAL_NAMES if is_multimodal else QWEN3_5_NAMES)
    if spec.moe is None:
        return names
    made = tuple(
        stacked_experts(
            f"layers.{layer}.mlp.experts.{leaf}",
            tuple(f"layers.{layer}.mlp.experts.{index}.{ours}.weight" for index in range(spec.moe.num_experts)),
        )
        for layer in range(spec.num_layers)
        for leaf, ours in (("gate_up_proj", "up_proj"), ("down_proj", "down_proj"))
    )
    return dataclasses.replace(names, made=made)
