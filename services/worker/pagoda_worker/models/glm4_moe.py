"""GLM-4.5 to 4.7: experts as in DeepSeek-V3, with usual attention, or with latents (Flash)."""

from pagoda_common.errors import ModelLoadError
from pagoda_worker.models.config_keys import unused
from pagoda_worker.models.deepseek import latent_options, sigmoid_mixture
from pagoda_worker.models.hf_config import HfConfig, get
from pagoda_worker.models.llama import common
from pagoda_worker.models.spec import DecoderSpec


def glm4_moe_spec(config: HfConfig) -> DecoderSpec:
    """Glm4MoeForCausalLM: half of each head is rotated."""
    options = common(
        {"partial_rotary_factor": 0.5} | config, num_kv_heads=8, default_eps=1e-5, default_max_positions=131072
    )
    first = int(get(config, "first_k_dense_replace", 1))
    defaults = {"n_routed_experts": 128, "moe_intermediate_size": 1408}
    return DecoderSpec(
        architecture="Glm4MoeForCausalLM",
        qkv_bias=bool(get(config, "attention_bias", False)),
        qk_norm="head" if get(config, "use_qk_norm", False) else None,
        moe=sigmoid_mixture(defaults | config, tuple(layer >= first for layer in range(options["num_layers"]))),
        **options,
    )


def glm4_moe_lite_spec(config: HfConfig) -> DecoderSpec:
    """Glm4MoeLiteForCausalLM: latents, as DeepSeek-V3's."""
    sizes = {
        "kv_lora_rank": 512,
        "q_lora_rank": 768,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
    }
    options = latent_options(
        sizes | config,
        default_max_positions=202752,
        default_eps=1e-5,
        is_interleaved=bool(get(config, "rope_interleave", True)),
    )
    unused(config, "first_k_dense_replace")  # before there was a list
    first = int(get(config, "first_k_dense_replace", 1))
    num_layers = options["num_layers"]
    kinds = get(config, "mlp_layer_types", ["dense" if layer < first else "sparse" for layer in range(num_layers)])
    if len(kinds) != num_layers or not set(kinds) <= {"dense", "sparse"}:
        raise ModelLoadError(f"mlp_layer_types must be dense or sparse for each of {num_layers} layers")
    defaults = {
        "n_routed_experts": 64,
        "moe_intermediate_size": 1536,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 1.8,
    }
    moe = sigmoid_mixture(defaults | config, tuple(kind == "sparse" for kind in kinds))
    return DecoderSpec(architecture="Glm4MoeLiteForCausalLM", moe=moe, **options)
