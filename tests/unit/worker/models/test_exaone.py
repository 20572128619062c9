"""EXAONE 3: config.json, tensors and adapters as they are published, and as transformers names them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagoda_worker.models.registry import FAMILIES, architectures_of, find_family, is_foreign
from tests.checkpoints import make_checkpoint
from tests.peft_adapters import base_model, make_adapter, merged
from tests.unit.worker.driver import Driver
from tests.unit.worker.lora.peft_check import CONFIG, check
from tests.unit.worker.models.reference import NUM_TOKENS, make_prompts, open_reference

NAME = "ExaoneForCausalLM"
PUBLISHED: dict[str, Any] = {
    "activation_function": "silu",
    "architectures": [NAME],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "embed_dropout": 0.0,
    "eos_token_id": 361,
    "head_dim": 80,
    "hidden_size": 2560,
    "initializer_range": 0.02,
    "intermediate_size": 7168,
    "layer_norm_epsilon": 1e-05,
    "max_position_embeddings": 32768,
    "model_type": "exaone",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_layers": 30,
    "pad_token_id": 0,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "use_cache": True,
    "vocab_size": 102400,
}
"""In the form of 3.5."""
MODULES = {
    "transformer.wte.": "model.embed_tokens.",
    "transformer.ln_f.": "model.norm.",
    "transformer.h.": "model.layers.",
    ".attn.attention.out_proj.": ".self_attn.o_proj.",
    ".attn.attention.": ".self_attn.",
    ".ln_1.": ".input_layernorm.",
    ".ln_2.": ".post_attention_layernorm.",
    ".mlp.c_fc_0.": ".mlp.gate_proj.",
    ".mlp.c_fc_1.": ".mlp.up_proj.",
    ".mlp.c_proj.": ".mlp.down_proj.",
}
"""Published parts of names, and those of transformers' modules, in the order in which they are replaced."""


def renamed(path: Path, names: dict[str, str]) -> list[str]:
    """Replace parts of the names of a file's tensors; returns the new names."""
    tensors = dict[str, torch.Tensor]()
    for name, tensor in load_file(path).items():
        for old, new in names.items():
            name = name.replace(old, new)
        tensors[name] = tensor
    save_file(tensors, path, {"format": "pt"})
    return list(tensors)


@pytest.mark.parametrize("architectures", [[NAME], ["LlamaForCausalLM"], []])
def test_every_name_of_the_architecture_is_the_family(architectures: list[str]) -> None:
    config = PUBLISHED | {"architectures": architectures}
    assert architectures_of(config) == [NAME]
    assert find_family(config) is FAMILIES[NAME]
    assert not is_foreign(config)


def test_the_published_config_is_understood() -> None:
    spec = FAMILIES[NAME].spec(PUBLISHED)
    assert (spec.num_layers, spec.head_dim, spec.max_position_embeddings) == (30, 80, 32768)
    assert (spec.norm_eps, spec.activation, spec.tie_word_embeddings) == (1e-5, "silu", True)
    assert spec.rope is not None
    assert (spec.rope.rope_type, spec.rope.theta) == ("llama3", 1000000.0)


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("names", [{}, MODULES], ids=["published", "modules"])
def test_both_forms_give_the_tokens_of_transformers(names: dict[str, str], is_tied: bool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"attention_bias": False, "mlp_bias": False, "rms_norm_eps": 1e-3}
    reference = open_reference(tmp_path, NAME, tie_word_embeddings=is_tied, **options)
    written = json.loads((tmp_path / "config.json").read_text())
    rope = dict(written["rope_parameters"])
    config = {name: written[name] for name in PUBLISHED if name in written} | {
        "architectures": [NAME],
        "num_layers": written["num_hidden_layers"],
        "layer_norm_epsilon": written["rms_norm_eps"],
        "activation_function": written["hidden_act"],
        "rope_theta": rope.pop("rope_theta"),
        "rope_scaling": rope,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = renamed(tmp_path / "model.safetensors", names)
    assert ("model.layers.0.self_attn.q_proj.weight" in found) == bool(names)
    sequences = Driver(tmp_path).generate(make_prompts(), max_tokens=NUM_TOKENS)
    assert [sequence.output for sequence in sequences] == reference.outputs


def test_an_adapter_may_have_the_published_names(tmp_path: Path) -> None:
    make_checkpoint(NAME, tmp_path / "model")
    adapter = make_adapter(tmp_path / "model", tmp_path / "adapter")
    expected = merged(tmp_path / "model", adapter)
    found = renamed(adapter / "adapter_model.safetensors", {new: old for old, new in MODULES.items()})
    assert "base_model.model.transformer.h.0.attn.attention.out_proj.lora_A.weight" in found
    path = adapter / "adapter_config.json"
    modules = ["q_proj", "k_proj", "v_proj", "out_proj", "c_fc_0", "c_fc_1", "c_proj"]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"target_modules": modules}))
    driver = Driver(tmp_path / "model", lora=CONFIG, max_logprobs=-1)
    driver.load_adapter(1, adapter)
    check(driver, expected, 1)
    check(driver, base_model(tmp_path / "model"), 0)
