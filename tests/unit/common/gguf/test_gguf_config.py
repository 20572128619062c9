"""config.json of a GGUF file's metadata, whole, and what each tensor is called elsewhere."""

from pathlib import Path
from typing import Any

import pytest

from pagoda_common.errors import ModelLoadError
from pagoda_common.gguf.config import FAMILIES, checkpoint_names, family_of, model_config
from pagoda_common.gguf.file import BLOCK_TYPES, GgufFile, GgufTensor

TYPES = {kind.name: kind for kind in BLOCK_TYPES.values()}
KEYS: dict[str, Any] = {
    "embedding_length": 64,
    "attention.head_count": 8,
    "block_count": 3,
    "feed_forward_length": 96,
    "context_length": 256,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def tensor(name: str, *shape: int, kind: str = "F32") -> GgufTensor:
    return GgufTensor(name=name, shape=shape, type=TYPES[kind], offset=0)


def file_of(architecture: str = "llama", *tensors: GgufTensor, without: str = "", **keys: Any) -> GgufFile:
    """A file with KEYS and `keys` (a dot is written __) of its architecture, and an embedding."""
    values = KEYS | {name.replace("__", "."): value for name, value in keys.items()}
    metadata = {f"{architecture}.{name}": value for name, value in values.items() if name != without}
    held = {one.name: one for one in (tensor("token_embd.weight", 300, 64), *tensors)}
    return GgufFile(path=Path("m.gguf"), metadata={"general.architecture": architecture} | metadata, tensors=held)


def whole(**changes: Any) -> dict[str, Any]:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "intermediate_size": 96,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "vocab_size": 300,
        "rope_parameters": ROPE,
        "tie_word_embeddings": True,
        "dtype": "float32",
        "quantization_config": {"quant_method": "gguf"},
        "hidden_act": "silu",
    }
    return {name: value for name, value in (config | changes).items() if value is not ...}


def test_what_a_file_leaves_out_has_its_default() -> None:
    assert model_config(file_of(), None) == whole()


def test_what_a_file_says_counts() -> None:
    file = file_of(
        "llama",
        tensor("output.weight", 300, 64),
        tensor("blk.0.attn_output.bias", 64),
        attention__head_count_kv=2,
        attention__key_length=16,
        attention__layer_norm_rms_epsilon=0.25,
        attention__sliding_window=32,
        rope__freq_base=5e5,
    )
    assert model_config(file, None) == whole(
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=0.25,
        sliding_window=32,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        tie_word_embeddings=False,
        attention_bias=True,
    )


def test_numbers_of_each_layer_must_be_one() -> None:
    assert model_config(file_of(attention__head_count_kv=[2, 2, 2]), None) == whole(num_key_value_heads=2)
    for value in ([2, 2, 1], [], "2", 2.0, True, -1):
        with pytest.raises(ModelLoadError, match=r"llama\.attention\.head_count_kv is .*, must be a whole number"):
            model_config(file_of(attention__head_count_kv=value), None)


@pytest.mark.parametrize("name", KEYS)
def test_a_missing_size_is_named(name: str) -> None:
    with pytest.raises(ModelLoadError, match=rf"m\.gguf: llama\.{name} is missing, must be a whole number") as caught:
        model_config(file_of(without=name), None)
    assert caught.value.field == "model"


def test_real_numbers_may_be_whole_and_are_no_flags() -> None:
    assert model_config(file_of(rope__freq_base=7), None)["rope_parameters"]["rope_theta"] == 7.0
    for value in (True, "7", [7.0]):
        with pytest.raises(ModelLoadError, match=r"llama\.rope\.freq_base is .*, must be a number"):
            model_config(file_of(rope__freq_base=value), None)


def test_a_window_of_nothing_is_none() -> None:
    for value in (0, 32.0, None):
        assert "sliding_window" not in model_config(file_of(attention__sliding_window=value), None)


