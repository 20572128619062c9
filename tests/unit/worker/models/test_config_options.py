"""Options of config.json that no checkpoint of the tests sets: each changes its part of the spec, and no other."""

from dataclasses import fields, is_dataclass
from typing import Any

import pytest

from pagoda_common.errors import ModelLoadError
from pagoda_worker.models.bloom import power_slopes
from tests.unit.worker.models.test_hf_config import small


def changes(before: Any, since: Any, name: str = "") -> dict[str, Any]:
    """What differs, by dotted names."""
    if not is_dataclass(before) or type(before) is not type(since):
        return {} if before == since else {name: since}
    found: dict[str, Any] = {}
    for field in fields(before):
        path = f"{name}.{field.name}".lstrip(".")
        found |= changes(getattr(before, field.name), getattr(since, field.name), path)
    return found


@pytest.mark.parametrize(
    ("architecture", "options", "expected"),
    [
        ("OPTForCausalLM", {"enable_bias": False}, {"qkv_bias": False, "o_bias": False, "mlp_bias": False}),
        ("OPTForCausalLM", {"layer_norm_elementwise_affine": False}, {"norm_has_weights": False}),
        ("OPTForCausalLM", {"_remove_final_layer_norm": True}, {"has_final_norm": False}),
        ("Starcoder2ForCausalLM", {"norm_epsilon": 1e-3}, {"norm_eps": 1e-3}),
        ("GptOssForCausalLM", {"swiglu_alpha": 1.5}, {"moe.activation.alpha": 1.5}),
        ("Qwen3NextForCausalLM", {"linear_conv_kernel_dim": 3}, {"recurrence.conv_width": 3}),
        ("MambaForCausalLM", {"conv_kernel": 3}, {"recurrence.conv_width": 3}),
        ("NemotronHForCausalLM", {"conv_kernel": 3}, {"recurrence.conv_width": 3}),
        ("NemotronHForCausalLM", {"mamba_d_conv": 3}, {"recurrence.conv_width": 3}),
        ("NemotronHForCausalLM", {"mamba_conv_bias": False}, {"recurrence.conv_bias": False}),
        ("NemotronHForCausalLM", {"mlp_hidden_act": "silu"}, {"activation": "silu"}),
        ("NemotronHForCausalLM", {"layer_norm_epsilon": 1e-3}, {"norm_eps": 1e-3}),
        ("Lfm2MoeForCausalLM", {"use_expert_bias": False}, {"moe.has_correction": False}),
        ("Lfm2ForCausalLM", {"tie_embedding": False}, {"tie_word_embeddings": False}),
        ("Lfm2ForCausalLM", {"block_auto_adjust_ff_dim": False}, {"intermediate_size": 80}),
        ("Lfm2ForCausalLM", {"block_ffn_dim_multiplier": 2.0}, {"intermediate_size": 128}),
        ("Lfm2ForCausalLM", {"block_ffn_dim_multiplier": None}, {"intermediate_size": 53}),
        ("FalconForCausalLM", {"ffn_hidden_size": 100}, {"intermediate_size": 100}),
        (
            "MptForCausalLM",
            {"n_heads": 8, "attn_config": {"clip_qkv": 2.0, "alibi_bias_max": 4}},
            {"num_heads": 8, "num_kv_heads": 8, "head_dim": 6, "alibi_slopes": tuple(power_slopes(8, 4.0))},
        ),
    ],
)
def test_an_option_changes_its_part_alone(architecture: str, options: dict[str, Any], expected: dict[str, Any]) -> None:
    assert changes(small(architecture), small(architecture, **options)) == expected


@pytest.mark.parametrize(
    ("architecture", "other", "usual"),
    [
        ("NemotronHForCausalLM", {"layers_block_type": ..., "hybrid_override_pattern": "MEM*-"}, {}),
        ("NemotronHForCausalLM", {"n_groups": ..., "mamba_n_groups": 2}, {}),
        ("NemotronHForCausalLM", {"head_dim": ..., "attention_head_dim": 16}, {}),
        ("Lfm2ForCausalLM", {"layer_types": ..., "full_attn_idxs": [1]}, {}),
        (
            "Qwen3NextForCausalLM",
            {"layer_types": ..., "full_attention_interval": 2},
            {"layer_types": ["linear_attention", "full_attention"] * 2},
        ),
        (
            "Qwen3NextForCausalLM",
            {"layer_types": ...},
            {"layer_types": ["linear_attention"] * 3 + ["full_attention"]},
        ),
        (
            "BloomForCausalLM",
            {"hidden_size": ..., "n_embed": 48, "n_layer": ..., "num_hidden_layers": 2}
            | {"n_head": ..., "num_attention_heads": 6},
            {},
        ),
        (
            "Gemma3ForCausalLM",
            {"layer_types": ..., "_sliding_window_pattern": 2},
            {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        ),
    ],
)
def test_other_names_say_the_same(architecture: str, other: dict[str, Any], usual: dict[str, Any]) -> None:
    assert changes(small(architecture, **usual), small(architecture, **other)) == {}


@pytest.mark.parametrize(
    ("architecture", "options", "message"),
    [
        ("MptForCausalLM", {"attn_config": {"qk_ln": True}}, "qk_ln is True in config.json"),
        ("MptForCausalLM", {"attn_config": {"prefix_lm": True}}, "prefix_lm is True in config.json"),
        ("MptForCausalLM", {"attn_config": {"alibi": False}}, "alibi False, which is not supported"),
        (
            "NemotronHForCausalLM",
            {"layers_block_type": ..., "hybrid_override_pattern": "MX*"},
            r"hybrid_override_pattern has \['X'\]; supported are M, \*, -, E",
        ),
        ("NemotronHForCausalLM", {"layers_block_type": ["mlp", "sliding"]}, "layer type 'sliding' is not supported"),
    ],
)
def test_what_is_not_computed_is_refused(architecture: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        small(architecture, **options)
