"""Entries of --models: the models of one frontend, each with the scheduler that serves it. Knows no FrontendConfig."""

import json
from collections.abc import Sequence
from typing import Any

from pagoda_common.errors import ConfigError

FIELD = "models"
OBJECTS = frozenset({"override_generation_config", "structured_outputs_config"})
"""Keys whose values are JSON objects, as such or as text."""
SWITCHES = frozenset({"enable_auto_tool_choice", "enable_long_inputs", "trust_request_chat_template"})
TEXTS = frozenset(
    {
        *("model", "revision", "tokenizer", "chat_template", "tool_call_parser", "tool_parser_plugin"),
        *("reasoning_parser", "reasoning_parser_plugin", "generation_config"),
    }
)
NUMBERS = frozenset({"max_logprobs"})
KEYS = ("name", "scheduler", "aliases", *sorted(OBJECTS | SWITCHES | TEXTS | NUMBERS))
"""Keys of an entry in JSON. All but the first three are flags of the frontend, and mean the same."""


def parse_models(entries: Sequence[str]) -> list[dict[str, Any]]:
    """For each entry the fields of FrontendConfig that are its own.

    Args:
        entries: NAME=HOST:PORT, or a JSON object with KEYS.

    Raises:
        ConfigError: an entry is neither, or two have the same name.
    """
    models = [_model(entry) for entry in entries]
    names = [name for model in models for name in model["served_model_name"]]
    doubles = sorted({name for name in names if names.count(name) > 1})
    if doubles:
        raise ConfigError(f"models names {doubles[0]!r} twice", field=FIELD)
    return models


def _model(entry: str) -> dict[str, Any]:
    if entry.lstrip().startswith("{"):
        return _from_json(entry)
    name, _, address = entry.partition("=")
    return _with_names({"name": name.strip(), "scheduler": address.strip()}, entry)


def _from_json(entry: str) -> dict[str, Any]:
    try:
        given = json.loads(entry)
    except ValueError as error:
        raise ConfigError(f"models has {entry!r}, which is not JSON: {error}", field=FIELD) from error
    unknown = sorted(given.keys() - set(KEYS))
    if unknown:
        message = f"models has the key {unknown[0]!r}, must be one of {', '.join(KEYS)}"
        raise ConfigError(message, field=FIELD)
    return _with_names({key: _value(key, value) for key, value in given.items()}, entry)


def _value(key: str, value: Any) -> Any:
    if key in OBJECTS and isinstance(value, dict):
        return json.dumps(value)
    if key in SWITCHES:
        is_right, kind = isinstance(value, bool), "true or false"
    elif key in NUMBERS:
        is_right, kind = type(value) is int, "an integer"
    elif key == "aliases":
        is_right, kind = isinstance(value, list) and all(isinstance(one, str) and one for one in value), "names"
    else:
        is_right, kind = isinstance(value, str), "text"
    if not is_right:
        raise ConfigError(f"models has {key} {json.dumps(value)}, must be {kind}", field=FIELD)
    return value


def _with_names(fields: dict[str, Any], entry: str) -> dict[str, Any]:
    name, address = fields.pop("name", ""), fields.get("scheduler", "")
    if not name or not address:
        message = f"models has {entry!r}, must be NAME=HOST:PORT, or a JSON object with name and scheduler"
        raise ConfigError(message, field=FIELD)
    names = (name, *fields.pop("aliases", ()))
    return {**fields, "served_model_name": names}
