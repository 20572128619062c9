"""Phi (parallel, layer norms, part of each head rotated) and Phi-3 (Llama with fused projections, long contexts)."""

from pagoda_worker.models.config_keys import expect
from pagoda_worker.models.hf_config import LOCAL, HfConfig, get, sizes, windows
from pagoda_worker.models.rope import max_positions, rope_spec
from pagoda_worker.models.spec import DecoderSpec
from pagoda_worker.models.weights import TensorNames

PHI_NAMES = TensorNames(
    o_proj="self_attn.dense",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    up=("mlp.fc1",),
    down_proj="mlp.fc2",
    norm="final_layernorm",
)
PHI3_NAMES = TensorNames(qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",))


def phi_spec(config: HfConfig) -> DecoderSpec:
    """PhiForCausalLM."""
    rope = rope_spec(config, default_partial=0.5)
    return DecoderSpec(
        architecture="PhiForCausalLM",
        **sizes(config),
        max_position_embeddings=max_positions(rope, int(get(config, "max_position_embeddings", 2048))),
        activation=str(get(config, "hidden_act", "gelu_new")),
        norm="layer_norm",
        norm_eps=float(get(config, "layer_norm_eps", 1e-5)),
        is_gated=False,
        is_parallel=True,
        has_mlp_norm=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        head_bias=True,
        qk_norm="head" if get(config, "qk_layernorm", False) else None,
        rope=rope,
    )


def phi3_spec(config: HfConfig) -> DecoderSpec:
    """Phi3ForCausalLM."""
    expect(config, full_attn_mod=1, interpolate_factor=1)
    options = sizes(config)
    rope = rope_spec(config, default_original=4096)
    return DecoderSpec(
        architecture="Phi3ForCausalLM",
        **options,
        max_position_embeddings=max_positions(rope, int(get(config, "max_position_embeddings", 4096))),
        activation=str(get(config, "hidden_act", "silu")),
        norm_eps=float(get(config, "rms_norm_eps", 1e-5)),
        rope=rope,
        windows=windows([LOCAL] * options["num_layers"], config.get("sliding_window")),
    )
