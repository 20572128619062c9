"""Small mixtures of experts with caches of keys and values."""

from typing import Any

from tests.small_models.sizes import GROUPED, HUNYUAN, LLAMA3_ROPE, SMALL, THREE_KINDS

LLAMA4 = {
    "num_hidden_layers": 3,
    "head_dim": 20,
    "intermediate_size": 40,
    "intermediate_size_mlp": 72,
    "num_local_experts": 5,
    "num_experts_per_tok": 1,
    "moe_layers": [0, 2],
    "no_rope_layers": [1, 0, 1],
    "attention_chunk_size": 32,
    "floor_scale": 16,
    "attn_scale": 0.4,
    "rope_parameters": LLAMA3_ROPE,
}

EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "MixtralForCausalLM": ("mixtral", SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "Qwen2MoeForCausalLM": (
        "qwen2_moe",
        SMALL
        | {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 56,
            "use_sliding_window": True,
            "sliding_window": 29,
        },
    ),
    "Qwen3MoeForCausalLM": (
        "qwen3_moe",
        SMALL
        | {
            "head_dim": 24,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
        },
    ),
    "Glm4MoeForCausalLM": (
        "glm4_moe",
        SMALL | GROUPED | {"head_dim": 20, "use_qk_norm": True, "attention_bias": True, "first_k_dense_replace": 1},
    ),
    "Llama4ForCausalLM": ("llama4_text", SMALL | LLAMA4),
    "Llama4ForConditionalGeneration": (
        "llama4",
        {
            "text_config": SMALL | LLAMA4 | {"num_hidden_layers": 2, "moe_layers": [1], "no_rope_layers": [0, 1]},
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "vision_output_dim": 16,
                "projector_input_dim": 16,
                "projector_output_dim": 16,
                "image_size": 28,
                "patch_size": 14,
            },
        },
    ),
    "MiniMaxM2ForCausalLM": (
        "minimax_m2",
        SMALL | {"head_dim": 20, "rotary_dim": 12, "num_local_experts": 6, "num_experts_per_tok": 3},
    ),
    "GptOssForCausalLM": (
        "gpt_oss",
        SMALL
        | {
            "num_hidden_layers": 3,
            "head_dim": 20,
            "sliding_window": 27,
            "layer_types": THREE_KINDS,
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "swiglu_limit": 1.5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "OlmoeForCausalLM": ("olmoe", SMALL | {"num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 1.2}),
    "HunYuanMoEV1ForCausalLM": ("hunyuan_v1_moe", SMALL | HUNYUAN | {"num_experts": 5, "moe_topk": 3}),
}
"""Architecture to model_type and options."""
