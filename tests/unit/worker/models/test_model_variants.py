"""Options of the architectures, one by one: greedy tokens equal transformers' in float32."""

from pathlib import Path
from typing import Any

import pytest
import torch

from pagoda_common.params.sampling_params import SamplingParams
from tests.unit.worker.models.reference import NUM_TOKENS, make_prompts, open_reference

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "OLMoE with weights that sum to one": ("OlmoeForCausalLM", {"norm_topk_prob": True}),
    "OPT with norms after and a narrow embedding": (
        "OPTForCausalLM",
        {"do_layer_norm_before": False, "word_embed_proj_dim": 32},
    ),
    "Llama with biases and llama3 rope": (
        "LlamaForCausalLM",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "Llama with linear rope": (
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}},
    ),
    "Qwen3 with yarn rope": (
        "Qwen3ForCausalLM",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            }
        },
    ),
    "Llama with gelu and one KV head": ("LlamaForCausalLM", {"hidden_act": "gelu", "num_key_value_heads": 1}),
    "GPT-2 with scales by layer, untied": (
        "GPT2LMHeadModel",
        {"scale_attn_by_inverse_layer_idx": True, "tie_word_embeddings": False, "n_inner": 100},
    ),
    "Llama with dynamic rope": (
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0}},
    ),
    "Llama with yarn rope and its mscales": (
        "LlamaForCausalLM",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 5000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 16,
                "beta_slow": 2,
                "mscale": 0.8,
                "mscale_all_dim": 0.3,
                "truncate": False,
            }
        },
    ),
    "Mistral without a window": ("MistralForCausalLM", {"sliding_window": None}),
    "Ministral with windows in some layers": (
        "MinistralForCausalLM",
        {"layer_types": ["full_attention", "sliding_attention"]},
    ),
    "Qwen3 with windows, biases and tied": (
        "Qwen3ForCausalLM",
        {
            "use_sliding_window": True,
            "sliding_window": 35,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "Gemma 2 without soft caps and windows, with biases": (
        "Gemma2ForCausalLM",
        {
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "layer_types": ["full_attention"] * 2,
            "attention_bias": True,
        },
    ),
    "Gemma 3 with a stretched context and soft caps": (
        "Gemma3ForCausalLM",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 50000.0, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 8.0,
        },
    ),
    "Gemma 3n with caches of its own, dense, of one width": (
        "Gemma3nForCausalLM",
        {
            "num_kv_shared_layers": 0,
            "intermediate_size": 64,
            "activation_sparsity_pattern": [0.0] * 5,
            "altup_active_idx": 0,
            "altup_correct_scale": False,
            "vocab_size_per_layer_input": 400,
        },
    ),
    "Gemma 4 with values, without experts and inputs of layers, with biases": (
        "Gemma4ForCausalLM",
        {
            "attention_k_eq_v": False,
            "enable_moe_block": False,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,  # transformers cannot have these without inputs of layers
            "use_double_wide_mlp": False,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "Mamba without biases of convolutions, with others, untied and wide": (
        "MambaForCausalLM",
        {"use_conv_bias": False, "use_bias": True, "tie_word_embeddings": False, "expand": 3},
    ),
    "Jamba without experts, with other biases": (
        "JambaForCausalLM",
        {"num_experts": 1, "mamba_proj_bias": True, "mamba_conv_bias": False},
    ),
    "Zamba2 with one block, without rotations and adapters, with biases and norms of two kinds": (
        "Zamba2ForCausalLM",
        {
            "num_mem_blocks": 1,
            "use_mem_rope": False,
            "use_shared_attention_adapter": False,
            "add_bias_linear": True,
            "mamba_ngroups": 1,
            "rms_norm_eps": 0.1,  # not of those within Mamba
        },
    ),
    "Olmo 3 with yarn in the layers without a window": (
        "Olmo3ForCausalLM",
        {
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 10000.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 128,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "Granite with biases, tied": (
        "GraniteForCausalLM",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "SmolLM3 with windows": (
        "SmolLM3ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 25, "attention_bias": True, "mlp_bias": True},
    ),
    "Starcoder2 without biases and window": ("Starcoder2ForCausalLM", {"use_bias": False, "sliding_window": None}),
    "GPT-NeoX one after the other, whole heads rotated": (
        "GPTNeoXForCausalLM",
        {
            "use_parallel_residual": False,
            "attention_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0},
        },
    ),
    "Phi with query and key norms": ("PhiForCausalLM", {"qk_layernorm": True, "num_key_value_heads": 4}),
    "StableLM side by side, with norms of heads and biases": (
        "StableLmForCausalLM",
        {"use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True},
    ),
    "Cohere with norms of heads and biases": ("CohereForCausalLM", {"use_qk_norm": True, "attention_bias": True}),
    "Falcon of the first generation": ("FalconForCausalLM", {"new_decoder_architecture": False, "bias": True}),
    "Falcon one after the other, all heads": (
        "FalconForCausalLM",
        {"new_decoder_architecture": False, "multi_query": False, "parallel_attn": False, "num_kv_heads": 4},
    ),
    "Falcon with one norm, untied": (
        "FalconForCausalLM",
        {"num_ln_in_parallel_attn": 1, "tie_word_embeddings": False},
    ),
    "EXAONE 4 without windows": (
        "Exaone4ForCausalLM",
        {"sliding_window": None, "layer_types": ["full_attention"] * 2},
    ),
    "GPT-BigCode with all heads": ("GPTBigCodeForCausalLM", {"multi_query": False, "tie_word_embeddings": False}),
    "ERNIE with biases, untied": ("Ernie4_5ForCausalLM", {"use_bias": True, "tie_word_embeddings": False}),
    "Seed-OSS with biases of the other kind": (
        "SeedOssForCausalLM",
        {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
    ),
    "Mixtral with a window": ("MixtralForCausalLM", {"sliding_window": 24}),
    "Qwen3-MoE with a window and weights that do not sum to 1": (
        "Qwen3MoeForCausalLM",
        {"use_sliding_window": True, "sliding_window": 24, "norm_topk_prob": False, "mlp_only_layers": []},
    ),
    "Qwen2-MoE with every other layer dense": (
        "Qwen2MoeForCausalLM",
        {"decoder_sparse_step": 2, "norm_topk_prob": True, "use_sliding_window": False},
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_equal_transformers(name: str, tmp_path: Path) -> None:
    architecture, overrides = VARIANTS[name]
    reference = open_reference(tmp_path, architecture, **overrides)
    sequences = reference.driver.generate(make_prompts(), max_tokens=NUM_TOKENS, chunk=100)
    assert [sequence.output for sequence in sequences] == reference.outputs


@pytest.mark.parametrize(("max_model_len", "lengths"), [(512, (65, 300)), (64, (1, 16, 39))])
def test_longrope_chooses_its_factors_by_the_longest_sequence(
    max_model_len: int, lengths: tuple[int, ...], tmp_path: Path
) -> None:
    # transformers takes the long factors as soon as one sequence is longer than the original context.
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.1, 1.3, 1.7, 2.0, 2.2],
        "long_factor": [1.5, 2.5, 4.0, 8.0, 9.0, 11.0],
    }
    reference = open_reference(
        tmp_path,
        "Phi3ForCausalLM",
        max_model_len=max_model_len,
        rope_parameters=rope,
        original_max_position_embeddings=64,
        partial_rotary_factor=1.0,
    )
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, logprobs=2)
    for sequence in reference.driver.generate(make_prompts(lengths), params, max_tokens=NUM_TOKENS):
        expected = reference.logprobs(sequence.prompt + sequence.output)
        for index, (token_id, entries) in enumerate(zip(sequence.output, sequence.logprobs, strict=True)):
            row = expected[len(sequence.prompt) + index - 1]
            assert token_id == int(torch.argmax(row))
            assert entries[token_id] == pytest.approx(float(row[token_id]), abs=1e-4)
