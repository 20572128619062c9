"""Parsers by name, and what each family writes around calls and thoughts."""

from typing import Any

import pytest

from pagoda_common.errors import ConfigError
from pagoda_frontend.reasoning_parsers.registry import find_reasoning_parser, reasoning_parser_names
from pagoda_frontend.tool_parsers.registry import find_tool_parser, tool_parser_names

TOOL_PARSERS = {
    "deepseek_v3": "DeepSeekV3Parser",
    "deepseek_v31": "DeepSeekV31Parser",
    "deepseek_v32": "DeepSeekV32Parser",
    "deepseek_v4": "DeepSeekV4Parser",
    "ernie45": "Ernie45Parser",
    "gemma4": "Gemma4Parser",
    "gigachat3": "GigaChat3Parser",
    "glm45": "Glm45Parser",
    "glm47": "Glm45Parser",
    "granite": "GraniteParser",
    "granite-20b-fc": "Granite20bParser",
    "granite4": "HermesParser",
    "hermes": "HermesParser",
    "hunyuan": "ToolCallsArrayParser",
    "hunyuan_a13b": "ToolCallsArrayParser",
    "internlm": "InternLMParser",
    "jamba": "ToolCallsArrayParser",
    "kimi_k2": "KimiK2Parser",
    "lfm2": "Lfm2Parser",
    "llama3_json": "Llama3JsonParser",
    "llama4_json": "Llama3JsonParser",
    "llama4_pythonic": "PythonicParser",
    "longcat": "LongcatParser",
    "mimo": "Qwen3XmlParser",
    "minimax": "MinimaxParser",
    "minimax_m2": "MinimaxM2Parser",
    "mistral": "MistralParser",
    "olmo3": "Olmo3Parser",
    "openai": "HarmonyParser",
    "phi4_mini_json": "Phi4MiniJsonParser",
    "pythonic": "PythonicParser",
    "qwen3_coder": "Qwen3XmlParser",
    "qwen3_xml": "Qwen3XmlParser",
    "seed_oss": "SeedOssParser",
    "step3": "Step3Parser",
    "step3p5": "Qwen3XmlParser",
}
REASONING_PARSERS = {
    "deepseek_r1": "DeepSeekR1Parser",
    "deepseek_v3": "Qwen3Parser",
    "deepseek_v4": "Qwen3Parser",
    "ernie45": "Ernie45ReasoningParser",
    "gemma4": "Gemma4ReasoningParser",
    "glm45": "Qwen3Parser",
    "gptoss": "HarmonyReasoningParser",
    "granite": "GraniteReasoningParser",
    "holo2": "Qwen3Parser",
    "hunyuan": "HunyuanReasoningParser",
    "hunyuan_a13b": "HunyuanReasoningParser",
    "kimi_k2": "KimiK2ReasoningParser",
    "mimo": "Qwen3Parser",
    "minimax_m2": "DeepSeekR1Parser",
    "minimax_m2_append_think": "MinimaxAppendThinkParser",
    "mistral": "MistralReasoningParser",
    "nemotron": "ThinkParser",
    "nemotron_v3": "ThinkParser",
    "olmo3": "ThinkParser",
    "openai_gptoss": "HarmonyReasoningParser",
    "qwen3": "Qwen3Parser",
    "seed_oss": "SeedOssReasoningParser",
    "step3": "ThinkParser",
    "step3p5": "Step3p5Parser",
}
WRITTEN: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "markers": (
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁sep｜>",
        ),
        "openers": ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
        "keeps_space": True,
        "drops_rest": True,
        "end": "<｜tool▁call▁end｜>",
    },
    "deepseek_v31": {
        "markers": (
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁sep｜>",
        ),
        "openers": ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
        "keeps_space": True,
        "drops_rest": True,
        "end": "<｜tool▁call▁end｜>",
    },
    "deepseek_v32": {
        "markers": ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>", "｜DSML｜"),
        "openers": ("<｜DSML｜function_calls>",),
        "keeps_space": True,
        "starts": ("<｜DSML｜invoke name=",),
    },
    "deepseek_v4": {
        "markers": ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>", "｜DSML｜"),
        "openers": ("<｜DSML｜tool_calls>",),
        "keeps_space": True,
        "starts": ("<｜DSML｜invoke name=",),
    },
    "ernie45": {
        "markers": ("<tool_call>", "</tool_call>"),
        "trigger": "<tool_call>",
        "separator": "\n",
        "openers": ("<tool_call>",),
        "starts": ("<tool_call>",),
        "end": "</tool_call>",
        "frame": ('<tool_call>\n{"name": "f", "arguments": ', "}\n</tool_call>"),
    },
    "gemma4": {
        "markers": ("<|tool_call>", "<tool_call|>", '<|"|>'),
        "openers": ("<|tool_call>",),
        "end": "<tool_call|>",
    },
    "gigachat3": {
        "markers": ("<|message_sep|>", "<|role_sep|>", "<|function_call|>"),
        "openers": (
            "<|message_sep|>\n\nfunction call<|role_sep|>\n",
            "function call<|role_sep|>\n",
            "<|function_call|>",
        ),
        "keeps_space": True,
        "drops_rest": True,
        "starts": (
            "<|message_sep|>\n\nfunction call<|role_sep|>\n",
            "function call<|role_sep|>\n",
            "<|function_call|>",
        ),
        "end": "</s>",
        "needs_arguments": True,
    },
    "glm45": {
        "markers": ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        "openers": ("<tool_call>",),
        "keeps_space": True,
        "starts": ("<tool_call>",),
    },
    "granite": {
        "markers": ("<|tool_call|>", "<tool_call>"),
        "openers": ("<|tool_call|>", "<tool_call>"),
        "starts": ("<|tool_call|>", "<tool_call>"),
        "end": "</tool_call>",
        "calls_in_array": True,
    },
    "granite-20b-fc": {
        "markers": ("<function_call>",),
        "trigger": "<function_call>",
        "separator": " ",
        "openers": ("<function_call>",),
        "keeps_space": True,
        "starts": ("<function_call>",),
        "frame": ('<function_call> {"name": "f", "arguments": ', "}"),
    },
    "granite4": {
        "markers": ("<tool_call>", "</tool_call>"),
        "trigger": "<tool_call>",
        "separator": "\n",
        "openers": ("<tool_call>",),
        "keeps_space": True,
        "starts": ("<tool_call>",),
        "end": "</tool_call>",
        "frame": ('<tool_call>\n{"name": "f", "arguments": ', "}\n</tool_call>"),
    },
    "hunyuan": {
        "markers": ("<tool_calls>", "</tool_calls>"),
        "openers": ("<tool_calls>",),
        "keeps_space": True,
        "drops_rest": True,
        "starts": ("<tool_calls>",),
        "end": "</tool_calls>",
        "calls_in_array": True,
        "array_end": "</tool_calls>",
    },
    "internlm": {
        "markers": ("<|action_start|>", "<|plugin|>", "<|action_end|>"),
        "trigger": "<|action_start|><|plugin|>",
        "openers": ("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>"),
        "keeps_space": True,
        "starts": ("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>"),
        "end": "<|action_end|>",
        "frame": ('<|action_start|><|plugin|>\n{"name": "f", "parameters": ', "}<|action_end|>"),
    },
    "kimi_k2": {
        "markers": (
            "<|tool_call_begin|>",
            "<|tool_call_end|>",
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_argument_begin|>",
        ),
        "openers": ("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
        "keeps_space": True,
        "drops_rest": True,
        "end": "<|tool_call_end|>",
    },
    "lfm2": {
        "markers": ("<|tool_call_start|>", "<|tool_call_end|>"),
        "openers": ("<|tool_call_start|>",),
        "end": "<|tool_call_end|>",
    },
    "llama3_json": {
        "markers": ("<|python_tag|>",),
        "separator": "; ",
        "openers": ("<|python_tag|>",),
        "starts": ("<|python_tag|>",),
        "needs_arguments": True,
        "frame": ('{"name": "f", "parameters": ', "}"),
    },
    "llama4_pythonic": {
        "markers": ("<|python_start|>", "<|python_end|>"),
        "openers": ("<|python_start|>",),
        "end": "<|python_end|>",
    },
    "longcat": {
        "markers": ("<longcat_tool_call>", "</longcat_tool_call>"),
        "trigger": "<longcat_tool_call>",
        "separator": "\n",
        "openers": ("<longcat_tool_call>",),
        "keeps_space": True,
        "starts": ("<longcat_tool_call>",),
        "end": "</longcat_tool_call>",
        "frame": ('<longcat_tool_call>\n{"name": "f", "arguments": ', "}\n</longcat_tool_call>"),
    },
    "mimo": {
        "markers": ("<tool_call>", "</tool_call>"),
        "openers": ("<tool_call>",),
        "keeps_space": True,
        "starts": ("<function=",),
    },
    "minimax": {
        "markers": ("<tool_calls>", "</tool_calls>"),
        "openers": ("<tool_calls>",),
        "starts": ("<tool_calls>",),
        "end": "</tool_calls>",
        "calls_in_array": True,
        "array_end": "</tool_calls>",
        "needs_arguments": True,
        "hides_markers": True,
    },
    "minimax_m2": {
        "markers": ("<minimax:tool_call>", "</minimax:tool_call>"),
        "openers": ("<minimax:tool_call>",),
        "keeps_space": True,
        "starts": ("<invoke name=",),
    },
    "mistral": {
        "markers": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        "openers": ("[TOOL_CALLS]",),
        "keeps_space": True,
        "id_pattern": "[A-Za-z0-9]{9}",
    },
    "olmo3": {
        "markers": ("<function_calls>", "</function_calls>"),
        "openers": ("<function_calls>",),
        "end": "</function_calls>",
    },
    "openai": {
        "markers": ("<|start|>", "<|channel|>", "<|end|>", "<|call|>", "<|return|>", "<|message|>", "<|constrain|>"),
        "splits_reasoning": True,
    },
    "phi4_mini_json": {"markers": ("functools",), "starts": ("functools",), "calls_in_array": True},
    "seed_oss": {
        "markers": ("<seed:tool_call>", "</seed:tool_call>"),
        "openers": ("<seed:tool_call>",),
        "keeps_space": True,
        "thinking": ("<seed:think>", "</seed:think>"),
        "starts": ("<function=",),
    },
    "step3": {
        "markers": (
            "<｜tool_calls_begin｜>",
            "<｜tool_calls_end｜>",
            "<｜tool_call_begin｜>",
            "<｜tool_call_end｜>",
            "<｜tool_sep｜>",
        ),
        "openers": ("<｜tool_calls_begin｜>", "<｜tool_call_begin｜>"),
        "starts": ("<steptml:invoke name=",),
    },
}
THOUGHTS: dict[str, dict[str, Any]] = {
    "deepseek_r1": {
        "markers": ("<think>", "</think>"),
        "end": "</think>",
        "start": "<think>",
        "tells_empty": True,
        "trims": False,
        "is_assumed": True,
    },
    "deepseek_v3": {"markers": ("<think>", "</think>"), "end": "</think>", "start": "<think>", "trims": False},
    "ernie45": {
        "markers": ("<think>", "</think>", "<response>", "</response>"),
        "end": "</think>",
        "start": "<think>",
        "trims": True,
        "is_assumed": True,
        "answer_tags": ("<response>", "</response>"),
    },
    "gemma4": {
        "markers": ("<|channel>", "<channel|>"),
        "end": "<channel|>",
        "start": "<|channel>",
        "label": "thought\n",
        "trims": False,
    },
    "gptoss": {
        "markers": ("<|start|>", "<|channel|>", "<|end|>", "<|call|>", "<|return|>", "<|message|>", "<|constrain|>")
    },
    "granite": {"end": "Here is my response:", "start": "Here is my thought process:", "trims": True},
    "hunyuan": {
        "markers": ("<think>", "</think>", "<answer>", "</answer>"),
        "end": "</think>",
        "start": "<think>",
        "trims": True,
        "answer_tags": ("<answer>", "</answer>"),
    },
    "kimi_k2": {
        "markers": ("<think>", "</think>"),
        "end": "</think>",
        "start": "<think>",
        "tells_empty": True,
        "trims": False,
    },
    "minimax_m2_append_think": {"markers": ("<think>", "</think>"), "end": "</think>"},
    "mistral": {"markers": ("[THINK]", "[/THINK]"), "end": "[/THINK]", "start": "[THINK]", "trims": False},
    "nemotron": {
        "markers": ("<think>", "</think>"),
        "end": "</think>",
        "start": "<think>",
        "trims": False,
        "is_assumed": True,
    },
    "seed_oss": {
        "markers": ("<seed:think>", "</seed:think>"),
        "end": "</seed:think>",
        "start": "<seed:think>",
        "trims": False,
        "is_assumed": True,
    },
    "step3p5": {
        "markers": ("<think>", "</think>"),
        "end": "</think>",
        "start": "<think>",
        "trims": False,
        "is_assumed": True,
    },
}


