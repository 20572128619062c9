"""The source of sampling defaults: the checkpoint's generation_config.json, another one, or none."""

import json
from pathlib import Path
from typing import Any

from pagoda_common.errors import ConfigError

FROM_CHECKPOINT = "auto"
NOWHERE = "vllm"
FILE_NAME = "generation_config.json"


def resolve_generation_config(checkpoint_json: str, *, source: str, override: str) -> str:
    """The generation config that counts, as a JSON object.

    Args:
        checkpoint_json: the checkpoint's, "" when it has none.
        source: auto is the checkpoint's, vllm is an empty one, else the directory of another.
        override: JSON object whose fields go before those of `source`; "" for none.

    Raises:
        ConfigError: the file of `source` cannot be read, or is not a JSON object.
    """
    text = checkpoint_json
    if source == NOWHERE:
        text = ""
    elif source != FROM_CHECKPOINT:
        try:
            text = (Path(source) / FILE_NAME).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            message = f"generation_config is {source!r}, must be auto, vllm or a directory with a {FILE_NAME}: {error}"
            raise ConfigError(message, field="generation_config") from error
    values = parse_object(text, field="generation_config") | parse_object(override, field="override_generation_config")
    return json.dumps(values)


def parse_object(text: str, *, field: str) -> dict[str, Any]:
    """The JSON object in `text`, empty for "".

    Raises:
        ConfigError: it is none; `field` names where it came from.
    """
    try:
        value = json.loads(text) if text else {}
    except ValueError as error:
        raise ConfigError(f"{field} is {text[:200]!r}, must be a JSON object: {error}", field=field) from error
    if not isinstance(value, dict):
        raise ConfigError(f"{field} is {text[:200]!r}, must be a JSON object", field=field)
    return value
