"""What config.json leaves out means what it means to transformers, in its forms before and since version 5."""

import json
from pathlib import Path
from typing import Any

import pytest

from pagoda_common.errors import ModelLoadError
from pagoda_worker.models.recurrent_spec import Mamba2Spec
from pagoda_worker.models.registry import FAMILIES, MODEL_TYPES, family_of
from pagoda_worker.models.spec import DecoderSpec
from tests import deci_lm
from tests.checkpoints import ARCHITECTURES, CONFIGS, TEXT_PARTS

SIZES = {
    "hidden_size": 768,
    "intermediate_size": 80,
    "num_hidden_layers": 12,
    "num_attention_heads": 96,
    "vocab_size": 300,
}
GPT2_SIZES = {"n_embd": 48, "n_layer": 12, "n_head": 4, "vocab_size": 300}
OPT_SIZES = {"hidden_size": 48, "ffn_dim": 80, "num_hidden_layers": 12, "num_attention_heads": 4, "vocab_size": 300}
FALCON_SIZES = {"hidden_size": 48, "num_hidden_layers": 12, "num_attention_heads": 4, "vocab_size": 300}
MOE_SIZES = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
MAMBA_SIZES = {"hidden_size": 768, "num_hidden_layers": 12, "vocab_size": 300}
OTHER_SIZES: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": GPT2_SIZES,
    "GPTJForCausalLM": GPT2_SIZES | {"n_embd": 512},
    "GPTBigCodeForCausalLM": GPT2_SIZES,
    "BloomForCausalLM": {"hidden_size": 48, "n_layer": 12, "n_head": 4, "vocab_size": 300},
    "MptForCausalLM": {"d_model": 48, "n_layers": 12, "n_heads": 4, "vocab_size": 300},
    "OPTForCausalLM": OPT_SIZES,
    "FalconForCausalLM": FALCON_SIZES,
    "Qwen2MoeForCausalLM": SIZES | MOE_SIZES,
    "Qwen3MoeForCausalLM": SIZES | MOE_SIZES,
    "Gemma3ForConditionalGeneration": {
        "text_config": {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 12},
    },
    "Gemma3nForCausalLM": SIZES | {"num_kv_shared_layers": 3},
    "Gemma4ForConditionalGeneration": {"text_config": SIZES},
    "MambaForCausalLM": MAMBA_SIZES,
    "FalconMambaForCausalLM": MAMBA_SIZES,
    "Mamba2ForCausalLM": MAMBA_SIZES | {"num_heads": 24},
    "Zamba2ForCausalLM": SIZES | {"layers_block_type": ["linear_attention", "hybrid"] * 6},
    "MinistralForCausalLM": SIZES | {"head_dim": 16},
    "Lfm2MoeForCausalLM": SIZES | {"layer_types": ["conv", "full_attention"] * 6},  # transformers has no default
    "DeepseekV2ForCausalLM": SIZES | {"num_experts_per_tok": 6},  # transformers has no default
    "Qwen3_5ForConditionalGeneration": {"text_config": SIZES},
    "Llama4ForConditionalGeneration": {"text_config": SIZES},
    "Qwen3_5MoeForConditionalGeneration": {"text_config": SIZES | MOE_SIZES},
}


def spec_of(architecture: str, **config: Any) -> DecoderSpec:
    config["architectures"] = [architecture]
    return family_of(config).spec(config)


def small(architecture: str, **changes: Any) -> DecoderSpec:
    """The checkpoint of the exactness tests, with other options; ... removes one."""
    options = {"vocab_size": 300} | CONFIGS[architecture][1] | changes
    if isinstance(options.get("text_config"), dict):
        options["text_config"] = {"vocab_size": 300} | options["text_config"]
    return spec_of(architecture, **{name: value for name, value in options.items() if value is not ...})


def test_every_supported_architecture_has_a_checkpoint_in_the_tests() -> None:
    other_names = {"LLaMAForCausalLM": "LlamaForCausalLM", "MPTForCausalLM": "MptForCausalLM"}
    by_hand = {MODEL_TYPES[model_type] for model_type in TEXT_PARTS}
    assert set(ARCHITECTURES) == set(FAMILIES) - set(other_names) - by_hand
    for other, name in other_names.items():
        assert FAMILIES[other] == FAMILIES[name]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_defaults_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    assert CONFIGS["DeciLMForCausalLM"][0] == deci_lm.MODEL_TYPE, "transformers knows it by that module"
    sizes = OTHER_SIZES.get(architecture, SIZES)
    AutoConfig.for_model(CONFIGS[architecture][0], **sizes, pad_token_id=None).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert spec_of(architecture, **sizes) == spec_of(architecture, **written)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_spec_names_its_architecture(architecture: str) -> None:
    assert small(architecture).architecture == architecture


