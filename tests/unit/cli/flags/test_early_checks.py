"""Errors that are known before any process starts."""

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pagoda.server import early_checks
from pagoda.server.early_checks import check_early
from pagoda.server.known_architectures import known_architectures
from pagoda_common.config.checkpoint.model_files import resolve_model
from pagoda_common.config.engine_config import EngineConfig, ModelConfig, ParallelConfig
from pagoda_common.errors import ConfigError
from pagoda_worker.models.registry import FAMILIES, TOKEN_VECTORS


def config(model: str | Path = "pagoda-tiny", ranks: int = 1, **options: Any) -> EngineConfig:
    parallel = ParallelConfig(tensor_parallel_size=ranks)
    return EngineConfig(model=ModelConfig(model=str(model), **options), parallel=parallel)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A copy of the embedded model's small files."""
    source = resolve_model("pagoda-tiny")
    assert isinstance(source, Path)
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, tmp_path)
    return tmp_path


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_what_is_right_or_not_known_passes(tmp_path: Path) -> None:
    check_early(config(), tokenizer=None)
    check_early(config("organisation/model", ranks=3), tokenizer="organisation/tokenizer")
    (tmp_path / "config.json").write_text("{}")
    check_early(config(tmp_path, ranks=5), tokenizer="organisation/tokenizer")


def test_a_directory_must_hold_a_readable_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a directory"):
        check_early(config(tmp_path / "absent"), tokenizer=None)
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        check_early(config(tmp_path), tokenizer=None)
    for text, message in (("{", "cannot be read"), ("[1]", "must hold an object")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=message):
            check_early(config(tmp_path), tokenizer=None)


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "some/base", "peft_type": "LORA"}')
    with pytest.raises(ConfigError, match=r"is an adapter and no model .*: serve its base model, 'some/base'"):
        check_early(config(tmp_path), tokenizer=None)


def test_ranks_must_divide_the_attention_heads() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size is 7, must divide the model's") as caught:
        check_early(config(ranks=7), tokenizer=None)
    assert caught.value.field == "tensor_parallel_size"


