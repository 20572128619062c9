"""Which generation config counts."""

import json
from pathlib import Path

import pytest

from pagoda_common.config.checkpoint.generation_config import resolve_generation_config
from pagoda_common.config.engine_config import ModelConfig
from pagoda_common.config.frontend_config import FrontendConfig
from pagoda_common.errors import ConfigError

CHECKPOINT = '{"temperature": 0.6, "top_k": 20}'


def test_the_checkpoints_counts_unless_told_otherwise(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"top_p": 0.3}')

    def resolved(source: str, override: str = "", checkpoint: str = CHECKPOINT) -> object:
        return json.loads(resolve_generation_config(checkpoint, source=source, override=override))

    assert resolved("auto") == {"temperature": 0.6, "top_k": 20}
    assert resolved("auto", checkpoint="") == {}
    assert resolved("vllm") == {}
    assert resolved(str(tmp_path)) == {"top_p": 0.3}
    assert resolved("auto", '{"top_k": 5, "min_p": 0.1}') == {"temperature": 0.6, "top_k": 5, "min_p": 0.1}
    assert resolved("vllm", '{"top_k": 5}') == {"top_k": 5}


def test_a_directory_without_one_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"generation_config is .* a directory with a generation_config\.json"):
        resolve_generation_config(CHECKPOINT, source=str(tmp_path), override="")


@pytest.mark.parametrize("text", ["{", "[1]", "0.5", "null"])
def test_an_override_that_is_no_object_is_refused_at_once(text: str) -> None:
    for config in (ModelConfig, FrontendConfig):
        with pytest.raises(ConfigError, match="override_generation_config") as caught:
            config(override_generation_config=text)
        assert caught.value.field == "override_generation_config"
