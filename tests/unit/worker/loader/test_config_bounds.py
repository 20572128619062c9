"""Bounds of a config.json at their edges: the largest value of each name is taken, and the next one is not."""

from typing import Any

import pytest

from pagoda_common.errors import ConfigError, ModelLoadError
from pagoda_worker.loader import config_bounds
from pagoda_worker.loader.config_bounds import check_config
from pagoda_worker.models.cache_groups import check_chunks

MOST = {
    1024: ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "num_layer"),
    65_536: (
        *("num_attention_heads", "num_key_value_heads", "num_kv_heads", "num_heads", "n_heads", "n_head"),
        *("linear_num_key_heads", "linear_num_value_heads", "mamba_num_heads", "mamba_n_heads"),
        *("num_experts", "n_routed_experts", "num_local_experts", "n_shared_experts", "num_experts_per_tok"),
    ),
    2**22: (
        *("hidden_size", "head_dim", "intermediate_size", "moe_intermediate_size", "ffn_hidden_size", "head_size"),
        *("shared_expert_intermediate_size", "word_embed_proj_dim", "hidden_dim", "ffn_dim", "d_model", "n_embd"),
        *("n_inner", "rotary_dim", "expansion_ratio", "v_head_dim", "qk_rope_head_dim", "qk_nope_head_dim"),
        *("linear_key_head_dim", "linear_value_head_dim", "mamba_head_dim", "mamba_d_state", "ssm_state_size"),
        *("q_lora_rank", "kv_lora_rank", "mamba_n_groups", "n_groups", "mamba_d_conv"),
    ),
    2**24: ("vocab_size",),
    2**27: ("max_position_embeddings", "original_max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
    2**63 - 1: ("rope_theta", "bos_token_id", "anything"),
}
"""By the largest value."""


def test_the_bounds_are_several_times_what_any_model_has() -> None:
    assert (config_bounds.MAX_DEPTH, config_bounds.MAX_VALUES, config_bounds.MAX_EXPERTS) == (32, 10**6, 2**18)
    assert config_bounds.MAX_TEXT_CHARS == 200


@pytest.mark.parametrize(("name", "most"), [(name, most) for most, names in MOST.items() for name in names])
def test_a_size_has_a_bound(name: str, most: int) -> None:
    for value in (most, -most):
        check_config({name: value})
    for value in (most + 1, -most - 1):
        with pytest.raises(ModelLoadError) as error:
            check_config({"text_config": [{name: value}]}, file="a.json")
        assert str(error.value) == f"{name} is {value} in a.json, must be at most {most}"


@pytest.mark.parametrize("value", [None, [3, 4], True, 0.5])
def test_what_is_no_large_number_is_taken(value: Any) -> None:
    check_config({"vocab_size": value, "rope_theta": value, "eps": 1e300})


@pytest.mark.parametrize("value", ["4", {"a": 4}])
def test_a_size_is_a_number(value: Any) -> None:
    with pytest.raises(ModelLoadError, match=r"^vocab_size is .* in config\.json, must be a number$"):
        check_config({"vocab_size": value})
    check_config({"hidden_act": value})


@pytest.mark.parametrize(
    ("value", "is_taken"), [(["A", "B"], True), ([], True), (None, True), ("A", False), ([1], False)]
)
def test_architectures_are_names(value: Any, is_taken: bool) -> None:
    if is_taken:
        check_config({"architectures": value})
        return
    with pytest.raises(ModelLoadError) as error:
        check_config({"architectures": value})
    assert str(error.value) == f"architectures is {value!r} in config.json, must be a list of names"


@pytest.mark.parametrize("name", ["model_type", "dtype", "torch_dtype"])
def test_names_are_texts(name: str) -> None:
    check_config({name: "text"})
    check_config({name: None})
    with pytest.raises(ModelLoadError, match=rf"^{name} is 3 in config\.json, must be a name$"):
        check_config({name: 3})


def nested(depth: int) -> dict[str, Any]:
    config: dict[str, Any] = {"a": 1}
    for _ in range(depth - 1):
        config = {"a": config}
    return config


def test_a_file_is_nested_so_deep_at_most() -> None:
    check_config(nested(32))
    with pytest.raises(ModelLoadError, match=r"^config\.json is nested more than 32 levels deep$"):
        check_config(nested(33))


def test_a_file_has_so_many_values_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_bounds, "MAX_VALUES", 5)
    check_config({"a": [1, 2], "b": 3, "c": 4})
    with pytest.raises(ModelLoadError, match=r"^config\.json has more than 5 values$"):
        check_config({"a": [1, 2, 3], "b": 3, "c": 4})


@pytest.mark.parametrize(("experts", "fits"), [(256, True), (257, False)])
def test_experts_of_all_layers_are_counted(experts: int, fits: bool) -> None:
    config = {"num_hidden_layers": 1024, "text_config": {"num_experts": experts, "n_shared_experts": 2}}
    if fits:
        check_config(config)
        return
    with pytest.raises(ModelLoadError, match=rf"asks for {1024 * 257} experts in all layers, must be at most 262144$"):
        check_config(config)


def test_a_long_value_is_shown_in_part() -> None:
    with pytest.raises(ModelLoadError) as error:
        check_config({"vocab_size": "x" * 300})
    assert str(error.value) == f"vocab_size is '{'x' * 199}… in config.json, must be a number"
    with pytest.raises(ModelLoadError) as error:
        check_config({"vocab_size": "x" * 198})
    assert str(error.value) == f"vocab_size is '{'x' * 198}' in config.json, must be a number"


@pytest.mark.parametrize(
    ("chunk", "fits"), [(None, True), (32, True), (40, False), (99, False), (100, True), (101, True)]
)
def test_a_chunk_within_the_context_is_of_whole_blocks(chunk: int | None, fits: bool) -> None:
    if fits:
        check_chunks([None, chunk], block_size=16, max_model_len=100)
        return
    with pytest.raises(ConfigError) as error:
        check_chunks([None, chunk], block_size=16, max_model_len=100)
    assert str(error.value) == f"block_size is 16, must divide the model's attention_chunk_size, {chunk}"
    assert error.value.field == "block_size"
