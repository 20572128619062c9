"""A key of config.json that is not read is either known to be harmless, or refused."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from pagoda_common.errors import ModelLoadError
from pagoda_worker.models.config_keys import ON_BY_DEFAULT
from pagoda_worker.models.registry import FAMILIES, MODEL_TYPES, family_of
from tests.checkpoints import ARCHITECTURES, CONFIGS, TEXT_PARTS
from tests.deci_lm import DeciLMForCausalLM

TRANSFORMERS_NAMES = {"LLaMAForCausalLM": "LlamaForCausalLM", "MPTForCausalLM": "MptForCausalLM"}
LLAMA_MODULES = {"ExaoneForCausalLM": "ExaoneConfig", "InternLM3ForCausalLM": "InternLM3Config"}
"""Architectures that transformers computes with its Llama, and the configs that it has for them."""
LLAMA = {"architectures": ["LlamaForCausalLM"], "vocab_size": 300} | CONFIGS["LlamaForCausalLM"][1]
BLOOM_560M = {
    "apply_residual_connection_post_layernorm": False,
    "attention_dropout": 0.0,
    "attention_softmax_in_fp32": True,
    "architectures": ["BloomForCausalLM"],
    "bias_dropout_fusion": True,
    "bos_token_id": 1,
    "hidden_dropout": 0.0,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "masked_softmax_fusion": True,
    "model_type": "bloom",
    "n_embed": 1024,
    "n_inner": None,
    "n_layer": 24,
    "num_attention_heads": 16,
    "offset_alibi": 100,
    "pretraining_tp": 1,
    "skip_bias_add": True,
    "skip_bias_add_qkv": False,
    "seq_length": 2048,
    "unk_token_id": 0,
    "use_cache": True,
    "vocab_size": 250880,
}


def config_class_of(architecture: str) -> Any:
    """Of the module in transformers, or the one of its parts that tests have."""
    import transformers

    if architecture == "DeciLMForCausalLM":
        return DeciLMForCausalLM.config_class
    if architecture in LLAMA_MODULES:
        return getattr(transformers, LLAMA_MODULES[architecture])
    return getattr(transformers, TRANSFORMERS_NAMES.get(architecture, architecture)).config_class


def load(**config: Any) -> None:
    family_of(config).spec(config)


def with_layers(config: dict[str, Any]) -> dict[str, Any]:
    """`config` with what transformers has no default for, or none that works."""
    if config["architectures"] == ["Lfm2MoeForCausalLM"] and not config.get("layer_types"):
        config["layer_types"] = ["conv"] * int(config["num_hidden_layers"])
    if config["architectures"] == ["DeepseekV2ForCausalLM"]:
        config["num_experts_per_tok"] = 6
    if config["architectures"] == ["Glm4MoeForCausalLM"]:
        config["head_dim"] = 128  # of half a head's dimensions, an even number
    return config


@pytest.mark.parametrize("architecture", FAMILIES)
def test_the_default_config_of_every_architecture_loads(architecture: str) -> None:
    config_class = config_class_of(architecture)
    config = json.loads(config_class().to_json_string(use_diff=False))
    load(**with_layers(config | {"architectures": [architecture]}))


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_key_that_is_left_out_means_what_transformers_has_for_it(architecture: str) -> None:
    """Or the checkpoint is refused without it: there is no third value."""
    written = json.loads(config_class_of(architecture)().to_json_string(use_diff=False))
    config = with_layers(written | {"architectures": [architecture]})
    expected = family_of(config).spec(config)
    text = config.get("text_config")
    places = [(config, {"architectures", "model_type", "text_config"})]
    places += [(text, {"model_type"})] if isinstance(text, dict) else []
    left_out = 0
    for place, kept in places:
        for key in [key for key in place if key not in kept]:
            value = place.pop(key)
            with suppress(ModelLoadError):  # it is required, or others mean nothing without it
                assert family_of(config).spec(config) == expected, key
                left_out += 1
            place[key] = value
    assert left_out > 5


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_transformers_writes_for_a_small_checkpoint_loads(architecture: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    model_type, options = CONFIGS[architecture]
    AutoConfig.for_model(model_type, **options).save_pretrained(tmp_path)
    load(**with_layers(json.loads((tmp_path / "config.json").read_text()) | {"architectures": [architecture]}))


def test_a_published_checkpoint_with_old_names_loads() -> None:
    load(**BLOOM_560M)


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize(("key", "value"), [("is_causal", False), ("use_bidirectional_attention", True)])
def test_bidirectional_attention_is_refused_by_every_architecture(architecture: str, key: str, value: bool) -> None:
    config_class = config_class_of(architecture)
    written = json.loads(config_class().to_json_string(use_diff=False))
    config = with_layers(written | {"architectures": [architecture]})
    place = config.get("text_config", config)
    place[key] = value
    with pytest.raises(ModelLoadError, match=f"{key}.* {value}"):
        load(**config)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dual_chunk_attention_config", {"chunk_size": 262144}),
        ("qk_layernorm", True),
        ("attention_sink_size", 4),
        ("num_nextn_predict_layers", 1),
        ("logit_scale", 0.5),
        ("position_embedding_type", "relative_key"),
        ("alibi", True),
    ],
)
def test_a_key_that_llama_does_not_read_is_named_with_its_value(key: str, value: object) -> None:
    with pytest.raises(ModelLoadError) as caught:
        load(**LLAMA, **{key: value})
    assert f"config.json has {key} {value!r}" in caught.value.message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("is_causal", True),
        ("pretraining_tp", 8),
        ("attention_dropout", 0.1),
        ("unsloth_version", "2025.1"),
        ("use_mrope", False),
        ("logits_soft_cap", None),
        ("transformers.js_config", {"dtype": "q4"}),
        ("_attn_implementation_autoset", True),
        ("decoder_start_token_id", 3),
    ],
)
def test_a_key_that_changes_nothing_is_accepted(key: str, value: object) -> None:
    load(**LLAMA, **{key: value})


@pytest.mark.parametrize("key", ["mrope_section", "alpha", "short_mscale"])
def test_a_rope_parameter_that_no_type_reads_is_refused(key: str) -> None:
    scaling = {"rope_type": "default", key: [16, 24, 24] if key == "mrope_section" else 2.0}
    with pytest.raises(ModelLoadError, match=key):
        load(**LLAMA, rope_scaling=scaling)


@pytest.mark.parametrize("key", sorted(ON_BY_DEFAULT))
def test_what_is_on_by_default_may_not_be_switched_off(key: str) -> None:
    load(**LLAMA, **{key: True})
    with pytest.raises(ModelLoadError, match=f"{key} False"):
        load(**LLAMA, **{key: False})


@pytest.mark.parametrize(
    ("architecture", "key", "value"),
    [
        ("MptForCausalLM", "no_bias", False),
        ("MptForCausalLM", "attn_config", {"alibi": False}),
        ("MptForCausalLM", "attn_config", {"attn_type": "multiquery_attention"}),
        ("CohereForCausalLM", "use_parallel_block", False),
        ("Phi3ForCausalLM", "full_attn_mod", 2),
        ("GPTJForCausalLM", "scale_attn_weights", False),
        ("Starcoder2ForCausalLM", "norm_type", "rms_norm"),
        ("GPT2LMHeadModel", "add_cross_attention", True),
    ],
)
def test_a_description_of_another_model_is_refused(architecture: str, key: str, value: Any) -> None:
    config = {"architectures": [architecture], "vocab_size": 300} | CONFIGS[architecture][1]
    name, shown = next(iter(value.items())) if isinstance(value, dict) else (key, value)
    with pytest.raises(ModelLoadError, match=f"{name} {shown!r}"):
        load(**config | {key: value})


COHERE = {"position_embedding_type": "rope_gptj", "rotary_pct": 1.0, "use_embedding_sharing": True}
COHERE |= {"use_gated_activation": True, "use_parallel_block": True}
HUNYUAN = {"use_qk_norm": True, "use_cla": False, "norm_type": "rms", "use_rotary_pos_emb": True, "mlp_bias": False}
PUBLISHED: dict[str, dict[str, Any]] = {
    "CohereForCausalLM": COHERE,
    "Cohere2ForCausalLM": {**COHERE, "order_of_interleaved_layers": "local_attn_first", "layer_switch": 4},
    "DeepseekV2ForCausalLM": {"norm_topk_prob": False, "scoring_func": "softmax", "moe_layer_freq": 1},
    "DeepseekV3ForCausalLM": {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
    "FalconH1ForCausalLM": {"mamba_use_mlp": True, "hidden_act": "silu"},
    "GPTJForCausalLM": {"scale_attn_weights": True},
    "GptOssForCausalLM": {"hidden_act": "silu"},
    "HunYuanDenseV1ForCausalLM": HUNYUAN,
    "HunYuanMoEV1ForCausalLM": {
        **{**HUNYUAN, "norm_topk_prob": True, "use_mixed_mlp_moe": True},
        **{"moe_layer_num_skipped": 0, "routed_scaling_factor": 1.0},
    },
    "JambaForCausalLM": {"hidden_act": "silu"},
    "MambaForCausalLM": {"hidden_act": "silu", "rms_norm": True},
    "MiniMaxM2ForCausalLM": {
        **{"use_qk_norm": True, "qk_norm_type": "per_layer", "scoring_func": "sigmoid", "use_routing_bias": True},
        "attn_type_list": [1, 1, 1],
    },
    "MptForCausalLM": {
        **{"learned_pos_emb": True, "no_bias": True, "norm_type": "low_precision_layernorm", "expansion_ratio": 4},
        "fc_type": "torch",
    },
    "NemotronHForCausalLM": {"mamba_hidden_act": "silu"},
    "Phi3ForCausalLM": {"full_attn_mod": 1, "interpolate_factor": 1},
    "Starcoder2ForCausalLM": {"norm_type": "layer_norm", "mlp_type": "default"},
    "Zamba2ForCausalLM": {"use_shared_mlp_adapter": True, "gated_linear_unit": True},
}
"""What published checkpoints say of a computation that is the same in all of them."""


@pytest.mark.parametrize("architecture", PUBLISHED)
def test_what_published_checkpoints_say_is_accepted_and_the_opposite_refused(architecture: str) -> None:
    written = json.loads(config_class_of(architecture)().to_json_string(use_diff=False))
    config = with_layers(written | {"architectures": [architecture]} | PUBLISHED[architecture])
    load(**config)
    for name, value in PUBLISHED[architecture].items():
        other: Any = not value if isinstance(value, bool) else value + 1 if isinstance(value, int | float) else "other"
        other = [1, 0, 1] if isinstance(value, list) else other
        with pytest.raises(ModelLoadError) as caught:
            load(**config | {name: other})
        assert f"config.json has {name} {other!r}, which is not supported; must be " in caught.value.message


@pytest.mark.parametrize(("model_type", "architecture"), MODEL_TYPES.items())
@pytest.mark.parametrize("given", [{}, {"architectures": None}, {"architectures": []}])
def test_model_type_stands_for_architectures(model_type: str, architecture: str, given: dict[str, Any]) -> None:
    assert family_of({"model_type": model_type, **given}) is FAMILIES[architecture]


def test_every_architecture_has_a_model_type() -> None:
    by_hand = {MODEL_TYPES[model_type] for model_type in TEXT_PARTS}
    assert set(MODEL_TYPES.values()) == {*ARCHITECTURES, *by_hand}
    assert {CONFIGS[architecture][0] for architecture in ARCHITECTURES} == set(MODEL_TYPES) - set(TEXT_PARTS)


@pytest.mark.parametrize(
    ("pattern", "letters"), [("LLLG", "LLLGLLLG"), (4, "LLLGLLLG"), ("LG", "LGLGLGLG"), ("LLLLL", "LLLLLLLG")]
)
def test_exaone_takes_a_window_pattern_in_letters(pattern: object, letters: str) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 8, "num_attention_heads": 4}
    config = {"architectures": ["Exaone4ForCausalLM"], "vocab_size": 300, "num_key_value_heads": 2, **sizes}
    spec = family_of(config).spec(config | {"sliding_window": 16, "sliding_window_pattern": pattern})
    assert spec.windows == tuple(16 if letter == "L" else None for letter in letters)
    assert [rope is not None for rope in spec.layer_ropes] == [letter == "L" for letter in letters]


def test_a_window_pattern_of_other_letters_is_refused() -> None:
    config = {"architectures": ["Exaone4ForCausalLM"], "vocab_size": 300} | CONFIGS["LlamaForCausalLM"][1]
    with pytest.raises(ModelLoadError, match=r"sliding_window_pattern is 'LLX'"):
        family_of(config).spec(config | {"sliding_window_pattern": "LLX"})
