"""Registry of reasoning parsers, to which plugins add theirs."""

from collections.abc import Callable
from typing import TypeVar

from pagoda_common.errors import ConfigError
from pagoda_frontend.reasoning_parsers.base import ReasoningParser
from pagoda_frontend.reasoning_parsers.families import (
    DeepSeekR1Parser,
    Ernie45ReasoningParser,
    Gemma4ReasoningParser,
    GraniteReasoningParser,
    HarmonyReasoningParser,
    HunyuanReasoningParser,
    KimiK2ReasoningParser,
    MinimaxAppendThinkParser,
    MistralReasoningParser,
    Qwen3Parser,
    SeedOssReasoningParser,
    Step3p5Parser,
    ThinkParser,
)

Parser = TypeVar("Parser", bound=ReasoningParser)

_PARSERS: dict[str, type[ReasoningParser]] = {
    "deepseek_r1": DeepSeekR1Parser,
    "deepseek_v3": Qwen3Parser,
    "deepseek_v4": Qwen3Parser,
    "ernie45": Ernie45ReasoningParser,
    "gemma4": Gemma4ReasoningParser,
    "glm45": Qwen3Parser,
    "gptoss": HarmonyReasoningParser,
    "granite": GraniteReasoningParser,
    "holo2": Qwen3Parser,
    "hunyuan": HunyuanReasoningParser,
    "hunyuan_a13b": HunyuanReasoningParser,
    "kimi_k2": KimiK2ReasoningParser,
    "mimo": Qwen3Parser,
    "minimax_m2": DeepSeekR1Parser,
    "minimax_m2_append_think": MinimaxAppendThinkParser,
    "mistral": MistralReasoningParser,
    "nemotron": ThinkParser,
    "nemotron_v3": ThinkParser,
    "olmo3": ThinkParser,
    "openai_gptoss": HarmonyReasoningParser,
    "qwen3": Qwen3Parser,
    "seed_oss": SeedOssReasoningParser,
    "step3": ThinkParser,
    "step3p5": Step3p5Parser,
}


def register_reasoning_parser(*names: str) -> Callable[[type[Parser]], type[Parser]]:
    """Decorator that registers a plugin's `ReasoningParser` under `names`, for ``--reasoning-parser``."""

    def register(parser: type[Parser]) -> type[Parser]:
        _PARSERS.update(dict.fromkeys(names, parser))
        return parser

    return register


def reasoning_parser_names() -> list[str]:
    """The names of all registered parsers."""
    return sorted(_PARSERS)


def find_reasoning_parser(name: str) -> type[ReasoningParser]:
    """The parser called `name`.

    Raises:
        ConfigError: there is no parser of that name.
    """
    if name not in _PARSERS:
        known = ", ".join(reasoning_parser_names())
        raise ConfigError(f"reasoning_parser is {name!r}, must be one of {known}", field="reasoning_parser")
    return _PARSERS[name]
