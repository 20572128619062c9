"""Tiny randomly initialised checkpoints of every supported architecture, as transformers writes them."""

import json
import math
from pathlib import Path
from typing import Any

VOCAB_SIZE = 300
EOS_TOKEN_ID = 257
"""In the vocabulary: 256 bytes, then <s> (256) and </s> (257); the rest are never text."""

_LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
# Odd layers and windows on purpose: a layer of each kind, windows shorter than most prompts and no multiple of a block.
_SMALL = _LLAMA | {"num_hidden_layers": 2, "hidden_size": 48, "intermediate_size": 80}
_THREE_KINDS = ["sliding_attention", "full_attention", "sliding_attention"]

_SHARED = {
    "num_hidden_layers": 5,
    "head_dim": 20,
    "sliding_window": 27,
    "layer_types": ["sliding_attention", "full_attention", *_THREE_KINDS[:1] * 2, "full_attention"],
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 12,
    "final_logit_softcapping": 9.0,
}
_LINEAR = ["linear_attention", "full_attention", "linear_attention"]
_MAMBA = {"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 20, "mamba_chunk_size": 16}
_ALONE = {"hidden_size": 48, "num_hidden_layers": 3}
_DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 20,
    "linear_value_head_dim": 12,
}
_GROUPED = {
    "n_routed_experts": 9,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "n_group": 3,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
}
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
_LLAMA4 = {
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
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 1000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
_BLOCKS = [
    {"attention": attention, "ffn": ffn}
    for attention, ffn in (
        ({"n_heads_in_group": 2, "no_op": False}, {"ffn_mult": 1.0, "no_op": False}),
        ({"no_op": True}, {"ffn_mult": 13.0}),
        ({"n_heads_in_group": 4}, {"no_op": True}),
        ({"replace_with_linear": True}, {"ffn_mult": 2.0}),
        ({"no_op": True}, {"no_op": True}),
        ({"n_heads_in_group": 1}, {"replace_with_linear": True}),
    )
]
_DECI_LM = {
    "hidden_size": 48,
    "num_hidden_layers": len(_BLOCKS),
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "block_configs": _BLOCKS,
    "rope_parameters": _LLAMA4["rope_parameters"],
}
_HUNYUAN = {
    "head_dim": 20,
    "attention_bias": True,
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "alpha": 6.0, "factor": 1.0},
}
_CONVS = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "conv_bias": True}

