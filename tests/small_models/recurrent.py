"""Small models with layers that keep a state: delta nets, Mamba, short convolutions."""

from typing import Any

from tests.small_models.sizes import SMALL

_LINEAR = ["linear_attention", "full_attention", "linear_attention"]
_MAMBA = {"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 20, "mamba_chunk_size": 16}
_ALONE = {"hidden_size": 48, "num_hidden_layers": 3}
_DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 20,
    "linear_value_head_dim": 12,
}
_CONVS = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "conv_bias": True}

RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3NextForCausalLM": (
        "qwen3_next",
        SMALL
        | {
            "num_hidden_layers": 4,
            "head_dim": 24,
            "partial_rotary_factor": 0.25,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
            **_DELTA_NET,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 48,
            "mlp_only_layers": [2],
        },
    ),
    "Qwen3_5ForCausalLM": (
        "qwen3_5_text",
        SMALL | _DELTA_NET | {"num_hidden_layers": 3, "head_dim": 24, "layer_types": _LINEAR},
    ),
    "Qwen3_5MoeForCausalLM": (
        "qwen3_5_moe_text",
        SMALL
        | _DELTA_NET
        | {
            "head_dim": 24,
            "layer_types": _LINEAR[:2],
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 48,
        },
    ),
    "Qwen3_5ForConditionalGeneration": (
        "qwen3_5",
        {
            "text_config": SMALL | _DELTA_NET | {"num_hidden_layers": 3, "head_dim": 24, "layer_types": _LINEAR},
            "vision_config": {
                "depth": 1,
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_heads": 2,
                "out_hidden_size": 48,
                "num_position_embeddings": 16,
            },
        },
    ),
    "Qwen3_5MoeForConditionalGeneration": (
        "qwen3_5_moe",
        {
            "text_config": SMALL
            | _DELTA_NET
            | {
                "head_dim": 24,
                "layer_types": _LINEAR[:2],
                "num_experts": 5,
                "num_experts_per_tok": 3,
                "moe_intermediate_size": 40,
                "shared_expert_intermediate_size": 48,
            },
            "vision_config": {
                "depth": 1,
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_heads": 2,
                "out_hidden_size": 48,
                "num_position_embeddings": 16,
            },
        },
    ),
    "BambaForCausalLM": ("bamba", SMALL | _MAMBA | {"num_hidden_layers": 3, "attn_layer_indices": [1]}),
    "GraniteMoeHybridForCausalLM": (
        "granitemoehybrid",
        SMALL
        | _MAMBA
        | {
            "num_hidden_layers": 3,
            "layer_types": _LINEAR,
            "mamba_n_groups": 1,
            "shared_intermediate_size": 48,
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "attention_multiplier": 0.2,
            "embedding_multiplier": 1.7,
            "residual_multiplier": 0.6,
            "logits_scaling": 1.3,
        },
    ),
    "FalconH1ForCausalLM": (
        "falcon_h1",
        SMALL
        | _MAMBA
        | {
            "mamba_d_ssm": 96,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": True,
            "attention_in_multiplier": 0.8,
            "attention_out_multiplier": 0.7,
            "key_multiplier": 0.6,
            "ssm_in_multiplier": 0.9,
            "ssm_out_multiplier": 0.8,
            "ssm_multipliers": [0.7, 0.9, 1.2, 0.8, 0.6],
            "mlp_multipliers": [0.7, 0.8],
            "embedding_multiplier": 1.5,
            "lm_head_multiplier": 0.8,
        },
    ),
    "NemotronHForCausalLM": (
        "nemotron_h",
        SMALL
        | {
            "layers_block_type": ["linear_attention", "moe", "linear_attention", "full_attention", "mlp"],
            "head_dim": 16,
            "mamba_num_heads": 6,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 20,
            "chunk_size": 16,
            # A step's least value, of prompts alone in transformers: so small that it does nothing.
            "time_step_min": 1e-12,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "moe_intermediate_size": 40,
            "moe_shared_expert_intermediate_size": 48,
            "moe_latent_size": 32,
        },
    ),
    "MambaForCausalLM": ("mamba", _ALONE | {"state_size": 10, "time_step_rank": 7}),
    "FalconMambaForCausalLM": (
        "falcon_mamba",
        _ALONE | {"state_size": 10, "time_step_rank": 7, "use_bias": True, "mixer_rms_eps": 2.0},
    ),
    "Mamba2ForCausalLM": (
        "mamba2",
        _ALONE | {"num_heads": 6, "head_dim": 16, "n_groups": 2, "state_size": 20, "chunk_size": 16, "use_bias": True},
    ),
    "JambaForCausalLM": (
        "jamba",
        SMALL
        | {
            "num_hidden_layers": 4,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "mamba_d_state": 10,
            "mamba_dt_rank": 7,
        },
    ),
    "Zamba2ForCausalLM": (
        "zamba2",
        {
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 4,
            "layers_block_type": ["hybrid", "linear_attention", "hybrid", "hybrid"],
            "num_attention_heads": 4,
            "max_position_embeddings": 512,
            "n_mamba_heads": 6,
            "mamba_ngroups": 2,
            "mamba_d_state": 20,
            "chunk_size": 16,
            "time_step_min": 1e-12,  # as of Nemotron-H
            "num_mem_blocks": 2,
            "use_shared_attention_adapter": True,
            "adapter_rank": 8,
            "use_mem_rope": True,
        },
    ),
    "Lfm2ForCausalLM": ("lfm2", SMALL | _CONVS | {"block_multiple_of": 32}),
    "Lfm2MoeForCausalLM": (
        "lfm2_moe",
        SMALL
        | _CONVS
        | {"num_dense_layers": 1, "num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 40},
    ),
}
"""Architecture to model_type and options."""
