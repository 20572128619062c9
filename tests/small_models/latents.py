"""Small models that keep latents in place of keys and values."""

from typing import Any

from tests.small_models.sizes import GROUPED, SMALL

_LATENT = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "qk_rope_head_dim": 12,
    "qk_nope_head_dim": 10,
    "v_head_dim": 14,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.6,
        "original_max_position_embeddings": 128,
    },
}

LATENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepseekV2ForCausalLM": (
        "deepseek_v2",
        SMALL
        | _LATENT
        | GROUPED
        | {
            "num_hidden_layers": 3,
            "q_lora_rank": None,
            "first_k_dense_replace": 1,
            "topk_method": "group_limited_greedy",
            "n_shared_experts": 2,
        },
    ),
    "DeepseekV3ForCausalLM": (
        "deepseek_v3",
        SMALL | _LATENT | GROUPED | {"q_lora_rank": 28, "first_k_dense_replace": 1, "n_shared_experts": 1},
    ),
    "Glm4MoeLiteForCausalLM": (
        "glm4_moe_lite",
        SMALL | _LATENT | GROUPED | {"q_lora_rank": 28, "mlp_layer_types": ["sparse", "dense"]},
    ),
    "MiniCPM3ForCausalLM": (
        "minicpm3",
        SMALL
        | _LATENT
        | {"q_lora_rank": 28, "v_head_dim": None, "scale_emb": 3, "scale_depth": 0.7, "dim_model_base": 36},
    ),
    "YoutuForCausalLM": ("youtu", SMALL | _LATENT | {"q_lora_rank": None, "rope_interleave": False}),
}
"""Architecture to model_type and options."""
