"""Reasoning parsers by name, and how plugins add theirs."""

from collections.abc import Callable
from typing import TypeVar

from pagoda_common.errors import ConfigError
from pagoda_frontend.reasoning_parsers.base import ReasoningParser
from pagoda_frontend.reasoning_parsers.families import (
    DeepSeekR1Parser,
    GraniteReasoningParser,
    HarmonyReasoningParser,
    MistralReasoningParser,
    Qwen3Parser,
)

Parser = TypeVar("Parser", bound=ReasoningParser)

_PARSERS: dict[str, type[ReasoningParser]] = {
    "deepseek_r1": DeepSeekR1Parser,
    "deepseek_v3": Qwen3Parser,
    "glm45": Qwen3Parser,
    "granite": GraniteReasoningParser,
    "kimi_k2": Qwen3Parser,
    "mistral": MistralReasoningParser,
    "openai_gptoss": HarmonyReasoningParser,
    "qwen3": Qwen3Parser,
}


def register_reasoning_parser(*names: str) -> Callable[[type[Parser]], type[Parser]]:
    """Decorates a `ReasoningParser` of a plugin: it is chosen by ``--reasoning-parser`` under `names`."""

    def register(parser: type[Parser]) -> type[Parser]:
        _PARSERS.update(dict.fromkeys(names, parser))
        return parser

    return register


def reasoning_parser_names() -> list[str]:
    """All that are known."""
    return sorted(_PARSERS)


def find_reasoning_parser(name: str) -> type[ReasoningParser]:
    """The parser called `name`.

    Raises:
        ConfigError: there is none.
    """
    if name not in _PARSERS:
        known = ", ".join(reasoning_parser_names())
        raise ConfigError(f"reasoning_parser is {name!r}, must be one of {known}", field="reasoning_parser")
    return _PARSERS[name]
