"""Llama 4: what config.json may say, what each option does, and where its tensors lie."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from pagoda_common.errors import ConfigError, ModelLoadError
from pagoda_worker.models.decoder import attention_layers
from pagoda_worker.models.registry import FAMILIES, Family, find_family
from pagoda_worker.models.spec import DecoderSpec, TemperatureSpec
from tests.checkpoints import make_checkpoint
from tests.unit.worker.driver import Driver
from tests.unit.worker.models.reference import NUM_TOKENS, make_prompts, open_reference

LLAMA4, MULTIMODAL = "Llama4ForCausalLM", "Llama4ForConditionalGeneration"
LENGTHS = (5, 40, 90)
SCOUT: dict[str, Any] = {
    "architectures": [MULTIMODAL],
    "boi_token_index": 200080,
    "eoi_token_index": 200081,
    "image_token_index": 200092,
    "model_type": "llama4",
    "text_config": {
        "_attn_implementation_autoset": True,
        "attention_bias": False,
        "attention_chunk_size": 8192,
        "attention_dropout": 0.0,
        "attn_scale": 0.1,
        "attn_temperature_tuning": 4,
        "cache_implementation": "hybrid",
        "eos_token_id": [200001, 200007, 200008],
        "floor_scale": 8192,
        "for_llm_compressor": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "interleave_moe_layer_step": 1,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "max_position_embeddings": 10485760,
        "model_type": "llama4_text",
        "no_rope_layers": [],
        "num_attention_heads": 40,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "num_local_experts": 16,
        "output_router_logits": False,
        "pad_token_id": 200018,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 16.0,
            "high_freq_factor": 1.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_qk_norm": True,
        "vocab_size": 202048,
    },
    "vision_config": {"hidden_size": 1408},
}
"""As it is published."""


def scout(**options: Any) -> dict[str, Any]:
    return SCOUT | {"text_config": SCOUT["text_config"] | options}


def test_scout_as_it_is_published() -> None:
    family = find_family(SCOUT)
    assert family is not None
    spec = family.spec(SCOUT)
    assert [spec.layer_rope(layer) is None for layer in range(5)] == [False, False, False, True, False]
    assert [spec.chunk(layer) for layer in range(4)] == [8192, 8192, 8192, None]
    assert [spec.layer_qk_norm(layer) for layer in range(4)] == ["plain", "plain", "plain", None]
    assert spec.temperature == TemperatureSpec(step=8192, scale=0.1)
    assert spec.moe is not None
    assert all(spec.moe.is_sparse(layer) for layer in range(48))
    assert (spec.moe.intermediate_size, spec.intermediate_size) == (8192, 16384)


def test_maverick_has_experts_in_every_other_layer_and_no_norms() -> None:
    spec = FAMILIES[MULTIMODAL].spec(scout(interleave_moe_layer_step=2, use_qk_norm=False, num_local_experts=128))
    assert spec.qk_norm is None
    assert [spec.layer_moe(layer) is not None for layer in range(4)] == [False, True, False, True]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer_types": ["chunked_attention"] * 3}, "layer_types must be chunked_attention or full_attention"),
        ({"layer_types": ["sliding_attention"] * 48}, "layer_types must be chunked_attention or full_attention"),
        ({"layer_types": ["chunked_attention"] * 48, "attention_chunk_size": None}, "attention_chunk_size is None"),
        ({"attention_chunk_size": 0}, "attention_chunk_size is 0, must be at least 1"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers has 2 entries for 48 layers"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type yarn makes queries longer"),
        ({"sliding_window": 100}, "sliding_window"),
    ],
)
def test_what_would_compute_something_else_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        FAMILIES[MULTIMODAL].spec(scout(**options))


def test_without_chunks_all_layers_see_all() -> None:
    assert FAMILIES[MULTIMODAL].spec(scout(attention_chunk_size=None)).chunks == ()


def _moe(**options: Any) -> Callable[[DecoderSpec], DecoderSpec]:
    return lambda spec: replace(spec, moe=replace(spec.moe, **options))  # type: ignore[type-var]  # it is there


SPOILT: dict[str, Callable[[DecoderSpec], DecoderSpec]] = {
    "chunks": lambda spec: replace(spec, chunks=()),
    "size of chunks": lambda spec: replace(spec, chunks=(64, None, 64)),
    "a window in place of chunks": lambda spec: replace(spec, chunks=(), windows=spec.chunks),
    "norms": lambda spec: replace(spec, qk_norm=None),
    "layers without positions": lambda spec: replace(spec, layer_ropes=()),
    "pairs of rotations": lambda spec: _rotated(spec, is_interleaved=False),
    "scaling of rotations": lambda spec: _rotated(spec, rope_type="default", parameters=()),
    "temperature": lambda spec: replace(spec, temperature=None),
    "steps of the temperature": lambda spec: replace(spec, temperature=TemperatureSpec(step=64, scale=0.4)),
    "scale of the temperature": lambda spec: replace(spec, temperature=TemperatureSpec(step=16, scale=0.1)),
    "where the router's weight is": _moe(scales_input=False),
    "sigmoid": _moe(scoring="softmax"),
    "normalised weights": _moe(is_normalized=True),
    "experts of a token": _moe(num_experts_per_token=2),
}
"""An option as it should not be."""


def _rotated(spec: DecoderSpec, **options: Any) -> DecoderSpec:
    ropes = tuple(None if rope is None else replace(rope, **options) for rope in spec.layer_ropes)
    return replace(spec, rope=ropes[0], layer_ropes=ropes)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A checkpoint, and its tokens, which test_exactness holds against transformers'."""
    directory = make_checkpoint(LLAMA4, tmp_path_factory.mktemp("checkpoint"))
    return directory, _tokens(directory)


