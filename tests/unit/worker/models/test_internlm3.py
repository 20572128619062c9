"""InternLM3: config.json as it is published and as transformers writes it, and biases that transformers refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from pagoda_worker.models.registry import FAMILIES, architectures_of, find_family, is_foreign
from tests.checkpoints import CONFIGS
from tests.unit.worker.driver import Driver
from tests.unit.worker.models.reference import NUM_TOKENS, make_prompts, open_reference

NAME = "InternLM3ForCausalLM"
PUBLISHED: dict[str, Any] = {
    "architectures": [NAME],
    "attention_dropout": 0.0,
    "bias": False,
    "bos_token_id": 1,
    "eos_token_id": [2, 128131],
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 10240,
    "max_position_embeddings": 32768,
    "model_type": "internlm3",
    "num_attention_heads": 32,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "pad_token_id": 2,
    "qkv_bias": False,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 6.0, "rope_type": "dynamic"},
    "rope_theta": 50000000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 128512,
}
"""Of the 8B model."""


def as_published(directory: Path, **options: Any) -> None:
    """Have a checkpoint's config.json say what it says in the published form."""
    path = directory / "config.json"
    written = json.loads(path.read_text())
    rope = dict(written.pop("rope_parameters"))
    kept = {name: written[name] for name in PUBLISHED if name in written}
    theta = {"rope_theta": rope.pop("rope_theta")}
    path.write_text(json.dumps(kept | theta | {"architectures": [NAME], "rope_scaling": rope} | options))


@pytest.mark.parametrize("architectures", [[NAME], ["LlamaForCausalLM"], []])
def test_every_name_of_the_architecture_is_the_family(architectures: list[str]) -> None:
    config = PUBLISHED | {"architectures": architectures}
    assert architectures_of(config) == [NAME]
    assert find_family(config) is FAMILIES[NAME]
    assert not is_foreign(config)


def test_other_heads_keep_their_architecture() -> None:
    assert architectures_of({"architectures": ["LlamaForSequenceClassification"], "model_type": "internlm3"}) == [
        "LlamaForSequenceClassification"
    ]


def test_the_published_config_is_understood() -> None:
    spec = FAMILIES[NAME].spec(PUBLISHED)
    assert (spec.num_layers, spec.num_kv_heads, spec.head_dim, spec.max_position_embeddings) == (48, 2, 128, 32768)
    assert spec.rope is not None
    assert (spec.rope.rope_type, spec.rope.theta) == ("dynamic", 50000000.0)
    assert (spec.qkv_bias, spec.o_bias, spec.mlp_bias) == (False, False, False)


def test_the_published_form_gives_the_tokens_of_transformers(tmp_path: Path) -> None:
    reference = open_reference(tmp_path, NAME)
    as_published(tmp_path, bias=True, qkv_bias=True)
    sequences = Driver(tmp_path).generate(make_prompts(), max_tokens=NUM_TOKENS)
    assert [sequence.output for sequence in sequences] == reference.outputs


def test_biases_of_q_k_and_v_alone_are_those_of_qwen2(tmp_path: Path) -> None:
    """Which transformers computes so; of InternLM3 it refuses them."""
    theta = {"rope_type": "default", "rope_theta": 50000.0}
    sizes = CONFIGS[NAME][1] | {"rope_parameters": theta, "rms_norm_eps": 1e-5}
    shared = {name: sizes[name] for name in sizes if name not in ("attention_bias", "mlp_bias")}
    reference = open_reference(tmp_path, "Qwen2ForCausalLM", **shared, use_sliding_window=False)
    as_published(tmp_path, model_type="internlm3", bias=False, qkv_bias=True, head_dim=16)
    sequences = Driver(tmp_path).generate(make_prompts(), max_tokens=NUM_TOKENS)
    assert [sequence.output for sequence in sequences] == reference.outputs
