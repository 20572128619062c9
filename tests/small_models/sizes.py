"""Sizes and options that small models of several kinds share."""

VOCAB_SIZE = 300

LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
# Odd layers and windows on purpose: a layer of each kind, windows shorter than most prompts and no multiple of a block.
SMALL = LLAMA | {"num_hidden_layers": 2, "hidden_size": 48, "intermediate_size": 80}
THREE_KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
GROUPED = {
    "n_routed_experts": 9,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "n_group": 3,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
HUNYUAN = {
    "head_dim": 20,
    "attention_bias": True,
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "alpha": 6.0, "factor": 1.0},
}