@pytest.mark.parametrize(
    ("keys", "factors", "rope"),
    [
        ({"rope__scaling__type": "none"}, None, ROPE),
        (
            {"rope__scaling__type": "linear", "rope__scaling__factor": 4},
            None,
            {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        ),
        (
            {"rope__scaling__type": "yarn", "rope__scaling__original_context_length": 64},
            None,
            {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 1.0,
                "original_max_position_embeddings": 64,
            },
        ),
        (
            {"rope__freq_base": 5e5, "rope__scaling__type": "linear"},
            [1.0, 8.0],
            {
                "rope_type": "longrope",
                "rope_theta": 5e5,
                "original_max_position_embeddings": 256,
                "short_factor": [1.0, 8.0],
                "long_factor": [1.0, 8.0],
                "attention_factor": 1.0,
                "factor": 1.0,
            },
        ),
    ],
)
def test_ropes(keys: dict[str, Any], factors: list[float] | None, rope: dict[str, Any]) -> None:
    assert model_config(file_of(**keys), factors) == whole(rope_parameters=rope)


def test_a_rope_that_is_not_known_is_named() -> None:
    with pytest.raises(ModelLoadError, match=r"rope\.scaling\.type is 'su', must be one of none, linear, yarn"):
        model_config(file_of(rope__scaling__type="su"), None)
    with pytest.raises(ModelLoadError, match=r"rope\.scaling\.original_context_length is missing"):
        model_config(file_of(rope__scaling__type="yarn"), None)


@pytest.mark.parametrize(
    ("kinds", "dtype"),
    [(("F32",), "float32"), (("F16",), "float16"), (("F16", "F32"), "bfloat16"), (("Q8_0",), "bfloat16")],
)
def test_the_type_to_compute_in_is_that_of_all_matrices(kinds: tuple[str, ...], dtype: str) -> None:
    matrices = [tensor(f"blk.{place}.ffn_up.weight", 4, 4, kind=kind) for place, kind in enumerate(kinds)]
    norm = tensor("output_norm.weight", 64, kind="F32")  # vectors are always of this type
    file = file_of("llama", tensor("token_embd.weight", 300, 64, kind=kinds[0]), norm, *matrices)
    assert model_config(file, None)["dtype"] == dtype


def test_an_embedding_of_two_dimensions_must_be_there() -> None:
    for one in (tensor("token_embd.weight", 300), tensor("token_embd.weight", 300, 64, 2)):
        with pytest.raises(ModelLoadError, match=r"has no tensor token_embd\.weight of two dimensions"):
            model_config(file_of("llama", one), None)


EXPERTS = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 24}


@pytest.mark.parametrize(
    ("architecture", "keys", "tensors", "changes"),
    [
        ("qwen2", {}, (), {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}),
        ("qwen3", {}, (), {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}),
        (
            "qwen3moe",
            EXPERTS,
            (),
            {
                "architectures": ["Qwen3MoeForCausalLM"],
                "model_type": "qwen3_moe",
                "num_experts": 8,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 24,
                "norm_topk_prob": True,
                "decoder_sparse_step": 1,
            },
        ),
        (
            "qwen2moe",
            EXPERTS,
            (tensor("blk.0.ffn_up_shexp.weight", 48, 64),),
            {
                "architectures": ["Qwen2MoeForCausalLM"],
                "model_type": "qwen2_moe",
                "num_experts": 8,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 24,
                "norm_topk_prob": False,
                "decoder_sparse_step": 1,
                "shared_expert_intermediate_size": 48,
            },
        ),
        (
            "llama",
            EXPERTS,
            (),
            {
                "architectures": ["MixtralForCausalLM"],
                "model_type": "mixtral",
                "num_local_experts": 8,
                "num_experts_per_tok": 2,
            },
        ),
        (
            "gemma2",
            {"attention.key_length": 32},
            (),
            {
                "architectures": ["Gemma2ForCausalLM"],
                "model_type": "gemma2",
                "head_dim": 32,
                "attn_logit_softcapping": 50.0,
                "final_logit_softcapping": 30.0,
                "query_pre_attn_scalar": 32,
                "hidden_activation": "gelu_pytorch_tanh",
                "hidden_act": ...,
            },
        ),
        (
            "gemma2",
            {"block_count": 46, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 6.0},
            (),
            {
                "architectures": ["Gemma2ForCausalLM"],
                "model_type": "gemma2",
                "num_hidden_layers": 46,
                "attn_logit_softcapping": 5.0,
                "final_logit_softcapping": 6.0,
                "query_pre_attn_scalar": 8,
                "hidden_activation": "gelu_pytorch_tanh",
                "hidden_act": ...,
            },
        ),
    ],
)
def test_families(architecture: str, keys: dict[str, Any], tensors: Any, changes: dict[str, Any]) -> None:
    assert model_config(file_of(architecture, *tensors, **keys), None) == whole(**changes)


