"""Checkpoints that someone spoiled on purpose: one clear error, at once, and no file beside the checkpoint is read."""

import json
from pathlib import Path
from typing import Any

import pytest

from pagoda_common.config.checkpoint.model_files import resolve_model
from pagoda_common.config.engine_config import EMBEDDED_MODEL, ModelConfig
from pagoda_common.errors import ModelLoadError
from pagoda_worker.loader.build import ModelBuilder
from pagoda_worker.loader.checkpoint import INDEX_FILE, Checkpoint, open_checkpoint
from pagoda_worker.loader.config_bounds import check_config
from pagoda_worker.models.model import BuildConfig
from pagoda_worker.parallel.tensor_parallel import ALONE

TINY = Path(resolve_model(EMBEDDED_MODEL))
CONFIG: dict[str, Any] = json.loads((TINY / "config.json").read_text())


def write(directory: Path, config: Any) -> Path:
    (directory / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return directory


def build(directory: Path) -> None:
    checkpoint = open_checkpoint(ModelConfig(model=str(directory)))
    ModelBuilder(config=BuildConfig(checkpoint=checkpoint.config, engine=ModelConfig()), parallel=ALONE).build()


def test_the_embedded_model_is_within_bounds(tmp_path: Path) -> None:
    build(write(tmp_path, CONFIG))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_hidden_layers", 10**9),
        ("num_hidden_layers", 1e9),
        ("num_hidden_layers", "1000000000"),
        ("num_hidden_layers", float("inf")),
        ("num_hidden_layers", float("nan")),
        ("num_hidden_layers", {"a": 1}),
        ("vocab_size", 10**12),
        ("vocab_size", -(10**12)),
        ("hidden_size", 2**62),
        ("head_dim", 10**12),
        ("num_attention_heads", 10**9),
        ("num_key_value_heads", 10**9),
        ("intermediate_size", 10**15),
        ("moe_intermediate_size", 10**15),
        ("max_position_embeddings", 10**12),
        ("rope_theta", 2**70),
        ("num_experts", 10**9),
        ("n_layer", 10**9),
        ("n_embd", 10**9),
        ("altup_num_inputs", 10**9),
    ],
)
def test_an_absurd_number_is_named(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(ModelLoadError, match=f"^{name} is .* in config.json, must be"):
        open_checkpoint(ModelConfig(model=str(write(tmp_path, {**CONFIG, name: value}))))
    nested = {**CONFIG, "text_config": {name: value}}
    with pytest.raises(ModelLoadError, match=f"^{name} is"):
        check_config(nested)


def test_experts_of_all_layers_have_a_bound() -> None:
    check_config({"num_hidden_layers": 61, "n_routed_experts": 384})
    with pytest.raises(ModelLoadError, match="asks for 66560000 experts in all layers, must be at most 262144"):
        check_config({"num_hidden_layers": 1024, "num_local_experts": 65_000})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("architectures", "LlamaForCausalLM"),
        ("architectures", [["LlamaForCausalLM"]]),
        ("architectures", [{"a": "LlamaForCausalLM"}]),
        ("architectures", {"LlamaForCausalLM": 1}),
        ("architectures", [1]),
        ("architectures", 5),
        ("model_type", ["llama"]),
        ("model_type", {}),
        ("torch_dtype", {"a": 1}),
        ("dtype", [[]]),
    ],
)
def test_names_are_names(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(ModelLoadError, match=f"^{name} is .* in config.json, must be a"):
        open_checkpoint(ModelConfig(model=str(write(tmp_path, {**CONFIG, name: value}))))


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 0},
        {"hidden_size": -192},
        {"num_attention_heads": 0},
        {"num_key_value_heads": -2},
        {"num_hidden_layers": -1},
        {"head_dim": -32},
        {"vocab_size": 0},
        {"intermediate_size": -1},
        {"rope_theta": [1]},
        {"rope_scaling": 7},
        {"rope_scaling": {"type": {"a": 1}}},
        {"rope_scaling": {"rope_type": "yarn", "factor": "x"}},
        {"hidden_act": ["silu"]},
        {"hidden_act": {}},
        {"rms_norm_eps": "small"},
        {"layer_types": [[]]},
        {"sliding_window": {}},
        {"eos_token_id": [{}], "num_hidden_layers": None},
        {"quantization_config": 3, "hidden_size": None},
        {"architectures": []},
    ],
)
def test_what_makes_no_model_is_one_error(tmp_path: Path, changes: dict[str, Any]) -> None:
    directory = write(tmp_path, {**CONFIG, **changes} if "architectures" not in changes else {"architectures": []})
    said = ""
    try:
        build(directory)
    except ModelLoadError as error:
        said = error.message
    assert "\n" not in said


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a": ' * 100_000, "{}" + "x", "", "[1]", "null", '{"a": ' + "9" * 9999 + "}"]
)
def test_a_file_that_is_no_object_is_one_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        open_checkpoint(ModelConfig(model=str(write(tmp_path, text))))


def test_depth_and_number_of_values_have_bounds() -> None:
    deep: Any = 1
    for _ in range(40):
        deep = {"a": deep}
    with pytest.raises(ModelLoadError, match="nested more than 32 levels deep"):
        check_config(deep)
    with pytest.raises(ModelLoadError, match="more than 1000000 values"):
        check_config({"a": [0] * 1_000_001})


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".", "", 5, None, ["a"]]
)
def test_an_index_names_files_of_its_own_directory_alone(tmp_path: Path, name: Any) -> None:
    (tmp_path / "secret.safetensors").write_bytes(b"")
    directory = tmp_path / "model"
    directory.mkdir()
    index = {"weight_map": {"a.weight": "model-1.safetensors", "b.weight": name}}
    (directory / INDEX_FILE).write_text(json.dumps(index))
    checkpoint = Checkpoint(directory=directory, config={}, generation_config=None, generation_config_json="")
    with pytest.raises(ModelLoadError, match="must be files of the same directory"):
        checkpoint.weight_files()


@pytest.mark.parametrize("weight_map", [[], {}, None, 5, "model.safetensors", [["a"]]])
def test_an_index_without_a_map_is_one_error(tmp_path: Path, weight_map: Any) -> None:
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    checkpoint = Checkpoint(directory=tmp_path, config={}, generation_config=None, generation_config_json="")
    with pytest.raises(ModelLoadError, match="has no weight_map"):
        checkpoint.weight_files()
