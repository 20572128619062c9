"""Errors that are known before any process starts."""

from pathlib import Path

import pytest

from pagoda.server.early_checks import check_early
from pagoda_common.config.engine_config import EngineConfig, ModelConfig, ParallelConfig
from pagoda_common.errors import ConfigError


def config(model: str | Path = "pagoda-tiny", ranks: int = 1) -> EngineConfig:
    return EngineConfig(model=ModelConfig(model=str(model)), parallel=ParallelConfig(tensor_parallel_size=ranks))


def test_what_is_right_or_not_known_passes(tmp_path: Path) -> None:
    check_early(config(), tokenizer=None)
    check_early(config("organisation/model", ranks=3), tokenizer="organisation/tokenizer")
    (tmp_path / "config.json").write_text("{}")
    check_early(config(tmp_path, ranks=5), tokenizer=None)


def test_a_directory_must_hold_a_readable_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a directory"):
        check_early(config(tmp_path / "absent"), tokenizer=None)
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        check_early(config(tmp_path), tokenizer=None)
    for text, message in (("{", "cannot be read"), ("[1]", "must hold an object")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=message):
            check_early(config(tmp_path), tokenizer=None)


def test_ranks_must_divide_the_attention_heads() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size is 7, must divide the model's") as caught:
        check_early(config(ranks=7), tokenizer=None)
    assert caught.value.field == "tensor_parallel_size"
