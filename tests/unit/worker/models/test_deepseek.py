"""DeepSeek-V2, V3 and those like them: what config.json may say, what each option does, and what a token costs."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagoda_common.errors import ModelLoadError
from pagoda_worker.memory.kv_cache import KVCache, block_bytes
from pagoda_worker.models.decoder import attention_layers
from pagoda_worker.models.registry import FAMILIES, Family, find_family, is_foreign
from pagoda_worker.models.spec import DecoderSpec
from tests.checkpoints import make_checkpoint
from tests.unit.worker.driver import Driver
from tests.unit.worker.models.reference import make_prompts

V2, V3 = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"
GLM, FLASH, MINICPM = "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM", "MiniCPM3ForCausalLM"
YOUTU = "YoutuForCausalLM"
KIMI_K2: dict[str, Any] = {
    "architectures": [V3],
    "model_type": "kimi_k2",
    "attention_bias": False,
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 163840,
}
"""As it is published."""


def test_kimi_k2_is_deepseek_v3_of_other_sizes() -> None:
    family = find_family(KIMI_K2)
    assert family is not None
    assert not is_foreign(KIMI_K2)
    spec = family.spec(KIMI_K2)
    assert (spec.num_layers, spec.num_heads, spec.max_position_embeddings) == (61, 64, 131072)
    assert spec.moe is not None
    assert (spec.moe.num_experts, spec.moe.scale, spec.moe.num_groups) == (384, 2.827, 1)
    assert [spec.layer_moe(layer) is None for layer in range(3)] == [True, False, False]
    assert spec.scale(0) == pytest.approx(192**-0.5 * (1 + 0.1 * 3.4657359) ** 2)


def test_a_token_of_deepseek_takes_one_latent() -> None:
    spec = FAMILIES[V3].spec(KIMI_K2)
    layers = attention_layers(spec)
    assert {(layer.num_kv_heads, layer.head_dim, layer.latent_rank) for layer in layers} == {(1, 576, 512)}
    assert block_bytes(layers, block_size=16, dtype=torch.bfloat16) == 61 * 16 * 576 * 2
    assert block_bytes(layers, block_size=16, dtype=torch.int8) == 61 * 16 * 580
    cache = KVCache(
        layers=layers[:2],
        num_blocks=3,
        num_cpu_blocks=2,
        block_size=16,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    assert cache.num_bytes == 2 * 3 * 16 * 576 * 2


@pytest.mark.parametrize(
    ("architecture", "options", "message"),
    [
        (V2, {"norm_topk_prob": True}, "norm_topk_prob"),
        (V2, {"topk_method": "noaux_tc"}, "topk_method"),
        (V2, {"scoring_func": "sigmoid"}, "scoring_func"),
        (V3, {"scoring_func": "softmax"}, "scoring_func"),
        (V3, {"topk_method": "greedy"}, "topk_method"),
        (V3, {"moe_layer_freq": 2}, "moe_layer_freq"),
        (V3, {"kv_lora_rank": 0}, "at least 1"),
        (V3, {"n_group": 7}, "n_group is 7, must divide"),
        (V3, {"use_nsa": True}, "use_nsa"),
        (FLASH, {"mlp_layer_types": ["dense"] * 3}, "mlp_layer_types"),
        (FLASH, {"mlp_layer_types": ["linear"] * 61}, "mlp_layer_types"),
    ],
)
def test_what_would_compute_something_else_is_refused(architecture: str, options: dict[str, Any], message: str) -> None:
    config = KIMI_K2 | options
    if architecture == FLASH:
        config = {name: value for name, value in config.items() if name not in ("scoring_func", "topk_method")}
    if architecture == V2:
        defaults = {"norm_topk_prob": False, "topk_method": "greedy", "scoring_func": "softmax"}
        config = {name: value for name, value in KIMI_K2.items() if name != "num_nextn_predict_layers"}
        config |= defaults | options
    with pytest.raises(ModelLoadError, match=message):
        FAMILIES[architecture].spec(config)


def test_a_model_without_experts() -> None:
    assert FAMILIES[V3].spec(KIMI_K2 | {"n_routed_experts": None}).moe is None


def test_layers_that_predict_more_tokens_are_left_out(tmp_path: Path) -> None:
    directory = make_checkpoint(V3, tmp_path)
    expected = Driver(directory).generate([[1, 2, 3]], max_tokens=4)[0].output
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.2.eh_proj.weight"] = torch.zeros(2, 2)
    tensors["model.layers.2.mlp.experts.0.up_proj.weight"] = torch.zeros(2, 2)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (directory / "config.json").write_text(json.dumps(config))
    assert Driver(directory).generate([[1, 2, 3]], max_tokens=4)[0].output == expected


def _latent(**options: Any) -> Callable[[DecoderSpec], DecoderSpec]:
    return lambda spec: replace(spec, latent=replace(spec.latent, **options))  # type: ignore[type-var]  # it is there


def _moe(**options: Any) -> Callable[[DecoderSpec], DecoderSpec]:
    return lambda spec: replace(spec, moe=replace(spec.moe, **options))  # type: ignore[type-var]  # it is there


def _rope(**options: Any) -> Callable[[DecoderSpec], DecoderSpec]:
    return lambda spec: replace(spec, rope=replace(spec.rope, **options))  # type: ignore[type-var]  # it is there


SPOILT: dict[str, tuple[tuple[str, ...], Callable[[DecoderSpec], DecoderSpec]]] = {
    "norms of latents": ((V2, V3, FLASH, MINICPM, YOUTU), _latent(norm_eps=1.0)),
    "yarn's mscale on scores": (
        (V2, V3, MINICPM, YOUTU),
        lambda spec: replace(spec, scales=(22**-0.5,) * spec.num_layers),
    ),
    "yarn's mscale on rotations": ((V2, V3), lambda spec: replace(spec, rope=_without_mscale(spec))),
    "pairs of rotations": ((V2, V3, FLASH), _rope(is_interleaved=False)),
    "halves of rotations": ((MINICPM, GLM, YOUTU), _rope(is_interleaved=True)),
    "share of rotations": ((GLM,), _rope(partial_rotary_factor=1.0)),
    "groups": ((V2, V3, GLM, FLASH), _moe(num_groups=1, top_groups=1)),
    "how many groups": ((V2, V3), _moe(top_groups=1)),
    "scores of groups": ((V3,), _moe(group_score="max")),
    "scaling factor": ((V2, V3, GLM, FLASH), _moe(scale=1.0)),
    "normalised weights": ((V3, GLM), _moe(is_normalized=False)),
    "weights that are not normalised": ((V2,), _moe(is_normalized=True)),
    "norms of heads": ((GLM,), lambda spec: replace(spec, norm_eps=1.0)),
    "multiplier on embeddings": ((MINICPM,), lambda spec: replace(spec, embedding_multiplier=1.0)),
    "multiplier on sums": ((MINICPM,), lambda spec: replace(spec, residual_multiplier=1.0)),
}
"""An option as it should not be, and where it means something."""


def _without_mscale(spec: DecoderSpec) -> Any:
    assert spec.rope is not None
    parameters = dict(spec.rope.parameters) | {"mscale": 1.0, "mscale_all_dim": 1.0}
    return replace(spec.rope, parameters=tuple(sorted(parameters.items())))


@pytest.fixture(scope="module", params=[V2, V3, GLM, FLASH, MINICPM, YOUTU])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    """An architecture, a checkpoint, and its tokens, which test_exactness holds against transformers'."""
    directory = make_checkpoint(request.param, tmp_path_factory.mktemp("checkpoint"))
    return request.param, directory, _tokens(directory)