def _tokens(directory: Path, **options: Any) -> list[list[int]]:
    sequences = Driver(directory, **options).generate(make_prompts(LENGTHS), max_tokens=16, chunk=48)
    return [one.output for one in sequences]


@pytest.mark.parametrize("name", SPOILT)
def test_every_option_changes_tokens(
    name: str, served: tuple[Path, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, expected = served
    family, spoil = FAMILIES[LLAMA4], SPOILT[name]
    monkeypatch.setitem(FAMILIES, LLAMA4, Family(lambda config: spoil(family.read(config)), family.names))
    assert _tokens(directory) != expected


VARIANTS: dict[str, dict[str, Any]] = {
    "two experts a token, in every layer, and biases": {
        "num_experts_per_tok": 2,
        "moe_layers": None,
        "attention_bias": True,
    },
    "no norms, no temperature, no chunks": {
        "use_qk_norm": False,
        "attn_temperature_tuning": False,
        "attention_chunk_size": None,
    },
    "chunks and a temperature in layers of the other kind": {
        "layer_types": ["full_attention", "chunked_attention", "chunked_attention"],
        "no_rope_layers": [0, 0, 1],
        "attention_chunk_size": 48,
    },
    "no experts, tied": {"moe_layers": [], "tie_word_embeddings": True},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_equal_transformers(name: str, tmp_path: Path) -> None:
    reference = open_reference(tmp_path, LLAMA4, **VARIANTS[name])
    sequences = reference.driver.generate(make_prompts(), max_tokens=NUM_TOKENS, chunk=100)
    assert [sequence.output for sequence in sequences] == reference.outputs


def test_experts_that_are_stored_one_by_one(served: tuple[Path, list[list[int]]], tmp_path: Path) -> None:
    directory, expected = served
    tensors = load_file(directory / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        place, _, leaf = name.rpartition(".")
        for index, expert in enumerate(tensors.pop(name)):
            parts = dict(zip(("gate_proj", "up_proj"), expert.t().chunk(2), strict=True))
            for part, rows in parts.items() if leaf == "gate_up_proj" else [(leaf, expert.t())]:
                tensors[f"{place}.{index}.{part}.weight"] = rows.contiguous()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    assert _tokens(tmp_path) == expected


def test_blocks_before_a_chunk_go_to_others(served: tuple[Path, list[list[int]]]) -> None:
    directory, expected = served
    driver = Driver(directory)
    assert [group.window for group in driver.groups] == [None, 32, 32]
    sequences = driver.generate(make_prompts(LENGTHS), max_tokens=16, chunk=48)
    assert [one.output for one in sequences] == expected
    assert driver.num_reused > 0


def test_a_scheduler_that_knows_no_groups_gets_the_same_tokens(served: tuple[Path, list[list[int]]]) -> None:
    directory, expected = served
    assert _tokens(directory, by_groups=False) == expected


def test_blocks_that_do_not_divide_a_chunk_are_refused(served: tuple[Path, list[list[int]]]) -> None:
    directory, _ = served
    with pytest.raises(ConfigError, match="block_size is 12, must divide the model's attention_chunk_size, 32"):
        Driver(directory, block_size=12)
    short = Driver(directory, block_size=12, max_model_len=32)  # no sequence leaves its first chunk
    assert len(short.groups) == 1


def test_layers_say_what_they_see(served: tuple[Path, list[list[int]]]) -> None:
    directory, _ = served
    layers = attention_layers(FAMILIES[LLAMA4].spec(json.loads((directory / "config.json").read_text())))
    assert [(layer.window, layer.chunk) for layer in layers] == [(None, 32), (None, None), (None, 32)]
