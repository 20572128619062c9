"""Checkpoints whose embeddings are made in another way than ours are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from pagoda_common.config.engine_config import ModelConfig
from pagoda_common.errors import ModelLoadError
from pagoda_worker.loader.checkpoint import open_checkpoint

PREFIX = "sentence_transformers.models."
SWITCHES = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")


def open_with(directory: Path, *, pooling: Any = None, modules: Any = None) -> None:
    (directory / "config.json").write_text("{}")
    if pooling is not None:
        (directory / "1_Pooling").mkdir()
        (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    if modules is not None:
        (directory / "modules.json").write_text(json.dumps(modules))
    open_checkpoint(ModelConfig(model=str(directory)))


def switches(*on: str) -> dict[str, Any]:
    names = {f"pooling_mode_{name}": name in on for name in SWITCHES}
    return {"word_embedding_dimension": 64, "include_prompt": True, **names}


@pytest.mark.parametrize(
    ("pooling", "told"),
    [
        (switches("mean_tokens"), "pooling mean,"),
        (switches("cls_token"), "pooling cls,"),
        (switches("lasttoken", "max_tokens"), r"pooling max\+lasttoken,"),
        ({"pooling_mode": "mean"}, "pooling mean,"),
    ],
)
def test_another_pooling_than_the_last_token_is_refused(pooling: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=rf"1_Pooling/config.json asks for {told}"):
        open_with(tmp_path, pooling=pooling)


@pytest.mark.parametrize("pooling", [None, switches("lasttoken"), {"pooling_mode": "lasttoken"}, switches()])
def test_the_last_token_is_taken(pooling: dict[str, Any] | None, tmp_path: Path) -> None:
    names = ("Transformer", "Pooling", "Normalize")
    paths = ("", "1_Pooling", "2_Normalize")
    modules = [{"idx": 0, "path": path, "type": PREFIX + name} for name, path in zip(names, paths, strict=True)]
    open_with(tmp_path, pooling=pooling, modules=modules)


def test_a_pooling_in_another_folder_is_found(tmp_path: Path) -> None:
    (tmp_path / "pool").mkdir()
    (tmp_path / "pool" / "config.json").write_text(json.dumps(switches("mean_tokens")))
    with pytest.raises(ModelLoadError, match=r"pool/config.json asks for pooling mean"):
        open_with(tmp_path, modules=[{"path": "pool", "type": PREFIX + "Pooling"}])


def test_a_module_behind_the_pooling_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"modules.json has a module of type 'sentence_transformers.models.Dense'"):
        open_with(tmp_path, pooling=switches("lasttoken"), modules=[{"path": "2_Dense", "type": PREFIX + "Dense"}])
