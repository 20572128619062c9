"""Registry of tool call parsers, to which plugins add theirs."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pagoda_common.errors import ConfigError
from pagoda_frontend.tool_parsers.base import ToolParser
from pagoda_frontend.tool_parsers.framed import DeepSeekV3Parser, DeepSeekV31Parser, KimiK2Parser
from pagoda_frontend.tool_parsers.gemma import Gemma4Parser
from pagoda_frontend.tool_parsers.harmony import HarmonyParser
from pagoda_frontend.tool_parsers.invoke import DeepSeekV4Parser, DeepSeekV32Parser, MinimaxM2Parser, Step3Parser
from pagoda_frontend.tool_parsers.json_calls import HermesParser, Llama3JsonParser
from pagoda_frontend.tool_parsers.json_families import (
    Ernie45Parser,
    GigaChat3Parser,
    Granite20bParser,
    GraniteParser,
    InternLMParser,
    LongcatParser,
    MinimaxParser,
    Phi4MiniJsonParser,
    ToolCallsArrayParser,
)
from pagoda_frontend.tool_parsers.mistral import MistralParser
from pagoda_frontend.tool_parsers.pythonic import Lfm2Parser, Olmo3Parser, PythonicParser
from pagoda_frontend.tool_parsers.xml import Glm45Parser, Qwen3XmlParser, SeedOssParser

Parser = TypeVar("Parser", bound=ToolParser)

_PARSERS: dict[str, type[ToolParser]] = {
    "deepseek_v3": DeepSeekV3Parser,
    "deepseek_v31": DeepSeekV31Parser,
    "deepseek_v32": DeepSeekV32Parser,
    "deepseek_v4": DeepSeekV4Parser,
    "ernie45": Ernie45Parser,
    "gemma4": Gemma4Parser,
    "gigachat3": GigaChat3Parser,
    "glm45": Glm45Parser,
    "glm47": Glm45Parser,
    "granite": GraniteParser,
    "granite-20b-fc": Granite20bParser,
    "granite4": HermesParser,
    "hermes": HermesParser,
    "hunyuan": ToolCallsArrayParser,
    "hunyuan_a13b": ToolCallsArrayParser,
    "internlm": InternLMParser,
    "jamba": ToolCallsArrayParser,
    "kimi_k2": KimiK2Parser,
    "lfm2": Lfm2Parser,
    "llama3_json": Llama3JsonParser,
    "llama4_json": Llama3JsonParser,
    "llama4_pythonic": PythonicParser,
    "longcat": LongcatParser,
    "mimo": Qwen3XmlParser,
    "minimax": MinimaxParser,
    "minimax_m2": MinimaxM2Parser,
    "mistral": MistralParser,
    "olmo3": Olmo3Parser,
    "openai": HarmonyParser,
    "phi4_mini_json": Phi4MiniJsonParser,
    "pythonic": PythonicParser,
    "qwen3_coder": Qwen3XmlParser,
    "qwen3_xml": Qwen3XmlParser,
    "seed_oss": SeedOssParser,
    "step3": Step3Parser,
    "step3p5": Qwen3XmlParser,
}


def register_tool_parser(*names: str) -> Callable[[type[Parser]], type[Parser]]:
    """Decorator that registers a plugin's `ToolParser` under `names`, for ``--tool-call-parser``."""

    def register(parser: type[Parser]) -> type[Parser]:
        _PARSERS.update(dict.fromkeys(names, parser))
        return parser

    return register


def tool_parser_names() -> list[str]:
    """The names of all registered parsers."""
    return sorted(_PARSERS)


def find_tool_parser(name: str) -> type[ToolParser]:
    """The parser called `name`.

    Raises:
        ConfigError: there is no parser of that name.
    """
    if name not in _PARSERS:
        known = ", ".join(tool_parser_names())
        raise ConfigError(f"tool_call_parser is {name!r}, must be one of {known}", field="tool_call_parser")
    return _PARSERS[name]


def load_plugin(path: str, *, field: str) -> None:
    """Execute the Python file at `path`, which registers its parsers.

    Raises:
        ConfigError: the file is missing or fails; `field` names the flag.
    """
    if not Path(path).is_file():
        raise ConfigError(f"{field} {path!r} is not a file", field=field)
    try:
        spec = importlib.util.spec_from_file_location(Path(path).stem, path)
        if spec is None or spec.loader is None:
            raise ImportError("not a Python file")
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    except Exception as error:  # whatever a plugin does
        raise ConfigError(f"{field} {path!r} cannot be loaded: {error}", field=field) from error
