"""OLMo (norms without weights), OLMo 2 (norms after, over all heads) and OLMo 3 (the same with sliding windows)."""

from typing import Any

from pagoda_worker.models.hf_config import GLOBAL, LOCAL, HfConfig, get, layer_kinds, windows
from pagoda_worker.models.llama import common
from pagoda_worker.models.rope import max_positions, rope_specs_by_kind
from pagoda_worker.models.spec import DecoderSpec
from pagoda_worker.models.weights import TensorNames

OLMO2_NAMES = TensorNames(
    block_norms={
        "attention_output_norm": "post_attention_layernorm",
        "mlp_output_norm": "post_feedforward_layernorm",
    }
)


def _biases(config: HfConfig) -> dict[str, Any]:
    bias = bool(get(config, "attention_bias", False))
    return {"qkv_bias": bias, "o_bias": bias}


def olmo_spec(config: HfConfig) -> DecoderSpec:
    """OlmoForCausalLM."""
    return DecoderSpec(
        architecture="OlmoForCausalLM",
        norm="layer_norm",
        norm_has_weights=False,
        clip_qkv=config.get("clip_qkv"),
        **_biases(config),
        **common(config) | {"norm_eps": 1e-5},
    )


def olmo2_spec(config: HfConfig) -> DecoderSpec:
    """Olmo2ForCausalLM."""
    return DecoderSpec(
        architecture="Olmo2ForCausalLM",
        norms="output",
        qk_norm="width",
        **_biases(config),
        **common(config, default_eps=1e-5),
    )


def olmo3_spec(config: HfConfig) -> DecoderSpec:
    """Olmo3ForCausalLM: three layers of four have a window; what stretches the context is for the others."""
    theta = float(get(config, "rope_theta", 500000.0))
    ropes = rope_specs_by_kind(config, default_thetas={GLOBAL: theta, LOCAL: theta})
    options = common(config | {"rope_parameters": None, "rope_scaling": None}, default_eps=1e-5)
    kinds = layer_kinds(config, options["num_layers"], lambda layer: (layer + 1) % 4 != 0)
    options |= {
        "rope": ropes[GLOBAL],
        "max_position_embeddings": max_positions(ropes[GLOBAL], options["max_position_embeddings"]),
    }
    return DecoderSpec(
        architecture="Olmo3ForCausalLM",
        norms="output",
        qk_norm="width",
        layer_ropes=tuple(ropes[kind] for kind in kinds),
        windows=windows(kinds, config.get("sliding_window", 4096)),
        **_biases(config),
        **options,
    )