def test_each_name_has_its_parser() -> None:
    """Plugins may have added others."""
    assert set(TOOL_PARSERS) <= set(tool_parser_names())
    assert set(REASONING_PARSERS) <= set(reasoning_parser_names())
    assert {name: find_tool_parser(name).__name__ for name in TOOL_PARSERS} == TOOL_PARSERS
    assert {name: find_reasoning_parser(name).__name__ for name in REASONING_PARSERS} == REASONING_PARSERS
    for find, flag in ((find_tool_parser, "tool_call_parser"), (find_reasoning_parser, "reasoning_parser")):
        with pytest.raises(ConfigError, match=f"{flag} is 'none', must be one of .*deepseek_v3, ") as caught:
            find("none")  # type: ignore[operator]  # one of two functions
        assert caught.value.field == flag


DEFAULTS = {
    "markers": (),
    "splits_reasoning": False,
    "trigger": "",
    "separator": "",
    "openers": (),
    "keeps_space": False,
    "drops_rest": False,
    "thinking": ("<think>", "</think>"),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_what_a_family_writes_around_calls(name: str) -> None:
    parser, wanted = find_tool_parser(name), dict(WRITTEN[name])
    assert parser.frame("f") == wanted.pop("frame", None)
    assert (parser.id_pattern and parser.id_pattern.pattern) == wanted.pop("id_pattern", None)
    given = {one: getattr(parser, one) for one in (*DEFAULTS, *wanted)}
    assert given == DEFAULTS | wanted
    for other in ("starts", "end", "calls_in_array", "array_end", "needs_arguments", "hides_markers"):
        if other not in wanted:
            assert not getattr(parser, other, ""), other


@pytest.mark.parametrize("name", THOUGHTS)
def test_what_a_family_writes_around_thoughts(name: str) -> None:
    parser, wanted = find_reasoning_parser(name), THOUGHTS[name]
    assert {one: getattr(parser, one) for one in wanted} == wanted
    for other in ("markers", "end", "label", "tells_empty", "is_assumed", "answer_tags"):
        if other not in wanted:
            assert not getattr(parser, other, ""), other
    if "trims" not in wanted and hasattr(parser, "trims"):
        assert parser.trims


@pytest.mark.parametrize(
    ("name", "made"),
    [("hermes", "call_0123456789abcdef01234567"), ("kimi_k2", "functions.f:2"), ("mistral", "012345678")],
)
def test_ids_of_calls(name: str, made: str) -> None:
    assert find_tool_parser(name).call_id("f", 2, "0123456789abcdef" * 2) == made
