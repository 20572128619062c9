"""The options of --structured-outputs-config, with vLLM's keys: JSON options for every request. Knows no grammar."""

import json
from dataclasses import dataclass, replace
from typing import Any

from pagoda_common.config.checkpoint.generation_config import parse_object
from pagoda_common.errors import ConfigError
from pagoda_common.params.structured_outputs import StructuredOutputsParams

_FIELD = "structured_outputs_config"
_SWITCHES = ("disable_any_whitespace", "disable_additional_properties")
_WITHOUT_EFFECT = ("backend", "disable_fallback")
"""One engine (llguidance) serves all structured outputs, and there is nothing to fall back to."""
_REFUSED = {
    "reasoning_parser": "--reasoning-parser names it",
    "reasoning_parser_plugin": "--reasoning-parser-plugin names it",
    "enable_in_reasoning": "reasoning is free, and the constraint holds what follows it",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class StructuredOutputsDefaults:
    """Options for every request, in addition to its own."""

    disable_any_whitespace: bool = False
    """JSON without any white space between its tokens."""
    disable_additional_properties: bool = False
    """JSON objects have no properties besides those that their schema names, unless it says so itself."""

    def applied_to(self, params: StructuredOutputsParams | None) -> StructuredOutputsParams | None:
        """`params` with these options; None, which is no constraint, stays None."""
        if params is None or self == StructuredOutputsDefaults():
            return params
        return replace(
            params,
            disable_any_whitespace=params.disable_any_whitespace or self.disable_any_whitespace,
            disable_additional_properties=params.disable_additional_properties or self.disable_additional_properties,
        )


def structured_outputs_defaults(text: str) -> StructuredOutputsDefaults:
    """The options in a JSON object; "" has none.

    Raises:
        ConfigError: it is no such object; `field` is structured_outputs_config.
    """
    values: dict[str, Any] = {}
    for name, value in parse_object(text, field=_FIELD).items():
        if name in _REFUSED and value not in (None, "", False):
            raise ConfigError(f"{_FIELD}: {name} is not supported: {_REFUSED[name]}", field=_FIELD)
        if name not in (*_SWITCHES, *_WITHOUT_EFFECT, *_REFUSED):
            known = ", ".join((*_SWITCHES, *_WITHOUT_EFFECT))
            raise ConfigError(f"{_FIELD}: unknown key {name!r}, must be one of {known}", field=_FIELD)
        if name in _SWITCHES:
            if not isinstance(value, bool):
                raise ConfigError(f"{_FIELD}: {name} is {json.dumps(value)}, must be true or false", field=_FIELD)
            values[name] = value
    return StructuredOutputsDefaults(**values)