def _tokens(directory: Path) -> list[list[int]]:
    return [one.output for one in Driver(directory).generate(make_prompts((5, 40, 90)), max_tokens=16)]


@pytest.mark.parametrize("name", SPOILT)
def test_every_option_changes_tokens(name: str, served: tuple[str, Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    architecture, directory, expected = served
    architectures, spoil = SPOILT[name]
    if architecture not in architectures:
        pytest.skip("it has no such option")
    family = FAMILIES[architecture]
    monkeypatch.setitem(FAMILIES, architecture, Family(lambda config: spoil(family.read(config)), family.names))
    assert _tokens(directory) != expected


def test_the_correction_changes_tokens(tmp_path: Path) -> None:
    directory = make_checkpoint(V3, tmp_path)
    before = _tokens(directory)
    tensors = load_file(directory / "model.safetensors")
    for name in tensors:
        if name.endswith("e_score_correction_bias"):
            tensors[name].zero_()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    assert _tokens(directory) != before


def test_latents_sleep_and_are_swapped(tmp_path: Path) -> None:
    driver = Driver(make_checkpoint(V3, tmp_path))
    before = [one.output for one in driver.generate(make_prompts((5, 40)), max_tokens=8)]
    driver.worker.sleep(1)
    driver.worker.wake_up()
    driver.worker.initialize_cache(num_blocks=600, num_cpu_blocks=4)
    assert [one.output for one in driver.generate(make_prompts((5, 40)), max_tokens=8)] == before