SOFT_ROUTERS = (
    *("gpt_oss", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text", "granitemoehybrid", "nemotron_h", "lfm2_moe"),
    *("deepseek_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite", "llama4", "llama4_text", "minimax_m2"),
    "jamba",
)
"""Model types whose experts that are left out would have a share: weights that are not normalised change tokens."""

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("llama", _LLAMA),
    "MistralForCausalLM": ("mistral", _LLAMA | {"sliding_window": 21, "tie_word_embeddings": True}),
    "Qwen2ForCausalLM": (
        "qwen2",
        _LLAMA | {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1},
    ),
    "Qwen3ForCausalLM": ("qwen3", _LLAMA | {"head_dim": 24}),
    "DeciLMForCausalLM": ("nemotron-nas", _DECI_LM),
    "GPT2LMHeadModel": ("gpt2", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512}),
    "OPTForCausalLM": (
        "opt",
        {
            "hidden_size": 64,
            "ffn_dim": 112,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "max_position_embeddings": 512,
        },
    ),
    "Gemma2ForCausalLM": (
        "gemma2",
        _SMALL
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
        _SMALL | {"num_hidden_layers": 3, "head_dim": 20, "sliding_window": 27, "layer_types": _THREE_KINDS},
    ),
    "Gemma3ForConditionalGeneration": (
        "gemma3",
        {
            "text_config": _SMALL | {"head_dim": 20, "sliding_window": 27, "layer_types": _THREE_KINDS[:2]},
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
        _SMALL
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
        _SMALL
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
            "text_config": _SMALL
            | {
                "head_dim": 20,
                "global_head_dim": 20,
                "sliding_window": 27,
                "layer_types": _THREE_KINDS[:2],
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
    "GemmaForCausalLM": ("gemma", _SMALL | {"head_dim": 20, "num_key_value_heads": 1}),
    "Phi3ForCausalLM": ("phi3", _SMALL | {"sliding_window": 50, "partial_rotary_factor": 0.5}),
    "Olmo2ForCausalLM": ("olmo2", _SMALL),
    "Olmo3ForCausalLM": ("olmo3", _SMALL | {"sliding_window": 19, "layer_types": _THREE_KINDS[:2]}),
    "OlmoForCausalLM": ("olmo", _SMALL | {"clip_qkv": 1.5}),
    "GraniteForCausalLM": (
        "granite",
        _SMALL
        | {
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.3,
            "attention_multiplier": 0.2,
            "logits_scaling": 3.0,
        },
    ),
    "SmolLM3ForCausalLM": ("smollm3", _SMALL | {"no_rope_layer_interval": 2}),
    "Starcoder2ForCausalLM": ("starcoder2", _SMALL | {"sliding_window": 33}),
    "GPTNeoXForCausalLM": ("gpt_neox", _SMALL | {"num_attention_heads": 3}),
    "PhiForCausalLM": ("phi", _SMALL),
    "StableLmForCausalLM": ("stablelm", _SMALL | {"num_attention_heads": 2, "num_key_value_heads": 1}),
    "CohereForCausalLM": ("cohere", _SMALL | {"logit_scale": 0.4}),
    "Cohere2ForCausalLM": (
        "cohere2",
        _SMALL | {"logit_scale": 0.4, "sliding_window": 23, "layer_types": _THREE_KINDS[:2]},
    ),
    "FalconForCausalLM": (
        "falcon",
        {
            "hidden_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_kv_heads": 2,
            "new_decoder_architecture": True,
            "max_position_embeddings": 512,
        },
    ),
    "MixtralForCausalLM": ("mixtral", _SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "Qwen2MoeForCausalLM": (
        "qwen2_moe",
        _SMALL
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
        _SMALL
        | {
            "head_dim": 24,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
        },
    ),
    "DeepseekV2ForCausalLM": (
        "deepseek_v2",
        _SMALL
        | _LATENT
        | _GROUPED
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
        _SMALL | _LATENT | _GROUPED | {"q_lora_rank": 28, "first_k_dense_replace": 1, "n_shared_experts": 1},
    ),
    "Glm4MoeForCausalLM": (
        "glm4_moe",
        _SMALL | _GROUPED | {"head_dim": 20, "use_qk_norm": True, "attention_bias": True, "first_k_dense_replace": 1},
    ),
    "Glm4MoeLiteForCausalLM": (
        "glm4_moe_lite",
        _SMALL | _LATENT | _GROUPED | {"q_lora_rank": 28, "mlp_layer_types": ["sparse", "dense"]},
    ),
    "MiniCPM3ForCausalLM": (
        "minicpm3",
        _SMALL
        | _LATENT
        | {"q_lora_rank": 28, "v_head_dim": None, "scale_emb": 3, "scale_depth": 0.7, "dim_model_base": 36},
    ),
    "YoutuForCausalLM": ("youtu", _SMALL | _LATENT | {"q_lora_rank": None, "rope_interleave": False}),
    "Llama4ForCausalLM": ("llama4_text", _SMALL | _LLAMA4),
    "Llama4ForConditionalGeneration": (
        "llama4",
        {
            "text_config": _SMALL | _LLAMA4 | {"num_hidden_layers": 2, "moe_layers": [1], "no_rope_layers": [0, 1]},
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
        _SMALL | {"head_dim": 20, "rotary_dim": 12, "num_local_experts": 6, "num_experts_per_tok": 3},
    ),
    "GptOssForCausalLM": (
        "gpt_oss",
        _SMALL
        | {
            "num_hidden_layers": 3,
            "head_dim": 20,
            "sliding_window": 27,
            "layer_types": _THREE_KINDS,
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
    "Qwen3NextForCausalLM": (
        "qwen3_next",
        _SMALL
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
        _SMALL | _DELTA_NET | {"num_hidden_layers": 3, "head_dim": 24, "layer_types": _LINEAR},
    ),
    "Qwen3_5MoeForCausalLM": (
        "qwen3_5_moe_text",
        _SMALL
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
            "text_config": _SMALL | _DELTA_NET | {"num_hidden_layers": 3, "head_dim": 24, "layer_types": _LINEAR},
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
            "text_config": _SMALL
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
    "BambaForCausalLM": ("bamba", _SMALL | _MAMBA | {"num_hidden_layers": 3, "attn_layer_indices": [1]}),
    "GraniteMoeHybridForCausalLM": (
        "granitemoehybrid",
        _SMALL
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
        _SMALL
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
        _SMALL
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
        _SMALL
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
    "Lfm2ForCausalLM": ("lfm2", _SMALL | _CONVS | {"block_multiple_of": 32}),
    "Lfm2MoeForCausalLM": (
        "lfm2_moe",
        _SMALL
        | _CONVS
        | {"num_dense_layers": 1, "num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 40},
    ),
    "OlmoeForCausalLM": ("olmoe", _SMALL | {"num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 1.2}),
    "GlmForCausalLM": ("glm", _SMALL | {"head_dim": 16}),
    "Glm4ForCausalLM": ("glm4", _SMALL | {"head_dim": 16}),
    "ExaoneForCausalLM": (
        "exaone",
        _SMALL
        | {
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "Exaone4ForCausalLM": ("exaone4", _SMALL | {"sliding_window": 26, "layer_types": _THREE_KINDS[:2]}),
    "Ernie4_5ForCausalLM": ("ernie4_5", _SMALL | {"head_dim": 16}),
    "SeedOssForCausalLM": ("seed_oss", _SMALL | {"head_dim": 16}),
    "InternLM3ForCausalLM": (
        "internlm3",
        _SMALL
        | {
            "head_dim": 16,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 50000.0, "factor": 6.0},
        },
    ),
    "HunYuanDenseV1ForCausalLM": ("hunyuan_v1_dense", _SMALL | _HUNYUAN),
    "HunYuanMoEV1ForCausalLM": ("hunyuan_v1_moe", _SMALL | _HUNYUAN | {"num_experts": 5, "moe_topk": 3}),
    "NemotronForCausalLM": ("nemotron", _SMALL),
    "GPTJForCausalLM": (
        "gptj",
        {"n_embd": 48, "n_layer": 2, "n_head": 3, "n_positions": 512, "rotary_dim": 12},
    ),
    "GPTBigCodeForCausalLM": ("gpt_bigcode", {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 512}),
    "BloomForCausalLM": ("bloom", {"hidden_size": 48, "n_layer": 2, "n_head": 6}),
    "MptForCausalLM": (
        "mpt",
        {"d_model": 48, "n_layers": 2, "n_heads": 6, "max_seq_len": 512, "attn_config": {"clip_qkv": 2.0}},
    ),
    "ArceeForCausalLM": ("arcee", _SMALL),
    "MinistralForCausalLM": ("ministral", _SMALL | {"head_dim": 16, "sliding_window": 21}),
}
"""Architecture to model_type and options."""

ARCHITECTURES = tuple(CONFIGS)

TEXT_PARTS = {"gemma3n": "gemma3n_text"}
"""Model types whose module needs a package for images that tests have not, and those of their text parts; the
architecture of both is ForConditionalGeneration and ForCausalLM."""


def make_checkpoint(architecture: str, directory: str | Path, seed: int = 0, **overrides: Any) -> Path:
    """Write config.json, model.safetensors and a byte-level tokenizer; returns the directory.

    Args:
        architecture: a key of CONFIGS.
        overrides: options of the transformers config.
    """
    import torch  # only those who make a checkpoint pay for the import
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    if architecture == "DeciLMForCausalLM":
        import tests.deci_lm  # noqa: F401  # transformers has no such model

    model_type, options = CONFIGS[architecture]
    special = {"bos_token_id": 256, "eos_token_id": EOS_TOKEN_ID, "pad_token_id": 258}
    common = {"vocab_size": VOCAB_SIZE} | special
    options = options | common | overrides
    if "text_config" in options:
        options["text_config"] = options["text_config"] | common
    config = AutoConfig.for_model(model_type, **options)
    # Of Llama 4's multimodal configs, AutoModelForCausalLM makes the text part alone.
    auto_class = AutoModelForImageTextToText if model_type == "llama4" else AutoModelForCausalLM
    model = auto_class.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean, is_soft = _norm_mean(model_type, name), model_type in SOFT_ROUTERS
            _initialise(name, parameter, generator, norm_mean=mean, is_soft=is_soft)
        if model_type == "youtu":  # transformers reads it as zeros
            model.get_input_embeddings().weight[special["pad_token_id"]] = 0.0
        for name, buffer in model.named_buffers():
            if name.endswith("bias") and buffer.is_floating_point():  # of a router
                buffer.copy_(0.2 * buffer.new_empty(buffer.shape).normal_(generator=generator))
            elif name.endswith("layer_scalar"):
                buffer.copy_(1.0 + 0.3 * buffer.new_empty(buffer.shape).normal_(generator=generator))
    directory = Path(directory)
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return directory


def write_as_text_part(directory: Path, architecture: str, model_type: str) -> None:
    """Have a checkpoint say that it is the text part of a multimodal one, some of whose other tensors are there."""
    import torch
    from safetensors.torch import load_file, save_file

    text = json.loads((directory / "config.json").read_text())
    config = {"architectures": [architecture], "model_type": model_type, "text_config": text, "vision_config": {}}
    (directory / "config.json").write_text(json.dumps(config))
    tensors = load_file(directory / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): one for name, one in tensors.items()}
    for other in ("vision_tower.stem.weight", "embed_vision.embedding.weight", "audio_tower.layer.weight"):
        renamed[f"model.{other}"] = torch.zeros(2, 2)
    save_file(renamed, directory / "model.safetensors", {"format": "pt"})


def _norm_mean(model_type: str, name: str) -> float:
    """Gemma stores norm weights less one until its third; in its later models what a layer adds must not drown in large
    embeddings."""
    if not model_type.startswith("gemma"):
        return 1.0
    if model_type == "gemma3n_text" and ".k_norm." in name:
        return 0.4  # scores are not scaled
    less = 0.0 if model_type.startswith(("gemma3n", "gemma4")) else 1.0
    return (10.0 if model_type != "gemma" and ".post_" in name else 1.0) - less


def _initialise(name: str, parameter: Any, generator: Any, *, norm_mean: float, is_soft: bool) -> None:
    """Weights so large that greedy outputs vary, and that logits differ by far more than rounding."""
    noise = parameter.new_empty(parameter.shape).normal_(generator=generator)
    is_norm = any(part in name for part in ("norm", "ln_")) and name.endswith("weight")
    if is_norm:
        parameter.copy_(norm_mean + 0.2 * noise)
    elif name.endswith("A_log"):
        parameter.copy_(noise - 2.0)  # a state that is not forgotten within a few tokens
    elif name.endswith(("sinks", ".D")):
        parameter.copy_(noise)
    elif name.endswith(("correct_output_scale", "router.scale", "per_expert_scale")):
        parameter.copy_(1.0 + 0.3 * noise)
    elif name.endswith("dt_bias"):
        parameter.copy_(0.5 * noise)
    elif parameter.dim() == 1:
        parameter.copy_(0.05 * noise)
    elif (is_soft and name.endswith((".gate.weight", ".router.weight"))) or name.endswith(
        ("conv1d.weight", "conv.conv.weight")
    ):
        parameter.copy_(noise / math.sqrt(parameter.shape[-1]))
    elif name.endswith("per_layer_input_gate.weight"):  # of hidden states that pass no norm: gelu must not drown them
        parameter.copy_(0.15 * noise / math.sqrt(parameter.shape[-1]))
    elif name.endswith("_coefs.weight"):  # what mixes hidden states
        parameter.copy_(0.5 * noise / math.sqrt(parameter.shape[-1]))
    elif ".shared_transformer." in name or name.endswith(".linear.weight"):  # errors grow in every layer that has them
        parameter.copy_(0.7 * noise / math.sqrt(parameter.shape[-1]))
    elif name.endswith(("x_proj.weight", "dt_proj.weight")):  # what float16 can hold
        parameter.copy_(noise / math.sqrt(parameter.shape[-1]))
    elif any(part in name for part in ("embed_positions", "wpe")):
        parameter.copy_(1.5 * noise)
    elif any(part in name for part in ("embed", "wte", "lm_head")):
        parameter.copy_(0.5 * noise)
    else:
        parameter.copy_(noise * 2.5 / math.sqrt(min(parameter.shape)))


def write_tokenizer(directory: Path) -> None:
    """A byte-level tokenizer with a few special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: token_id for token_id, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", model_max_length=512
    )
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    fast.save_pretrained(directory)
