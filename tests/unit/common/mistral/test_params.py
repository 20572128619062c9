"""config.json of Mistral's params.json, whole, and what each tensor is called elsewhere."""

import json
from pathlib import Path
from typing import Any

import pytest

from pagoda_common.errors import ModelLoadError
from pagoda_common.mistral.params import checkpoint_name, mistral_directory, model_config

SIZES = {"dim": 64, "n_layers": 3, "hidden_dim": 96, "n_heads": 8, "vocab_size": 300}
YARN = {"factor": 16, "original_max_position_embeddings": 64}


def config_of(path: Path, **params: Any) -> dict[str, Any]:
    file = path / "params.json"
    file.write_text(json.dumps({name: value for name, value in (SIZES | params).items() if value is not ...}))
    return model_config(file)


def whole(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "intermediate_size": 96,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 8,
        "vocab_size": 300,
        "max_position_embeddings": 128_000,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "hidden_act": "silu",
        "sliding_window": None,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    } | changes


def yarn(**changes: Any) -> dict[str, Any]:
    return {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 16,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
    } | changes


@pytest.mark.parametrize(
    ("params", "changes"),
    [
        ({}, {}),
        ({"n_kv_heads": 2, "head_dim": 16}, {"num_key_value_heads": 2, "head_dim": 16}),
        ({"norm_eps": 0.5, "sliding_window": 7}, {"rms_norm_eps": 0.5, "sliding_window": 7}),
        ({"sliding_window": 0}, {}),
        ({"tied_embeddings": True}, {"tie_word_embeddings": True}),
        ({"max_position_embeddings": 5, "model_max_length": 6}, {"max_position_embeddings": 5}),
        ({"model_max_length": 6, "max_seq_len": 7}, {"max_position_embeddings": 6}),
        ({"max_seq_len": 7}, {"max_position_embeddings": 7}),
        ({"rope_theta": 5.0}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}),
        ({"yarn": YARN}, {"rope_parameters": yarn()}),
        (
            {"yarn": YARN | {"beta": 8, "alpha": 2, "apply_scale": True}, "rope_theta": 5.0},
            {"rope_parameters": yarn(beta_fast=8, beta_slow=2, rope_theta=5.0)},
        ),
        ({"yarn": YARN | {"apply_scale": False}}, {"rope_parameters": yarn(attention_factor=1.0)}),
        (
            {"moe": {"num_experts": 4, "num_experts_per_tok": 2}},
            {
                "architectures": ["MixtralForCausalLM"],
                "model_type": "mixtral",
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
            },
        ),
        (
            {"quantization": {"qformat_weight": "fp8_e4m3"}},
            {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}},
        ),
        ({"vision_encoder": None, "lora": {}}, {}),
    ],
)
def test_the_whole_config(tmp_path: Path, params: dict[str, Any], changes: dict[str, Any]) -> None:
    assert config_of(tmp_path, **params) == whole(**changes)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [..., 0, -1, True, "5", 2.0])
def test_a_size_that_is_none_is_named(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(ModelLoadError, match=rf"^{name} is .* in .*params\.json, must be at least 1$"):
        config_of(tmp_path, **{name: value})


@pytest.mark.parametrize(
    ("params", "message"),
    [
        *(
            ({name: {"x": 1}}, f"has {name}, which is not supported")
            for name in ("vision_encoder", "audio_model", "mla", "llama_4_scaling", "lora", "multimodal")
        ),
        ({"q_lora_rank": 3}, "has q_lora_rank, which is not supported"),
        ({"quantization": {"qformat_weight": "int8"}}, "has quantization .*, must be of fp8_e4m3"),
        ({"quantization": "fp8_e4m3"}, "has quantization .*, must be of fp8_e4m3"),
        ({"sliding_window": [1, 2]}, r"sliding_window is \[1, 2\] in .*, must be one number"),
        ({"yarn": {"factor": 16}}, "must have factor and original_max_position_embeddings"),
        ({"yarn": {"original_max_position_embeddings": 16}}, "must have factor and original_max_position_embeddings"),
        ({"yarn": 5}, "must have factor and original_max_position_embeddings"),
        ({"moe": {"num_experts": 4}}, "num_experts_per_tok is None"),
        ({"moe": {"num_experts_per_tok": 4}}, "num_experts is None"),
    ],
)
def test_what_is_not_read_is_named(tmp_path: Path, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        config_of(tmp_path, **params)


@pytest.mark.parametrize("text", ["[]", "3", "{", ""])
def test_what_is_no_object_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "params.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"params\.json"):
        model_config(tmp_path / "params.json")


def test_the_directory_has_both_configs_and_what_lies_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pagoda_common.config.checkpoint import translated_files

    monkeypatch.setattr(translated_files, "cache_home", lambda: tmp_path / "cache")
    source = tmp_path / "source"
    source.mkdir()
    config_of(source)
    for name in ("consolidated.safetensors", "tekken.json", "chat_template.jinja", "other.txt"):
        (source / name).write_text("x")
    made = mistral_directory(source)
    assert json.loads((made / "config.json").read_text()) == whole()
    assert json.loads((made / "generation_config.json").read_text()) == {"bos_token_id": 1, "eos_token_id": 2}


@pytest.mark.parametrize(
    ("name", "elsewhere"),
    [
        ("tok_embeddings.weight", "model.embed_tokens.weight"),
        ("norm.weight", "model.norm.weight"),
        ("output.weight", "lm_head.weight"),
        ("layers.12.attention.wq.weight", "model.layers.12.self_attn.q_proj.weight"),
        ("layers.0.attention.wk.bias", "model.layers.0.self_attn.k_proj.bias"),
        ("layers.0.attention.wv.qscale_weight", "model.layers.0.self_attn.v_proj.qscale_weight"),
        ("layers.0.attention.wo.qscale_act", "model.layers.0.self_attn.o_proj.qscale_act"),
        ("layers.0.attention_norm.weight", "model.layers.0.input_layernorm.weight"),
        ("layers.0.ffn_norm.weight", "model.layers.0.post_attention_layernorm.weight"),
        ("layers.0.feed_forward.w1.weight", "model.layers.0.mlp.gate_proj.weight"),
        ("layers.0.feed_forward.w2.weight", "model.layers.0.mlp.down_proj.weight"),
        ("layers.0.feed_forward.w3.weight", "model.layers.0.mlp.up_proj.weight"),
        ("layers.1.feed_forward.gate.weight", "model.layers.1.block_sparse_moe.gate.weight"),
        ("layers.1.block_sparse_moe.gate.weight", "model.layers.1.block_sparse_moe.gate.weight"),
        ("layers.1.feed_forward.experts.7.w2.weight", "model.layers.1.block_sparse_moe.experts.7.w2.weight"),
        ("layers.1.block_sparse_moe.experts.7.w3.weight", "model.layers.1.block_sparse_moe.experts.7.w3.weight"),
        ("layers.1.feed_forward.experts.7.w4.weight", "layers.1.feed_forward.experts.7.w4.weight"),
        ("layers.x.attention.wq.weight", "layers.x.attention.wq.weight"),
        ("layers.0.attention.wq.scale", "layers.0.attention.wq.scale"),
    ],
)
def test_names_of_tensors(name: str, elsewhere: str) -> None:
    assert checkpoint_name(name) == elsewhere
