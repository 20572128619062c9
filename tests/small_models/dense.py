"""Small decoders with one feed-forward network a layer, and caches of keys and values."""

from typing import Any

from tests.small_models.sizes import HUNYUAN, LLAMA, LLAMA3_ROPE, SMALL, THREE_KINDS

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
    "rope_parameters": LLAMA3_ROPE,
}

DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("llama", LLAMA),
    "MistralForCausalLM": ("mistral", LLAMA | {"sliding_window": 21, "tie_word_embeddings": True}),
    "Qwen2ForCausalLM": (
        "qwen2",
        LLAMA | {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1},
    ),
    "Qwen3ForCausalLM": ("qwen3", LLAMA | {"head_dim": 24}),
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
    "Phi3ForCausalLM": ("phi3", SMALL | {"sliding_window": 50, "partial_rotary_factor": 0.5}),
    "Olmo2ForCausalLM": ("olmo2", SMALL),
    "Olmo3ForCausalLM": ("olmo3", SMALL | {"sliding_window": 19, "layer_types": THREE_KINDS[:2]}),
    "OlmoForCausalLM": ("olmo", SMALL | {"clip_qkv": 1.5}),
    "GraniteForCausalLM": (
        "granite",
        SMALL
        | {
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.3,
            "attention_multiplier": 0.2,
            "logits_scaling": 3.0,
        },
    ),
    "SmolLM3ForCausalLM": ("smollm3", SMALL | {"no_rope_layer_interval": 2}),
    "Starcoder2ForCausalLM": ("starcoder2", SMALL | {"sliding_window": 33}),
    "GPTNeoXForCausalLM": ("gpt_neox", SMALL | {"num_attention_heads": 3}),
    "PhiForCausalLM": ("phi", SMALL),
    "StableLmForCausalLM": ("stablelm", SMALL | {"num_attention_heads": 2, "num_key_value_heads": 1}),
    "CohereForCausalLM": ("cohere", SMALL | {"logit_scale": 0.4}),
    "Cohere2ForCausalLM": (
        "cohere2",
        SMALL | {"logit_scale": 0.4, "sliding_window": 23, "layer_types": THREE_KINDS[:2]},
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
    "GlmForCausalLM": ("glm", SMALL | {"head_dim": 16}),
    "Glm4ForCausalLM": ("glm4", SMALL | {"head_dim": 16}),
    "ExaoneForCausalLM": (
        "exaone",
        SMALL
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
    "Exaone4ForCausalLM": ("exaone4", SMALL | {"sliding_window": 26, "layer_types": THREE_KINDS[:2]}),
    "Ernie4_5ForCausalLM": ("ernie4_5", SMALL | {"head_dim": 16}),
    "SeedOssForCausalLM": ("seed_oss", SMALL | {"head_dim": 16}),
    "InternLM3ForCausalLM": (
        "internlm3",
        SMALL
        | {
            "head_dim": 16,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 50000.0, "factor": 6.0},
        },
    ),
    "HunYuanDenseV1ForCausalLM": ("hunyuan_v1_dense", SMALL | HUNYUAN),
    "NemotronForCausalLM": ("nemotron", SMALL),
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
    "ArceeForCausalLM": ("arcee", SMALL),
    "MinistralForCausalLM": ("ministral", SMALL | {"head_dim": 16, "sliding_window": 21}),
}
"""Architecture to model_type and options."""
