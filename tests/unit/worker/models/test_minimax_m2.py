"""MiniMax-M2: what config.json may say, and what each option does."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from pagoda_common.errors import ModelLoadError
from pagoda_worker.models.registry import FAMILIES, Family, find_family
from pagoda_worker.models.spec import DecoderSpec, RopeSpec
from tests.checkpoints import make_checkpoint
from tests.unit.worker.driver import Driver
from tests.unit.worker.models.reference import make_prompts

M2 = "MiniMaxM2ForCausalLM"
PUBLISHED: dict[str, Any] = {
    "architectures": [M2],
    "attn_type_list": [1] * 62,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "layernorm_full_attention_beta": 1.0,
    "layernorm_linear_attention_beta": 1.0,
    "layernorm_mlp_beta": 1.0,
    "max_position_embeddings": 196608,
    "mlp_intermediate_size": 8192,
    "model_type": "minimax_m2",
    "mtp_transformer_layers": 1,
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "num_mtp_modules": 3,
    "qk_norm_type": "per_layer",
    "rms_norm_eps": 1e-06,
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "shared_moe_mode": "sigmoid",
    "tie_word_embeddings": False,
    "use_mtp": True,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 200064,
}


def test_the_published_config() -> None:
    family = find_family(PUBLISHED)
    assert family is not None
    spec = family.spec(PUBLISHED)
    assert spec.rope == RopeSpec(theta=5e6, partial_rotary_factor=0.5)
    assert (spec.qk_norm, spec.num_qkv_heads(0), spec.max_position_embeddings) == ("width", 64, 196608)
    assert spec.moe is not None
    assert (spec.moe.num_experts, spec.moe.num_experts_per_token, spec.moe.shared_intermediate_size) == (256, 8, 0)


@pytest.mark.parametrize(
    "options",
    [
        {"use_qk_norm": False},
        {"qk_norm_type": "per_head"},
        {"scoring_func": "softmax"},
        {"use_routing_bias": False},
        {"attn_type_list": [1, 0] * 31},
        {"shared_intermediate_size": 64},
        {"sliding_window": 100},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_would_compute_something_else_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadError, match=next(iter(options))):
        FAMILIES[M2].spec(PUBLISHED | options)


def _moe(**options: Any) -> Callable[[DecoderSpec], DecoderSpec]:
    return lambda spec: replace(spec, moe=replace(spec.moe, **options))  # type: ignore[type-var]  # it is there


def _rope(**options: Any) -> Callable[[DecoderSpec], DecoderSpec]:
    return lambda spec: replace(spec, rope=replace(spec.rope, **options))  # type: ignore[type-var]  # it is there


SPOILT: dict[str, Callable[[DecoderSpec], DecoderSpec]] = {
    "share of rotations": _rope(partial_rotary_factor=1.0),
    "halves of rotations": _rope(is_interleaved=True),
    "base of rotations": _rope(theta=10000.0),
    "sigmoid": _moe(scoring="softmax"),
    "normalised weights": _moe(is_normalized=False),
    "experts of a token": _moe(num_experts_per_token=2),
    "norms": lambda spec: replace(spec, norm_eps=1.0),
}
"""An option as it should not be."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A checkpoint, and its tokens, which test_exactness holds against transformers'."""
    directory = make_checkpoint(M2, tmp_path_factory.mktemp("checkpoint"))
    return directory, _tokens(directory)


def _tokens(directory: Path) -> list[list[int]]:
    return [one.output for one in Driver(directory).generate(make_prompts((5, 40, 90)), max_tokens=16)]


@pytest.mark.parametrize("name", SPOILT)
def test_every_option_changes_tokens(
    name: str, served: tuple[Path, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, expected = served
    family, spoil = FAMILIES[M2], SPOILT[name]
    monkeypatch.setitem(FAMILIES, M2, Family(lambda config: spoil(family.read(config)), family.names))
    assert _tokens(directory) != expected


@pytest.mark.parametrize("ending", ["e_score_correction_bias", "q_norm.weight", "k_norm.weight"])
def test_every_part_of_its_own_changes_tokens(
    ending: str, served: tuple[Path, list[list[int]]], tmp_path: Path
) -> None:
    directory, expected = served
    tensors = load_file(directory / "model.safetensors")
    found = [name for name in tensors if name.endswith(ending)]
    assert len(found) == 2
    for name in found:
        tensors[name].copy_(tensors[name].roll(7))
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    assert _tokens(tmp_path) != expected
