"""StableLM: Llama with layer norms, a quarter of each head rotated, optionally parallel attention and feed-forward."""

from pagoda_worker.models.hf_config import HfConfig, get, sizes
from pagoda_worker.models.rope import max_positions, rope_spec
from pagoda_worker.models.spec import DecoderSpec
from pagoda_worker.models.weights import TensorNames

STABLELM_NAMES = TensorNames(q_norm="self_attn.q_layernorm.norms.{}", k_norm="self_attn.k_layernorm.norms.{}")


def stablelm_spec(config: HfConfig) -> DecoderSpec:
    """StableLmForCausalLM."""
    rope = rope_spec(config, default_partial=0.25)
    is_parallel = bool(get(config, "use_parallel_residual", False))
    return DecoderSpec(
        architecture="StableLmForCausalLM",
        **sizes(config, num_kv_heads=32),
        max_position_embeddings=max_positions(rope, int(get(config, "max_position_embeddings", 4096))),
        activation=str(get(config, "hidden_act", "silu")),
        norm="layer_norm",
        norm_eps=float(get(config, "layer_norm_eps", 1e-5)),
        is_parallel=is_parallel,
        has_mlp_norm=not is_parallel,
        qkv_bias=bool(get(config, "use_qkv_bias", False)),
        qk_norm="each_head" if get(config, "qk_layernorm", False) else None,
        rope=rope,
    )
