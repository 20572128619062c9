"""Cohere (Command R): one norm, attention and feed-forward side by side, neighbours rotated; Cohere 2 adds windows."""

from typing import Any

from pagoda_worker.models.config_keys import expect
from pagoda_worker.models.hf_config import LOCAL, HfConfig, get, layer_kinds, sizes, windows
from pagoda_worker.models.rope import max_positions, rope_spec
from pagoda_worker.models.spec import DecoderSpec
from pagoda_worker.models.weights import TensorNames

COHERE_NAMES = TensorNames()


def _common(config: HfConfig, *, default_theta: float) -> dict[str, Any]:
    rope = rope_spec(config, default_theta=default_theta, is_interleaved=True)
    expect(config, position_embedding_type="rope_gptj", rotary_pct=1.0, use_embedding_sharing=True)
    expect(config, use_gated_activation=True, use_parallel_block=True)
    bias = bool(get(config, "attention_bias", False))
    return {
        **sizes(config, is_tied=True),
        "max_position_embeddings": max_positions(rope, int(get(config, "max_position_embeddings", 8192))),
        "activation": str(get(config, "hidden_act", "silu")),
        "norm": "layer_norm",
        "norm_eps": float(get(config, "layer_norm_eps", 1e-5)),
        "norm_has_bias": False,
        "is_parallel": True,
        "has_mlp_norm": False,
        "qkv_bias": bias,
        "o_bias": bias,
        "logit_multiplier": float(get(config, "logit_scale", 0.0625)),
        "rope": rope,
    }


def cohere_spec(config: HfConfig) -> DecoderSpec:
    """CohereForCausalLM."""
    qk_norm: Any = "each_head" if get(config, "use_qk_norm", False) else None
    return DecoderSpec(architecture="CohereForCausalLM", qk_norm=qk_norm, **_common(config, default_theta=500000.0))


def cohere2_spec(config: HfConfig) -> DecoderSpec:
    """Cohere2ForCausalLM: three layers of four have a window; the others have no positions at all."""
    options = _common(config, default_theta=10000.0)
    expect(
        config, order_of_interleaved_layers="local_attn_first", layer_switch=get(config, "sliding_window_pattern", 4)
    )
    pattern = int(get(config, "sliding_window_pattern", 4))
    kinds = layer_kinds(config, options["num_layers"], lambda layer: (layer + 1) % pattern != 0)
    return DecoderSpec(
        architecture="Cohere2ForCausalLM",
        layer_ropes=tuple(options["rope"] if kind == LOCAL else None for kind in kinds),
        windows=windows(kinds, config.get("sliding_window", 4096)),
        **options,
    )
