"""Small models of the Gemma family."""

from typing import Any

from tests.small_models.sizes import SMALL, THREE_KINDS, VOCAB_SIZE

_SHARED = {
    "num_hidden_layers": 5,
    "head_dim": 20,
    "sliding_window": 27,
    "layer_types": ["sliding_attention", "full_attention", *THREE_KINDS[:1] * 2, "full_attention"],
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 12,
    "final_logit_softcapping": 9.0,
}

GEMMA: dict[str, tuple[str, dict[str, Any]]] = {
    "Gemma2ForCausalLM": (
        "gemma2",
        SMALL
        | {
            "head_dim": 20,
            "sliding_window": 27,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 9.0,
            "query_pre_attn_scalar": 30,
        },
    ),
    "Gemma3ForCausalLM": (
        "gemma3_text",
        SMALL | {"num_hidden_layers": 3, "head_dim": 20, "sliding_window": 27, "layer_types": THREE_KINDS},
    ),
    "Gemma3ForConditionalGeneration": (
        "gemma3",
        {
            "text_config": SMALL | {"head_dim": 20, "sliding_window": 27, "layer_types": THREE_KINDS[:2]},
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
            },
            "mm_tokens_per_image": 4,
            "image_token_index": 296,
            "boi_token_index": 297,
            "eoi_token_index": 298,
        },
    ),
    "Gemma3nForCausalLM": (
        "gemma3n_text",
        SMALL
        | _SHARED
        | {
            "intermediate_size": [80, 64, 80, 96, 48],
            "vocab_size_per_layer_input": 280,
            "altup_num_inputs": 3,
            "altup_active_idx": 1,
            "laurel_rank": 10,
            "activation_sparsity_pattern": [0.6, 0.0, 0.3, 0.0, 0.0],
        },
    ),
    "Gemma4ForCausalLM": (
        "gemma4_text",
        SMALL
        | _SHARED
        | {
            "global_head_dim": 24,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "use_double_wide_mlp": True,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": 3,
            "moe_intermediate_size": 40,
        },
    ),
    "Gemma4ForConditionalGeneration": (
        "gemma4",
        {
            "text_config": SMALL
            | {
                "head_dim": 20,
                "global_head_dim": 20,
                "sliding_window": 27,
                "layer_types": THREE_KINDS[:2],
                "hidden_size_per_layer_input": 0,
            },
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "position_embedding_size": 16,
            },
        },
    ),
    "GemmaForCausalLM": ("gemma", SMALL | {"head_dim": 20, "num_key_value_heads": 1}),
}
"""Architecture to model_type and options."""