@pytest.mark.parametrize(
    ("values", "ranks", "message"),
    [
        ({"num_attention_heads": 8, "num_key_value_heads": 4}, 2, ""),
        ({"num_attention_heads": 8, "num_key_value_heads": 2}, 4, ""),
        ({"num_attention_heads": 12, "num_key_value_heads": 4}, 3, "must divide the model's 4 KV heads"),
        ({"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 101}, 4, "intermediate size, 101"),
        ({"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 101, "num_experts": 2}, 4, ""),
        ({"architectures": ["UnheardOfForCausalLM"]}, 1, "architecture, UnheardOfForCausalLM, is not supported"),
        ({"architectures": ["UnheardOf", "LlamaForCausalLM"]}, 1, ""),
        ({"architectures": []}, 1, ""),
    ],
)
def test_a_config_that_cannot_be_served_is_refused(
    checkpoint: Path, values: dict[str, Any], ranks: int, message: str
) -> None:
    change(checkpoint / "config.json", **{"intermediate_size": 96, **values})
    if not message:
        check_early(config(checkpoint, ranks=ranks), tokenizer=None)
        return
    with pytest.raises(ConfigError, match=message):
        check_early(config(checkpoint, ranks=ranks), tokenizer=None)


def test_a_model_that_transformers_knows_is_left_to_the_worker(checkpoint: Path) -> None:
    change(checkpoint / "config.json", intermediate_size=96, architectures=["HeliumForCausalLM"])
    check_early(config(checkpoint), tokenizer=None)
    check_early(config(checkpoint, model_impl="transformers"), tokenizer=None)
    with pytest.raises(ConfigError, match="architecture, HeliumForCausalLM, is not supported"):
        check_early(config(checkpoint, model_impl="pagoda"), tokenizer=None)


def test_a_model_of_an_installed_package_is_left_to_the_worker(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "packages" / "other-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[pagoda.models]\nUnheardOfForCausalLM = other:Model\n")
    monkeypatch.syspath_prepend(str(info.parent))
    change(checkpoint / "config.json", intermediate_size=96, architectures=["UnheardOfForCausalLM"])
    check_early(config(checkpoint, model_impl="pagoda"), tokenizer=None)


def test_the_names_of_architectures_are_those_of_the_worker() -> None:
    assert known_architectures() == set(FAMILIES) | set(TOKEN_VECTORS)


def test_a_context_longer_than_the_checkpoints_is_refused(checkpoint: Path) -> None:
    check_early(config(checkpoint, max_model_len=1024), tokenizer=None)
    check_early(config(checkpoint, max_model_len=-1), tokenizer=None)
    with pytest.raises(ConfigError, match="max_model_len is 1025, the model was made for 1024 tokens"):
        check_early(config(checkpoint, max_model_len=1025), tokenizer=None)
    change(checkpoint / "config.json", rope_scaling={"rope_type": "yarn", "factor": 4.0})
    check_early(config(checkpoint, max_model_len=1025), tokenizer=None)  # the worker knows


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(early_checks, "DRIVER_FILES", (str(tmp_path),))
    check_early(config(device="cuda"), tokenizer=None)
    monkeypatch.setattr(early_checks, "DRIVER_FILES", (str(tmp_path / "none"),))
    check_early(config(device="cpu"), tokenizer=None)
    with pytest.raises(ConfigError, match="device is 'cuda', but this machine has no driver"):
        check_early(config(device="cuda"), tokenizer=None)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("tokenizer.json", None, r"has no tokenizer\.json"),
        ("tokenizer.json", "{", r"tokenizer\.json cannot be read"),
        ("tokenizer_config.json", "[", r"tokenizer_config\.json is not valid JSON"),
        ("chat_template.jinja", "{% if %}", r"chat template in .* is not a Jinja template: line 1"),
    ],
)
def test_a_tokenizer_that_cannot_be_read_is_refused(
    checkpoint: Path, file: str, text: str | None, message: str
) -> None:
    if text is None:
        (checkpoint / file).unlink()
    else:
        (checkpoint / file).write_text(text)
    with pytest.raises(ConfigError, match=message):
        check_early(config(checkpoint), tokenizer=None)
    with pytest.raises(ConfigError, match=message):
        check_early(config(), tokenizer=str(checkpoint))
    check_early(config(checkpoint), tokenizer="pagoda-tiny")


def test_a_chat_template_that_is_none_is_refused(checkpoint: Path) -> None:
    (checkpoint / "chat_template.jinja").write_text("{% if %}")
    check_early(config(checkpoint), tokenizer=None, chat_template="{{ messages }}")
    for wrong, message in (("{% for %}", "chat_template is not a Jinja"), ("/nowhere.jinja", "cannot be read")):
        with pytest.raises(ConfigError, match=message) as caught:
            check_early(config(), tokenizer=None, chat_template=wrong)
        assert caught.value.field == "chat_template"


def test_nothing_large_is_imported_for_it() -> None:
    code = """import sys
import pagoda.cli
from pagoda.server.early_checks import check_early
from pagoda_common.config.engine_config import EngineConfig
check_early(EngineConfig(), tokenizer=None)
print([name for name in ("torch", "transformers", "pagoda_worker.models") if name in sys.modules])"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert ast.literal_eval(done.stdout) == []


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


@pytest.mark.parametrize(
    ("overrides", "asked", "message"),
    [
        ({"max_model_len": 1024}, None, ""),
        ({"max_model_len": 1025}, None, "max_model_len is 1025, the model was made for 1024 tokens"),
        ({"max_position_embeddings": 2048}, 2048, ""),
        ({"rope_parameters": YARN}, 4096, ""),
        ({"rope_parameters": YARN}, 4097, "max_model_len is 4097, the model was made for 4096 tokens"),
        ({"rope_parameters": YARN, "max_model_len": 4097}, None, "made for 4096 tokens"),
        ({"rope_parameters": YARN, "max_model_len": 4097}, 4096, ""),
        ({"architectures": ["BgeM3EmbeddingModel"]}, None, ""),
    ],
)
def test_overrides_are_checked_as_the_worker_will_read_them(
    checkpoint: Path, overrides: dict[str, Any], asked: int | None, message: str
) -> None:
    given = config(checkpoint, max_model_len=asked, hf_overrides=json.dumps(overrides))
    if not message:
        check_early(given, tokenizer=None)
        return
    with pytest.raises(ConfigError, match=message):
        check_early(given, tokenizer=None)
