"""Checkpoints that cannot be served are refused at once, and the message names what is wrong."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagoda_common.config.engine_config import EngineConfig, ModelConfig
from pagoda_common.errors import ConfigError, ModelLoadError
from pagoda_worker.loader.checkpoint import open_checkpoint
from pagoda_worker.memory.device import SMALL_MODEL_BYTES, choose_dtype, quantizes_inputs
from pagoda_worker.worker import Worker
from tests.checkpoints import ARCHITECTURES, make_checkpoint


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("LlamaForCausalLM", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def checkpoint(original: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    for path in original.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def load(directory: Path | str, **options: Any) -> Worker:
    worker = Worker(num_threads=1)
    worker.init_device(EngineConfig(model=ModelConfig(model=str(directory), device="cpu", **options)))
    worker.load_model(lambda loaded, total: None)
    return worker


def refused(directory: Path | str, *fragments: str, **options: Any) -> None:
    with pytest.raises(ModelLoadError) as raised:
        load(directory, **options)
    for fragment in fragments:
        assert fragment in raised.value.message


def change_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))


def change_tensors(directory: Path, **changes: torch.Tensor | None) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, path)


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "nowhere", "is not a directory")


def test_a_directory_without_config_is_refused(checkpoint: Path) -> None:
    (checkpoint / "config.json").unlink()
    refused(checkpoint, "has no config.json")


@pytest.mark.parametrize("text", ["{", "[]", "\x00"])
def test_a_damaged_config_is_refused(checkpoint: Path, text: str) -> None:
    (checkpoint / "config.json").write_text(text)
    refused(checkpoint, "config.json")


def test_an_unsupported_architecture_is_answered_with_the_supported_ones(checkpoint: Path) -> None:
    change_config(checkpoint, architectures=["T5ForConditionalGeneration"])
    refused(checkpoint, "T5ForConditionalGeneration", *ARCHITECTURES, model_impl="pagoda")
    name = "T5ForConditionalGeneration"
    refused(checkpoint, f"cannot run {name} here: the causal language model of model_type 'llama' is LlamaForCausalLM")


def test_a_config_without_a_needed_value_is_refused(checkpoint: Path) -> None:
    change_config(checkpoint, hidden_size=...)
    refused(checkpoint, "config.json has no hidden_size")


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"rope_parameters": {"rope_type": "axial", "rope_theta": 1e4}}, "'axial' is not supported"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8}}, "needs low_freq_factor"),
        ({"hidden_act": "mish"}, "'mish' is not supported"),
        ({"num_key_value_heads": 3}, "cannot share 3 KV heads"),
        ({"num_hidden_layers": 0}, "num_layers is 0"),
        ({"quantization_config": {"quant_method": "quark"}}, "quantized with 'quark', must be one of awq, gptq"),
    ],
)
def test_options_that_cannot_be_run_are_refused(checkpoint: Path, changes: dict[str, Any], fragment: str) -> None:
    change_config(checkpoint, **changes)
    refused(checkpoint, fragment)


def test_missing_and_unexpected_tensors_are_named(checkpoint: Path) -> None:
    change_tensors(
        checkpoint,
        **{"model.layers.1.self_attn.k_proj.weight": None, "model.layers.7.extra.weight": torch.zeros(2)},
    )
    refused(
        checkpoint,
        "missing tensors: model.layers.1.self_attn.k_proj.weight",
        "unexpected tensors: model.layers.7.extra.weight",
    )


def test_tensors_of_the_wrong_shape_are_named_with_both_shapes(checkpoint: Path) -> None:
    change_tensors(checkpoint, **{"model.layers.0.mlp.up_proj.weight": torch.zeros(3, 64)})
    refused(checkpoint, "model.layers.0.mlp.up_proj.weight has shape [3, 64], must be [112, 64]")


def test_a_config_of_another_size_is_refused(checkpoint: Path) -> None:
    change_config(checkpoint, num_hidden_layers=40)
    refused(checkpoint, "missing tensors: model.layers.3.", "more")


@pytest.mark.parametrize("damage", ["truncate", "scribble", "empty"])
def test_damaged_weights_are_refused(checkpoint: Path, damage: str) -> None:
    path = checkpoint / "model.safetensors"
    content = path.read_bytes()
    damaged = {"truncate": content[:-100], "scribble": b"\xff" * 64 + content[64:], "empty": b""}
    path.write_bytes(damaged[damage])
    refused(checkpoint, "cannot read", "model.safetensors")


def test_pickled_weights_are_not_read(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    refused(checkpoint, "no *.safetensors", "pytorch_model.bin")


def test_a_sharded_checkpoint_gives_the_same_weights(checkpoint: Path, original: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, checkpoint / file)
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    sharded, whole = load(checkpoint), load(original)
    assert sharded._model is not None
    assert whole._model is not None
    for (name, one), (_, other) in zip(sharded._model.named_parameters(), whole._model.named_parameters(), strict=True):
        assert torch.equal(one, other), name
    (checkpoint / "model-00002-of-00002.safetensors").unlink()
    refused(checkpoint, "files that are not there: model-00002-of-00002.safetensors")


def test_harmless_extra_tensors_are_ignored(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    change_tensors(checkpoint, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})
    load(checkpoint)
    gpt2 = make_checkpoint("GPT2LMHeadModel", tmp_path_factory.mktemp("gpt2"))
    tensors = load_file(gpt2 / "model.safetensors")
    # The form of the original GPT-2 files: no prefix, attention masks, the tied head written out.
    plain = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    plain |= {"h.0.attn.bias": torch.ones(1, 1, 8, 8), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    save_file(plain | {"lm_head.weight": tensors["transformer.wte.weight"].clone()}, gpt2 / "model.safetensors")
    load(gpt2)


def test_a_context_longer_than_the_checkpoints_is_a_config_error(original: Path) -> None:
    with pytest.raises(ConfigError, match="max_model_len is 513, the model was made for 512 tokens") as raised:
        load(original, max_model_len=513)
    assert raised.value.field == "max_model_len"
    facts = load(original, max_model_len=100).facts
    assert facts is not None
    assert facts.max_model_len == 100


def test_yarn_stretches_the_context(checkpoint: Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 512}
    change_config(checkpoint, rope_parameters=rope)
    facts = load(checkpoint).facts
    assert facts is not None
    assert facts.max_model_len == 1024
    with pytest.raises(ConfigError, match="max_model_len is 1025, the model was made for 1024 tokens"):
        load(checkpoint, max_model_len=1025)


def test_rope_is_read_in_the_form_before_transformers_5(checkpoint: Path) -> None:
    new = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}
    change_config(checkpoint, rope_parameters=new)
    current = load(checkpoint)
    change_config(checkpoint, rope_parameters=..., rope_theta=500.0, rope_scaling={"type": "linear", "factor": 2.0})
    before = load(checkpoint)
    assert current._model is not None
    assert before._model is not None
    assert before._model.spec.rope == current._model.spec.rope


@pytest.mark.parametrize(
    ("asked", "stored", "device", "num_parameters", "expected"),
    [
        ("auto", "bfloat16", "cpu", 10**6, torch.float32),
        ("auto", "bfloat16", "cpu", 10**10, torch.bfloat16),
        ("auto", "bfloat16", "cpu", SMALL_MODEL_BYTES // 4, torch.float32),
        ("auto", "bfloat16", "cpu", SMALL_MODEL_BYTES // 4 + 1, torch.bfloat16),
        ("auto", "bfloat16", "cuda", 10**6, torch.bfloat16),
        ("auto", "float16", "cuda", 10**6, torch.float16),
        ("auto", "float32", "cuda", 10**10, torch.float32),
        ("auto", None, "cpu", 10**10, torch.float32),
        ("bfloat16", "float32", "cpu", 10**6, torch.bfloat16),
    ],
)
def test_the_data_type(asked: Any, stored: str | None, device: str, num_parameters: int, expected: torch.dtype) -> None:
    chosen = choose_dtype(asked, stored, device=torch.device(device), num_parameters=num_parameters)
    assert chosen == expected


@pytest.mark.parametrize(
    ("asked", "dtype", "device", "expected"),
    [
        ("auto", torch.bfloat16, "cpu", True),
        ("none", torch.bfloat16, "cpu", False),
        ("auto", torch.float32, "cpu", False),
        ("auto", torch.float16, "cpu", False),
        ("auto", torch.bfloat16, "cuda", False),
    ],
)
def test_inputs_are_quantized_in_bfloat16_on_a_cpu(asked: Any, dtype: torch.dtype, device: str, expected: bool) -> None:
    assert quantizes_inputs(asked, dtype, torch.device(device)) is expected


def test_dummy_weights_need_no_files_and_follow_the_seed(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()

    def embedding(seed: int) -> torch.Tensor:
        model = load(checkpoint, load_format="dummy", seed=seed)._model
        assert model is not None
        return model.embed_tokens.weight

    assert torch.equal(embedding(1), embedding(1))
    assert not torch.equal(embedding(1), embedding(2))


@pytest.mark.parametrize(
    ("asked", "expected"),
    [("auto", "float32"), ("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16")],
)
def test_weights_are_cast(original: Path, asked: str, expected: str) -> None:
    worker = load(original, dtype=asked)
    assert worker.facts is not None
    assert worker._model is not None
    assert worker.facts.dtype == expected
    held = {str(parameter.dtype) for parameter in worker._model.parameters()}
    assert held - {"torch.uint8"} == {f"torch.{expected}"}, "but for matrices that are compressed"


def test_the_tokenizers_end_token_counts_beside_the_configs(checkpoint: Path) -> None:
    change_config(checkpoint, eos_token_id=257)
    decoder = {"259": {"content": "<|end|>", "special": True}}
    told = {"eos_token": "<|end|>", "added_tokens_decoder": decoder}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(told))
    assert open_checkpoint(ModelConfig(model=str(checkpoint))).eos_token_ids == [257, 259]


def test_without_an_index_the_usual_file_is_read_alone(checkpoint: Path) -> None:
    (checkpoint / "consolidated.safetensors").write_bytes(b"the same weights by other names")
    files = open_checkpoint(ModelConfig(model=str(checkpoint))).weight_files()
    assert [path.name for path in files] == ["model.safetensors"]


def test_end_tokens_are_those_of_both_configs(checkpoint: Path) -> None:
    change_config(checkpoint, eos_token_id=257)
    (checkpoint / "generation_config.json").write_text('{"eos_token_id": [2, 5], "temperature": 0.5}')
    opened = open_checkpoint(ModelConfig(model=str(checkpoint)))
    assert opened.eos_token_ids == [2, 5, 257]
    (checkpoint / "generation_config.json").unlink()
    assert open_checkpoint(ModelConfig(model=str(checkpoint))).generation_config_json == ""


def test_progress_ends_at_all_bytes(original: Path) -> None:
    worker = Worker(num_threads=1)
    worker.init_device(EngineConfig(model=ModelConfig(model=str(original), device="cpu")))
    seen: list[tuple[int, int]] = []
    facts = worker.load_model(lambda loaded, total: seen.append((loaded, total)))
    assert seen == sorted(seen)
    assert seen[-1] == (facts.weight_bytes, facts.weight_bytes)
