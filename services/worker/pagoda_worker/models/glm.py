"""GLM-4 in transformers' form: half of each head rotated as neighbours, fused gate; the later one has norms around."""

from typing import Any

from pagoda_worker.models.hf_config import HfConfig, get, sizes
from pagoda_worker.models.rope import max_positions, rope_spec
from pagoda_worker.models.spec import DecoderSpec
from pagoda_worker.models.weights import TensorNames

GLM_NAMES = TensorNames(up=("mlp.gate_up_proj",))
GLM4_NAMES = TensorNames(
    up=("mlp.gate_up_proj",),
    block_norms={
        "attention_norm": "input_layernorm",
        "attention_output_norm": "post_self_attn_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "mlp_output_norm": "post_mlp_layernorm",
    },
)


def _common(config: HfConfig) -> dict[str, Any]:
    rope = rope_spec(config, default_partial=0.5, is_interleaved=True)
    return {
        **sizes(config, num_kv_heads=2, head_dim=128),
        "max_position_embeddings": max_positions(rope, int(get(config, "max_position_embeddings", 131072))),
        "activation": str(get(config, "hidden_act", "silu")),
        "norm_eps": float(get(config, "rms_norm_eps", 1.5625e-7)),
        "qkv_bias": bool(get(config, "attention_bias", True)),
        "rope": rope,
    }


def glm_spec(config: HfConfig) -> DecoderSpec:
    """GlmForCausalLM."""
    return DecoderSpec(architecture="GlmForCausalLM", **_common(config))


def glm4_spec(config: HfConfig) -> DecoderSpec:
    """Glm4ForCausalLM."""
    return DecoderSpec(architecture="Glm4ForCausalLM", norms="both", **_common(config))
