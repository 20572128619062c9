"""A model that is no directory is fetched from the hub: files of these names alone, in the revision that was asked."""

from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from pagoda_common.config.engine_config import ModelConfig
from pagoda_common.errors import ModelLoadError
from pagoda_worker.loader import checkpoint as module
from pagoda_worker.loader.checkpoint import open_checkpoint

NAMES = (
    "config.json",
    "modules.json",
    "model.safetensors",
    "1_Pooling/config.json",
    "pytorch_model.bin",
    "onnx/a.onnx",
)
USED = {"config.json", "modules.json", "model.safetensors", "1_Pooling/config.json"}


class Hub:
    """Has one model; remembers which files of it were fetched, and in which revision."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.fetched: set[str] = set()
        self.revisions: list[str | None] = []

    def snapshot_download(self, name: str, *, revision: str | None, allow_patterns: tuple[str, ...] = ("*",)) -> str:
        if name != "org/model":
            raise ValueError("no such repository\nwith more")
        self.revisions.append(revision)
        self.fetched = {name for name in NAMES if any(fnmatch(name, pattern) for pattern in allow_patterns)}
        self._folder.joinpath("config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
        return str(self._folder)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    made = Hub(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", made.snapshot_download)
    monkeypatch.setattr(module, "resolve_model", lambda name: name)
    return made


@pytest.mark.parametrize(
    ("options", "fetched"),
    [({}, USED), ({"load_format": "dummy"}, USED - {"model.safetensors"})],
)
def test_files_that_are_read_are_fetched(options: dict[str, Any], fetched: set[str], hub: Hub) -> None:
    found = open_checkpoint(ModelConfig(model="org/model", revision="r", **options))
    assert found.config["architectures"] == ["LlamaForCausalLM"]
    assert (hub.fetched, hub.revisions) == (fetched, ["r"])


def test_a_model_that_the_hub_does_not_have_is_named(hub: Hub) -> None:
    reason = "model 'org/none' is neither a directory nor could it be fetched from the hub: ValueError: no such repos"
    with pytest.raises(ModelLoadError, match=f"^{reason}itory$"):
        open_checkpoint(ModelConfig(model="org/none"))