@pytest.mark.parametrize(
    ("architecture", "old", "new"),
    [
        (
            "LlamaForCausalLM",
            {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}},
        ),
        (
            "Qwen2ForCausalLM",
            {
                "rope_theta": 1e6,
                "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
            },
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e6,
                    "factor": 4.0,
                    "original_max_position_embeddings": 128,
                }
            },
        ),
        (
            "Gemma3ForCausalLM",
            {
                "rope_theta": 1e5,
                "rope_local_base_freq": 5e3,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                "layer_types": ...,
                "sliding_window_pattern": 2,
            },
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 8.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
                },
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
        ),
        (
            "Phi3ForCausalLM",
            {
                "rope_scaling": {"type": "su", "short_factor": [1.0] * 3, "long_factor": [2.0] * 3},
                "original_max_position_embeddings": 64,
            },
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "partial_rotary_factor": 0.5,
                    "short_factor": [1.0] * 3,
                    "long_factor": [2.0] * 3,
                },
                "original_max_position_embeddings": 64,
                "partial_rotary_factor": ...,
            },
        ),
        (
            "GPTNeoXForCausalLM",
            {"rotary_pct": 0.5, "rotary_emb_base": 5000},
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5}},
        ),
        (
            "FalconForCausalLM",
            {"n_layer": 2, "n_head": 4, "num_hidden_layers": ..., "num_attention_heads": ...},
            {},
        ),
        ("GemmaForCausalLM", {"hidden_act": "gelu"}, {"hidden_act": "gelu_pytorch_tanh"}),
        (
            "Cohere2ForCausalLM",
            {"layer_types": ..., "sliding_window_pattern": 2},
            {"layer_types": ["sliding_attention", "full_attention"]},
        ),
    ],
)
def test_old_and_new_forms_say_the_same(architecture: str, old: dict[str, Any], new: dict[str, Any]) -> None:
    before, since = small(architecture, **old), small(architecture, **new)
    assert before == since
    if architecture not in ("FalconForCausalLM", "Cohere2ForCausalLM", "GemmaForCausalLM"):
        assert before != small(architecture)


@pytest.mark.parametrize(
    ("architecture", "changes", "fragment"),
    [
        ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "axial"}}, "'axial' is not supported; supported are"),
        ("LlamaForCausalLM", {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "differ between layer"),
        ("LlamaForCausalLM", {"head_dim": 7}, "7 of head_dim 7 are rotated, must be even"),
        ("PhiForCausalLM", {"partial_rotary_factor": 0.25}, "3 of head_dim 12"),
        ("PhiForCausalLM", {"partial_rotary_factor": 2.0}, "24 of head_dim 12"),
        ("Phi3ForCausalLM", {"rope_scaling": {"type": "longrope", "long_factor": [1.0]}}, "needs short_factor"),
        ("Qwen3ForCausalLM", {"layer_types": ["chunked_attention"] * 3, "use_sliding_window": True}, "'chunked_attent"),
        ("Gemma2ForCausalLM", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 2 layers"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("FalconForCausalLM", {"alibi": True}, "alibi is True"),
        ("MixtralForCausalLM", {"num_experts_per_tok": 5}, "num_experts_per_tok is 5, must be between 1 and"),
        ("Qwen3MoeForCausalLM", {"moe_intermediate_size": ...}, "config.json has no moe_intermediate_size"),
    ],
)
def test_what_cannot_be_run_is_named(architecture: str, changes: dict[str, Any], fragment: str) -> None:
    with pytest.raises(ModelLoadError) as raised:
        small(architecture, **changes)
    assert fragment in raised.value.message


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("LlamaForCausalLM", {"hidden_size": "wide"}),
        ("LlamaForCausalLM", {"rope_scaling": "linear"}),
        ("LlamaForCausalLM", {"rope_parameters": {"rope_theta": [1]}}),
        ("LlamaForCausalLM", {"num_key_value_heads": -1}),
        ("GPT2LMHeadModel", {"n_head": 0}),
        ("Qwen3ForCausalLM", {"layer_types": 3, "use_sliding_window": True}),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1]}),
        ("SmolLM3ForCausalLM", {"no_rope_layer_interval": 0}),
        ("Gemma3ForConditionalGeneration", {"text_config": 5}),
        ("GraniteForCausalLM", {"logits_scaling": 0}),
        ("PhiForCausalLM", {"layer_norm_eps": {}}),
    ],
)
def test_nonsense_is_a_load_error(architecture: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadError):
        small(architecture, **changes)


def test_a_window_is_only_where_the_layer_types_say() -> None:
    assert small("Gemma3ForCausalLM").windows == (27, None, 27)
    assert small("Qwen2ForCausalLM").windows == (None, 40, 40)
    assert small("Qwen2ForCausalLM", use_sliding_window=False).windows == ()
    assert small("MistralForCausalLM", sliding_window=None).windows == ()
    assert small("Gemma3ForCausalLM", layer_types=..., num_hidden_layers=12).windows == ((27,) * 5 + (None,)) * 2


HYBRIDS = ("FalconH1ForCausalLM", "BambaForCausalLM", "GraniteMoeHybridForCausalLM")


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_a_bias_of_attention_is_one_of_all_four_matrices(architecture: str) -> None:
    with_bias, without = (small(architecture, attention_bias=has_bias) for has_bias in (True, False))
    assert (with_bias.qkv_bias, with_bias.o_bias) == (True, True)
    assert (without.qkv_bias, without.o_bias) == (False, False)
    assert with_bias.mlp_bias == without.mlp_bias
    assert with_bias.recurrence == without.recurrence


def test_biases_of_falcon_h1_are_each_their_own() -> None:
    plain = small("FalconH1ForCausalLM")
    assert isinstance(plain.recurrence, Mamba2Spec)
    for name, changed in (
        ("mlp_bias", {"mlp_bias"}),
        ("attention_bias", {"qkv_bias", "o_bias"}),
        ("projectors_bias", {"recurrence.out_bias"}),
        ("mamba_proj_bias", {"recurrence.in_bias"}),
        ("mamba_conv_bias", {"recurrence.conv_bias"}),
    ):
        key, default = name, name == "mamba_conv_bias"
        other = small("FalconH1ForCausalLM", **{key: not default})
        assert isinstance(other.recurrence, Mamba2Spec)
        found = {one for one in ("qkv_bias", "o_bias", "mlp_bias") if getattr(other, one) != getattr(plain, one)}
        found |= {
            f"recurrence.{one}"
            for one in ("in_bias", "out_bias", "conv_bias")
            if getattr(other.recurrence, one) != getattr(plain.recurrence, one)
        }
        assert found == changed, name
