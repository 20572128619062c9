"""Finds what is wrong with a model or a file on this machine before any process starts. Loads nothing.

What is looked at here is looked at again, and more closely, by the service that needs it: where a fact is not plain,
nothing is refused here.
"""

import json
import os
from pathlib import Path
from typing import Any

from pagoda.server.known_architectures import installed_architectures, known_architectures, transformers_may_know
from pagoda_common.config.checkpoint.generation_config import parse_object
from pagoda_common.config.checkpoint.model_files import resolve_model, why_no_config
from pagoda_common.config.engine_config import EngineConfig
from pagoda_common.errors import ConfigError, ModelLoadError

MAX_TOKENIZER_BYTES = 16 << 20
"""A larger tokenizer.json is not read here: that would take a second."""
DRIVER_FILES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/kfd", "/proc/driver/nvidia/version")
"""One of them is there where a GPU can be used."""


def check_early(engine: EngineConfig, *, tokenizer: str | None, chat_template: str | None = None) -> None:
    """Check what is known at once of a server's model; a model of the hub is left to its worker.

    Args:
        tokenizer: directory or hub id, where it is not the model's.
        chat_template: file or text of --chat-template.

    Raises:
        ConfigError: as `check_model`; the tokenizer cannot be read, or a chat template is not Jinja.
    """
    check_model(engine)
    if chat_template is not None:
        _check_template_flag(chat_template)
    if isinstance(path := _resolved(tokenizer or engine.model.model), Path):
        field = "tokenizer" if tokenizer else "model"
        _check_tokenizer(path, field=field, needs_template=chat_template is None)


def check_model(engine: EngineConfig) -> None:
    """Check what is known at once of an engine's model.

    Raises:
        ConfigError: the model is no directory and no hub id; its config.json cannot be read; it is of no known
            architecture; it cannot be divided; its context is shorter than asked for; or there is no such device.
            `field` names the flag.
    """
    name = engine.model.model
    path = _resolved(name)
    _check_device(engine.model.device)
    if isinstance(path, Path):
        config = _read_config(path, name)
        _check_architecture(config, engine.model.model_impl)
        config |= parse_object(engine.model.hf_overrides, field="hf_overrides")
        _check_ranks(config, engine.parallel.tensor_parallel_size)
        stated = config.get("max_model_len")
        _check_context(config, engine.model.fixed_max_model_len or (stated if isinstance(stated, int) else None))


def _resolved(name: str) -> Path | str:
    try:
        return resolve_model(name)
    except ModelLoadError as error:
        raise ConfigError(error.message, field=error.field) from error


def _read_config(path: Path, name: str) -> dict[str, Any]:
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"model {name!r} {why_no_config(path)}", field="model") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"model {name!r}: its config.json cannot be read: {error}", field="model") from None
    if not isinstance(config, dict):
        raise ConfigError(f"model {name!r}: its config.json must hold an object", field="model")
    return config


def _check_architecture(config: dict[str, Any], model_impl: str) -> None:
    names, known = config.get("architectures"), known_architectures()
    if not known or not isinstance(names, list) or not names:
        return
    if any(name in known or name in installed_architectures() for name in names):
        return
    if model_impl != "pagoda" and any(transformers_may_know(str(name)) for name in names):
        return
    shown = ", ".join(map(str, names))[:200]
    raise ConfigError(
        f"the model's architecture, {shown}, is not supported (docs/models.md lists those that are)", field="model"
    )


def _part(config: dict[str, Any]) -> dict[str, Any]:
    """Where a checkpoint describes its text model."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def _check_ranks(config: dict[str, Any], ranks: int) -> None:
    part = _part(config)
    heads, groups = part.get("num_attention_heads"), part.get("num_key_value_heads")
    if isinstance(heads, int) and heads % ranks:
        message = f"tensor_parallel_size is {ranks}, must divide the model's {heads} attention heads"
        raise ConfigError(message, field="tensor_parallel_size")
    if isinstance(groups, int) and groups > 0 and groups % ranks and ranks % groups:
        message = (
            f"tensor_parallel_size is {ranks}, must divide the model's {groups} KV heads, or be a multiple of them"
        )
        raise ConfigError(message, field="tensor_parallel_size")
    size, has_experts = part.get("intermediate_size"), any("expert" in key for key in part)
    if isinstance(size, int) and size % ranks and not has_experts:
        message = f"tensor_parallel_size is {ranks}, must divide the model's intermediate size, {size}"
        raise ConfigError(message, field="tensor_parallel_size")


YARN_LENGTHS = ("original_max_position_embeddings", "factor")


def _check_context(config: dict[str, Any], asked: int | None) -> None:
    part = _part(config)
    longest, rope = part.get("max_position_embeddings"), part.get("rope_scaling") or part.get("rope_parameters")
    is_stretched = "factor" in json.dumps(rope)
    original, factor = (rope.get(name) for name in YARN_LENGTHS) if isinstance(rope, dict) else (None, None)
    is_yarn = isinstance(rope, dict) and rope.get("rope_type") == "yarn"
    if is_yarn and isinstance(longest, int) and isinstance(original, int) and isinstance(factor, int | float):
        longest, is_stretched = max(longest, int(original * factor)), False
    if asked is not None and isinstance(longest, int) and asked > longest and not is_stretched:
        message = f"max_model_len is {asked}, the model was made for {longest} tokens"
        raise ConfigError(message, field="max_model_len")


def _check_device(device: str) -> None:
    if device == "cuda" and not any(map(os.path.exists, DRIVER_FILES)):
        raise ConfigError("device is 'cuda', but this machine has no driver of a GPU", field="device")


def _check_template_flag(value: str) -> None:
    from pagoda_common.text.chat_template import check_template, load_chat_template  # jinja2 takes a moment

    text = load_chat_template(value)
    if text is not None:
        check_template(text, name="chat_template", field="chat_template")


def _check_tokenizer(path: Path, *, field: str, needs_template: bool) -> None:
    from pagoda_common.text.tokenizer_files import TokenizerFiles

    file = path / "tokenizer.json"
    try:
        files = TokenizerFiles.read(path)
        if not file.exists():
            files.load_fast_tokenizer()  # of the older files, or none
        elif file.stat().st_size <= MAX_TOKENIZER_BYTES:
            json.loads(file.read_text(encoding="utf-8"))
    except ModelLoadError as error:
        raise ConfigError(error.message, field=field) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"the tokenizer {file} cannot be read: {error}", field=field) from error
    if needs_template and (template := files.chat_templates.get("default")) is not None:
        from pagoda_common.text.chat_template import check_template

        check_template(template, name=f"the chat template in {path}", field="chat_template")