@pytest.mark.parametrize(("heads", "scalar"), [(0, 64), ([4, 4], 16), (2**60, 0), (4, 16)])
def test_a_number_of_heads_that_no_model_has_is_for_its_bounds(heads: Any, scalar: int) -> None:
    file = file_of("gemma2", block_count=46, attention__head_count=heads)
    assert model_config(file, None)["query_pre_attn_scalar"] == scalar


@pytest.mark.parametrize("heads", [[4, 5], "4", -4, 4.0, None, [[4]]])
def test_heads_that_are_no_number_are_named(heads: Any) -> None:
    with pytest.raises(ModelLoadError, match=r"gemma2\.attention\.head_count is"):
        model_config(file_of("gemma2", block_count=46, attention__head_count=heads), None)


def test_an_architecture_that_is_not_known_is_named() -> None:
    for name in ("mamba", "x" * 300, None, ["llama"], [["x" * 300]]):
        file = GgufFile(path=Path("m.gguf"), metadata={"general.architecture": name}, tensors={})
        with pytest.raises(
            ModelLoadError, match=r"m\.gguf has general\.architecture .*, must be one of llama, "
        ) as error:
            family_of(file)
        assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    ("family", "name", "elsewhere"),
    [
        ("llama", "token_embd.weight", ["model.embed_tokens.weight"]),
        ("llama", "output_norm.weight", ["model.norm.weight"]),
        ("llama", "output.weight", ["lm_head.weight"]),
        ("llama", "blk.12.attn_q.bias", ["model.layers.12.self_attn.q_proj.bias"]),
        ("llama", "blk.0.ffn_norm.weight", ["model.layers.0.post_attention_layernorm.weight"]),
        ("gemma2", "blk.0.ffn_norm.weight", ["model.layers.0.pre_feedforward_layernorm.weight"]),
        ("gemma2", "blk.0.post_attention_norm.weight", ["model.layers.0.post_attention_layernorm.weight"]),
        ("llama", "blk.0.post_attention_norm.weight", None),
        ("llama", "rope_freqs.weight", None),
        ("llama", "blk.0.attn_q.scale", None),
        (
            "qwen3moe",
            "blk.1.ffn_gate_exps.weight",
            [f"model.layers.1.mlp.experts.{place}.gate_proj.weight" for place in range(3)],
        ),
        ("qwen2moe", "blk.1.ffn_up_shexp.weight", ["model.layers.1.mlp.shared_expert.up_proj.weight"]),
        ("qwen2moe", "blk.1.ffn_gate_inp_shexp.weight", ["model.layers.1.mlp.shared_expert_gate.weight"]),
    ],
)
def test_names_of_tensors(family: str, name: str, elsewhere: list[str] | None) -> None:
    assert checkpoint_names(FAMILIES[family], tensor(name, 3, 4, 4)) == elsewhere


def test_names_of_mixtral_s_experts() -> None:
    family = family_of(file_of("llama", **EXPERTS))
    for part, name in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
        found = checkpoint_names(family, tensor(f"blk.0.ffn_{part}_exps.weight", 2, 4, 4))
        assert found == [f"model.layers.0.block_sparse_moe.experts.{place}.{name}.weight" for place in range(2)]
    gate = checkpoint_names(family, tensor("blk.0.ffn_gate_inp.weight", 8, 4))
    assert gate == ["model.layers.0.block_sparse_moe.gate.weight"]


def test_what_families_need_besides_names() -> None:
    assert {name for name, family in FAMILIES.items() if family.has_rope_order} == {"llama"}
    assert {name for name, family in FAMILIES.items() if family.norm_offset} == {"gemma2"}
    assert family_of(file_of("llama", **EXPERTS)).has_rope_order
    assert FAMILIES["gemma2"].norm_offset == 1
