"""Hunyuan: config.json as it is published, dense and with experts, and the rotations that it may name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pagoda_common.errors import ModelLoadError
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_worker.models.registry import FAMILIES
from tests.unit.worker.driver import Driver
from tests.unit.worker.models.reference import NUM_TOKENS, make_prompts, open_reference

DENSE, MOE = "HunYuanDenseV1ForCausalLM", "HunYuanMoEV1ForCausalLM"
ROPE = {
    "alpha": 1000.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "type": "dynamic",
}
PUBLISHED: dict[str, Any] = {
    "add_classification_head": False,
    "architectures": [DENSE],
    "attention_bias": False,
    "attention_dropout": 0.1,
    "attention_head_dim": 128,
    "bos_token_id": 1,
    "cla_share_factor": 2,
    "class_num": 0,
    "dense_list": [4096, 0],
    "eos_token_id": 127960,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "im_end_id": 5,
    "im_newline_id": 11,
    "im_start_id": 4,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "mask_init_id": 12,
    "max_position_embeddings": 32768,
    "mlp_bias": False,
    "model_type": "hunyuan_v1_dense",
    "norm_type": "rms",
    "num_attention_heads": 32,
    "num_hidden_layers": 4,
    "num_key_value_heads": 8,
    "org_vocab_size": 128167,
    "pad_id": 127961,
    "pad_token_id": 127961,
    "pool_type": "last",
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": ROPE,
    "rope_theta": 10000.0,
    "sep_token_id": 127962,
    "text_end_id": 7,
    "text_start_id": 6,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": False,
    "use_cla": False,
    "use_qk_norm": True,
    "use_rotary_pos_emb": True,
    "vocab_size": 128167,
}
"""As of the models of 7B, with fewer layers."""
WITH_EXPERTS: dict[str, Any] = PUBLISHED | {
    "architectures": [MOE],
    "model_type": "hunyuan_v1_moe",
    "intermediate_size": 3072,
    "moe_intermediate_size": [3072] * 4,
    "num_experts": 64,
    "moe_topk": [8] * 4,
    "num_shared_expert": [1] * 4,
    "moe_layer_num_skipped": 0,
    "moe_drop_tokens": False,
    "moe_random_routing_dropped_token": False,
    "use_mixed_mlp_moe": True,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "group_limited_greedy": False,
    "n_group": None,
    "use_mla": False,
    "position_embedding_xdrope": False,
    "num_media_embeds": 257,
    "vit_patch": 1,
}
"""As of A13B, with fewer layers."""
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 128}


def test_the_published_config_is_understood() -> None:
    spec = FAMILIES[DENSE].spec(PUBLISHED)
    assert (spec.num_layers, spec.head_dim, spec.num_kv_heads, spec.tie_word_embeddings) == (4, 128, 8, True)
    assert (spec.qk_norm, spec.qkv_bias, spec.o_bias, spec.mlp_bias) == ("turned_head", False, False, False)
    assert spec.moe is None
    assert spec.rope is not None
    assert spec.rope.rope_type == "default"
    assert spec.rope.theta == pytest.approx(10000.0 * 1000.0 ** (128 / 126))


def test_the_published_config_of_experts_is_understood() -> None:
    spec = FAMILIES[MOE].spec(WITH_EXPERTS)
    assert spec.moe is not None
    assert (spec.moe.num_experts, spec.moe.num_experts_per_token) == (64, 8)
    assert spec.moe.intermediate_size == spec.moe.shared_intermediate_size == 3072
    assert (spec.moe.is_normalized, spec.moe.shared_is_gated) == (True, False)


def test_the_size_of_a_head_has_two_names() -> None:
    config = {name: value for name, value in PUBLISHED.items() if name != "head_dim"}
    assert FAMILIES[DENSE].spec(config | {"attention_head_dim": 64}).head_dim == 64
    assert FAMILIES[DENSE].spec(PUBLISHED | {"attention_head_dim": 64}).head_dim == 128
    assert FAMILIES[DENSE].spec(config | {"attention_head_dim": None, "hidden_size": 3072}).head_dim == 96


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_cla": True}, "use_cla True"),
        ({"use_qk_norm": False}, "use_qk_norm False"),
        ({"norm_type": "layer"}, "norm_type 'layer'"),
        ({"mlp_bias": True}, "mlp_bias True"),
        ({"use_rotary_pos_emb": False}, "use_rotary_pos_emb False"),
        ({"rope_scaling": {"type": "xdrope", "alpha": 1000.0}}, "rope type 'xdrope' is not supported"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "alpha": 1000.0}}, "alpha 1000.0 among the rope"),
        ({"rope_scaling": ROPE | {"alpha": "many"}}, "config.json cannot be understood"),
        ({"head_dim": 2}, "config.json cannot be understood: ZeroDivisionError"),
    ],
)
def test_what_is_not_supported_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        FAMILIES[DENSE].spec(PUBLISHED | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_topk": [8, 8, 4, 8]}, r"moe_topk must be the same in all layers, is \[8, 8, 4, 8\]"),
        ({"num_experts": []}, r"num_experts must be the same in all layers, is \[\]"),
        ({"moe_intermediate_size": 1024}, "moe_intermediate_size 1024, which is not supported; must be 3072"),
        ({"num_shared_expert": [2] * 4}, "num_shared_expert .*, which is not supported; must be 1"),
        ({"use_mixed_mlp_moe": False}, "use_mixed_mlp_moe False"),
        ({"norm_topk_prob": False}, "norm_topk_prob False"),
        ({"routed_scaling_factor": 2.5}, "routed_scaling_factor 2.5"),
        ({"moe_layer_num_skipped": 1}, "moe_layer_num_skipped 1"),
        ({"group_limited_greedy": True}, "group_limited_greedy True"),
        ({"use_mla": True}, "use_mla True"),
        ({"moe_topk": 65}, "num_experts_per_tok is 65"),
    ],
)
def test_experts_that_are_not_supported_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        FAMILIES[MOE].spec(WITH_EXPERTS | changes)


@pytest.mark.parametrize("architecture", [DENSE, MOE])
def test_a_published_config_gives_the_tokens_of_transformers(architecture: str, tmp_path: Path) -> None:
    """With the keys of published checkpoints, in place of those that transformers writes."""
    reference = open_reference(tmp_path, architecture, attention_bias=False, tie_word_embeddings=True)
    written = json.loads((tmp_path / "config.json").read_text())
    rope = written.pop("rope_parameters")
    published = PUBLISHED if architecture == DENSE else WITH_EXPERTS
    config = published | {name: written[name] for name in published if name in written}
    config |= {"rope_theta": rope["rope_theta"], "rope_scaling": ROPE | {"alpha": rope["alpha"]}}
    if architecture == MOE:
        config |= {name: [written[name]] * 2 for name in ("num_experts", "moe_topk")}
        config |= {"moe_intermediate_size": [written["intermediate_size"]] * 2, "num_shared_expert": [1] * 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    sequences = Driver(tmp_path).generate(make_prompts(), max_tokens=NUM_TOKENS)
    assert [sequence.output for sequence in sequences] == reference.outputs


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 100.0},
        {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0},
        {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0},
        YARN,
        YARN | {"attention_factor": 0.3},
    ],
    ids=["default", "dynamic", "linear", "yarn", "yarn with a factor"],
)
def test_other_rotations_give_the_tokens_of_transformers(rope: dict[str, Any], tmp_path: Path) -> None:
    """What yarn multiplies queries and keys with, their norms take away again."""
    reference = open_reference(tmp_path, DENSE, rope_parameters=rope)
    assert reference.together == reference.outputs
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=1)
    for sequence in reference.driver.generate(make_prompts(), params, max_tokens=4):
        rows = reference.logprobs(sequence.prompt + sequence.output)[len(sequence.prompt) - 1 : -1]
        said = torch.tensor([max(entries.values()) for entries in sequence.logprobs])
        torch.testing.assert_close(said, rows.max(dim=-1).values, atol=1e-4, rtol=0)


def test_alpha_changes_what_comes_out(tmp_path: Path) -> None:
    reference = open_reference(tmp_path, DENSE)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"]["alpha"] = 1.0
    (tmp_path / "config.json").write_text(json.dumps(config))
    sequences = Driver(tmp_path).generate(make_prompts(), max_tokens=NUM_TOKENS)
    assert [sequence.output for sequence in sequences] != reference.outputs
