"""A tiny config of every causal language model type that transformers knows: small by general rules, and by a table
where those do not fit."""

from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.checkpoints import CONFIGS

VOCAB_SIZE = 304
WINDOW = 21
"""Tokens: shorter than most prompts, and no multiple of a block."""
HIDDEN = 64
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "n_vocab", "entity_vocab_size", "unpadded_vocab_size"), VOCAB_SIZE),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "n_embed", "embedding_size"), HIDDEN),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "ffn_hidden_size", "d_inner"), 96),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "intermediate_size_mlp", "ffn_intermediate_size"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 3),
    **dict.fromkeys(("decoder_layers", "encoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "global_head_dim", "kv_channels", "attention_head_dim", "d_kv"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions"), 512),
    **dict.fromkeys(("sliding_window", "attention_window_size", "local_window_size", "window_size"), WINDOW),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "top_k_experts", "num_experts_per_token", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "expert_dim", "expert_ffn_hidden_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"), 48),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts", "num_shared_experts"), 1),
    "moe_layer_start_index": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
    "qk_head_dim": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    **dict.fromkeys(("index_topk", "index_head_dim"), 16),
    "index_n_heads": 2,
    "image_size": 32,
    "patch_size": 16,
    "attention_chunk_size": 32,
    "encoder_hash_byte_group_vocab": 64,
    "layerdrop": 0.0,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 5.0,
    "rope_theta": 10000.0,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "laurel_rank": 8,
    "num_kv_shared_layers": 1,
}
"""Values by name, where a config has the name and a value; None leaves it."""
REQUIRED: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": WINDOW}
"""Values by name, where a config has the name, whatever it has there: some need what they leave open."""
MIXED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
MAMBA = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 24}
MAMBA_ALONE = {"time_step_rank": 4, "state_size": 12}
NO_LEAST_STEP = {"time_step_min": 1e-12, "time_step_floor": 1e-12}
DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
CONVS = {"layer_types": ["conv", "full_attention", "conv"], "conv_bias": True}
DECODERS = {"is_decoder": True}
BART = {"is_decoder": True, "is_encoder_decoder": False}
TWEAKS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        (
            *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert"),
            *("rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl"),
            "xmod",
        ),
        DECODERS,
    ),
    **dict.fromkeys(
        (
            *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp", "pegasus"),
            *("plbart", "prophetnet", "whisper", "trocr"),
        ),
        BART,
    ),
    "nemotron-nas": CONFIGS["DeciLMForCausalLM"][1],
    "gptj": {"rotary_dim": 8},
    "codegen": {"rotary_dim": 8},
    "deepseek_v2": {"num_experts_per_tok": 2, "topk_method": "greedy"},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "xmod": DECODERS | {"languages": ("en_XX", "de_DE"), "default_language": "en_XX"},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "dory": {"num_hidden_layers": 4, "layer_types": None, "n_input_layers": 1, "n_output_layers": 1},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("sliding_attention", "full_attention")
        },
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2, "ffn_act_fn": {"name": "silu"}},
    },
    **dict.fromkeys(("laguna", "mellum"), MIXED),
    "lfm2": CONVS,
    "lfm2_moe": CONVS,
    "qwen3_5_text": DELTA_NET,
    "qwen3_5_moe_text": DELTA_NET,
    "bamba": MAMBA | {"attn_layer_indices": [1]},
    "granitemoehybrid": MAMBA | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 96, "mamba_rms_norm": True, "key_multiplier": 0.7, "ssm_in_multiplier": 0.8},
    # A step's least value, of prompts alone in transformers: so small that it does nothing.
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 24, **NO_LEAST_STEP},
    **dict.fromkeys(("mamba", "falcon_mamba"), MAMBA_ALONE),
    "jamba": {"attn_layer_period": 3, "attn_layer_offset": 1, "mamba_dt_rank": 4, "mamba_d_state": 12},
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        **{"num_key_value_heads": 4, "mamba_d_state": 24, "adapter_rank": 8, "use_shared_attention_adapter": True},
        "attention_head_dim": 32,  # from the other sizes, whatever config.json says
        **NO_LEAST_STEP,
    },
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 24},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [16, 48], "axial_pos_shape": [16, 32]},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0}},
    "xlm": {"emb_dim": 64, "n_layers": 2, "n_words": VOCAB_SIZE, "causal": True},
}
"""What a type needs besides."""


def tiny_config(model_type: str) -> Any:
    """A config of a few layers and small widths.

    Raises: whatever the config class raises.
    """
    config_class = CONFIG_MAPPING[model_type]
    default = config_class()
    options = _shrunk(default.to_dict())
    for part in default.sub_configs:
        inner = getattr(default, part, None)
        if inner is not None and part not in ("attn_config", "ffn_config"):
            options[part] = _shrunk(inner.to_dict())
    options |= TWEAKS.get(model_type, {})
    return config_class(**options)


def _shrunk(values: dict[str, Any]) -> dict[str, Any]:
    options = {name: size for name, size in SIZES.items() if size is not None and values.get(name) is not None}
    options |= {name: size for name, size in REQUIRED.items() if name in values}
    if values.get("num_key_value_heads") == values.get("num_attention_heads") is not None:
        options["num_key_value_heads"] = 4
    num_layers = options.get("num_hidden_layers", 3)
    for name in ("layer_types", "mlp_layer_types"):
        kinds = values.get(name)
        if kinds:
            unique = list(dict.fromkeys(kinds))
            options[name] = [unique[index % len(unique)] for index in range(num_layers)]
    return options
