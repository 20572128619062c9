"""What is wrong with a model or a file that lies on this machine, told before any process starts. Loads nothing."""

import json
from pathlib import Path
from typing import Any

from pagoda_common.config.engine_config import EngineConfig
from pagoda_common.config.model_files import resolve_model
from pagoda_common.errors import ConfigError, ModelLoadError


def check_early(engine: EngineConfig, *, tokenizer: str | None) -> None:
    """Check what is known at once; a model of the hub is left to its worker.

    Raises:
        ConfigError: the model is no directory and no hub id, has no readable config.json, or cannot be divided.
    """
    name, ranks = engine.model.model, engine.parallel.tensor_parallel_size
    try:
        path = resolve_model(name)
        resolve_model(tokenizer or name)
    except ModelLoadError as error:
        raise ConfigError(error.message, field=error.field) from error
    if not isinstance(path, Path):
        return
    config = _read_config(path, name)
    heads = config.get("num_attention_heads")
    if isinstance(heads, int) and heads % ranks:
        message = f"tensor_parallel_size is {ranks}, must divide the model's {heads} attention heads"
        raise ConfigError(message, field="tensor_parallel_size")


def _read_config(path: Path, name: str) -> dict[str, Any]:
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"model {name!r} has no config.json: it is no checkpoint", field="model") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {name!r}: its config.json cannot be read: {error}", field="model") from None
    if not isinstance(config, dict):
        raise ConfigError(f"model {name!r}: its config.json must hold an object", field="model")
    return config
