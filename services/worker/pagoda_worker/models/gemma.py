"""Gemma, Gemma 2 and Gemma 3 (its text part): norm weights less one, scaled embeddings, soft caps, two rotations."""

import dataclasses
import re
from typing import Any

from pagoda_worker.models.config_keys import unused
from pagoda_worker.models.hf_config import GLOBAL, LOCAL, HfConfig, get, layer_kinds, refuse, required, sizes, windows
from pagoda_worker.models.rope import max_positions, rope_spec, rope_specs_by_kind
from pagoda_worker.models.spec import DecoderSpec
from pagoda_worker.models.weights import TensorNames

GEMMA_NAMES = TensorNames()
GEMMA2_NAMES = TensorNames(
    block_norms={
        "attention_norm": "input_layernorm",
        "attention_output_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_output_norm": "post_feedforward_layernorm",
    }
)

GEMMA3_MULTIMODAL_NAMES = dataclasses.replace(
    GEMMA2_NAMES,
    prefixes=("language_model.model.", "model.language_model.", "language_model.", "model."),
    ignored=(re.compile(r"^(vision_tower|multi_modal_projector)\."),),
)


def _common(config: HfConfig, *, num_kv_heads: int) -> dict[str, Any]:
    refuse(config, "use_bidirectional_attention")
    bias = bool(get(config, "attention_bias", False))
    options = sizes(config, num_kv_heads=num_kv_heads, head_dim=256, is_tied=True)
    return {
        **options,
        "norm_eps": float(get(config, "rms_norm_eps", 1e-6)),
        "norm_weight_offset": 1.0,
        "qkv_bias": bias,
        "o_bias": bias,
        "embedding_multiplier": options["hidden_size"] ** 0.5,
    }


def _sandwiched(config: HfConfig) -> dict[str, Any]:
    """Shared parts of Gemma 2 and 3."""
    options = _common(config, num_kv_heads=4)
    return {
        **options,
        "activation": str(get(config, "hidden_activation", "gelu_pytorch_tanh")),
        "norms": "both",
        "scales": (float(get(config, "query_pre_attn_scalar", 256)) ** -0.5,) * options["num_layers"],
    }


def gemma_spec(config: HfConfig) -> DecoderSpec:
    """GemmaForCausalLM. Its first files say "gelu" and mean the tanh approximation."""
    activation = str(get(config, "hidden_act", "gelu_pytorch_tanh"))
    rope = rope_spec(config)
    return DecoderSpec(
        architecture="GemmaForCausalLM",
        activation="gelu_pytorch_tanh" if activation == "gelu" else activation,
        max_position_embeddings=max_positions(rope, int(get(config, "max_position_embeddings", 8192))),
        rope=rope,
        **_common(config, num_kv_heads=16),
    )


def gemma2_spec(config: HfConfig) -> DecoderSpec:
    """Gemma2ForCausalLM: soft caps, norms around attention and feed-forward, a window in every other layer."""
    options = _sandwiched(config)
    kinds = layer_kinds(config, options["num_layers"], lambda layer: layer % 2 == 0)
    rope = rope_spec(config)
    return DecoderSpec(
        architecture="Gemma2ForCausalLM",
        max_position_embeddings=max_positions(rope, int(get(config, "max_position_embeddings", 8192))),
        rope=rope,
        windows=windows(kinds, config.get("sliding_window", 4096)),
        attention_softcap=config.get("attn_logit_softcapping", 50.0),
        logit_softcap=config.get("final_logit_softcapping", 30.0),
        **options,
    )


def gemma3_spec(config: HfConfig) -> DecoderSpec:
    """Gemma3ForCausalLM: query and key norms; five layers of six have a window and a rotation of their own.

    attn_logit_softcapping means nothing here, in transformers neither.
    """
    unused(config, "attn_logit_softcapping")
    options = _sandwiched(config)
    pattern = int(get(config, "sliding_window_pattern", get(config, "_sliding_window_pattern", 6)))
    kinds = layer_kinds(config, options["num_layers"], lambda layer: (layer + 1) % pattern != 0)
    ropes = rope_specs_by_kind(config, default_thetas={GLOBAL: 1e6, LOCAL: 1e4})
    return DecoderSpec(
        architecture="Gemma3ForCausalLM",
        max_position_embeddings=max_positions(ropes[GLOBAL], int(get(config, "max_position_embeddings", 131072))),
        rope=ropes[GLOBAL],
        layer_ropes=tuple(ropes[kind] for kind in kinds),
        windows=windows(kinds, config.get("sliding_window", 4096)),
        qk_norm="head",
        logit_softcap=config.get("final_logit_softcapping"),
        **options,
    )


def gemma3_multimodal_spec(config: HfConfig) -> DecoderSpec:
    """Gemma3ForConditionalGeneration: the text part; what sees images is left out.

    The text_config of published checkpoints leaves out what is the same in all sizes.
    """
    unused(config, "vocab_size")
    text_config = {"vocab_size": 262208, "num_attention_heads": 8} | required(config, "text_config")
    if config.get("tie_word_embeddings") is not None:
        text_config["tie_word_embeddings"] = config["tie_word_embeddings"]
    return dataclasses.replace(gemma3_spec(text_config), architecture="Gemma3ForConditionalGeneration")
