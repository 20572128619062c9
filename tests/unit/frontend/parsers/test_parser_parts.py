"""Parsers by name, what each family writes around calls and thoughts, and the parts that all of them share."""

from typing import Any

import pytest

from pagoda_common.errors import ConfigError
from pagoda_frontend.reasoning_parsers.registry import find_reasoning_parser, reasoning_parser_names
from pagoda_frontend.tool_parsers import formats
from pagoda_frontend.tool_parsers.base import Piece, ToolParser, after_start, find_marker
from pagoda_frontend.tool_parsers.named import NamedCallParser
from pagoda_frontend.tool_parsers.registry import find_tool_parser, tool_parser_names
from pagoda_frontend.tool_parsers.values import (
    Digits,
    checked,
    choices_of,
    is_utf8,
    json_text,
    json_value,
    type_name,
    typed_value,
    types_of,
)

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


# What all parsers share.


@pytest.mark.parametrize(
    ("text", "is_last", "start", "place", "marker"),
    [
        ("ab<x>c", False, 0, 2, "<x>"),
        ("ab<y>c<x>", False, 0, 2, "<y>"),
        ("<x><x>", False, 1, 3, "<x>"),
        ("ab<", False, 0, 2, None),
        ("ab<y", False, 0, 2, None),
        ("ab<z", False, 0, 4, None),
        ("ab<", True, 0, 3, None),
        ("", False, 0, 0, None),
        ("<<", False, 0, 1, None),
        ("a<<x", False, 0, 2, None),
        ("<ab", False, 1, 3, None),
        ("<x", False, 1, 2, None),
    ],
)
def test_where_a_marker_is_or_may_begin(text: str, is_last: bool, start: int, place: int, marker: str | None) -> None:
    assert find_marker(text, ("<x>", "<y>"), is_last=is_last, start=start) == (place, marker)
    assert find_marker(text, (), is_last=is_last) == (len(text), None)


def test_how_a_text_begins() -> None:
    assert after_start("<t>a", "<t>") is True
    assert after_start("<t>", "<t>") is True
    assert after_start("<t", "<t>") is None
    assert after_start("", "<t>") is None
    assert after_start("<a", "<t>") is False
    assert after_start("", "") is True


class Slashes(ToolParser):
    """A call is a word between slashes."""

    markers = ("/",)
    openers = ("/",)

    def _advance(self, *, is_last: bool) -> bool:
        place, marker = find_marker(self._text, ("/",), is_last=is_last)
        if marker is None:
            self._say(self._read(place))
            return False
        end = self._text.find("/", place + 1)
        if end < 0:
            return False
        self._say(self._read(place))
        name = self._read(end - place + 1)[1:-1]
        self._begin(name)
        self._argue("{")
        self._argue("")
        self._argue("}")
        return True


class Keeping(Slashes):
    """Keeps white space."""

    keeps_space = True


class Dropping(Slashes):
    """Drops what follows a call."""

    drops_rest = True


def parsed(parser: type[ToolParser], text: str) -> tuple[str, list[Any]]:
    """Content and calls, which are the same however the text is cut."""
    found = []
    for size in (1, 2, len(text) or 1):
        made = parser(schemas={})
        pieces = [made.append(text[at : at + size]) for at in range(0, len(text), size)] + [made.finish()]
        calls = [call.name for piece in pieces for call in piece.tool_calls if call.name is not None]
        arguments = "".join(call.arguments for piece in pieces for call in piece.tool_calls)
        assert arguments == "{}" * len(calls)
        assert {call.index for piece in pieces for call in piece.tool_calls} == set(range(len(calls)))
        found.append(("".join(piece.content for piece in pieces), calls))
    assert found[0] == found[1] == found[2]
    return found[0]


@pytest.mark.parametrize(
    ("parser", "text", "content", "calls"),
    [
        (Slashes, " a b ", " a b ", []),
        (Slashes, "  ", "  ", []),
        (Slashes, "a /f/", "a", ["f"]),
        (Slashes, " /f/ ", "", ["f"]),
        (Slashes, "a /f/ b", "a b", ["f"]),
        (Slashes, "/f/ b", "b", ["f"]),
        (Slashes, "/f/, /g/;\n", "", ["f", "g"]),
        (Slashes, "/f/, b", ", b", ["f"]),
        (Slashes, "a/", "a/", []),
        (Keeping, " a b ", " a b ", []),
        (Keeping, "a /f/", "a ", ["f"]),
        (Keeping, " /f/ ", "", ["f"]),
        (Keeping, "a /f/ b", "a  b", ["f"]),
        (Keeping, "/f/ b ", " b ", ["f"]),
        (Keeping, "/f/, /g/;\n", "", ["f", "g"]),
        (Dropping, "a /f/ b", "a", ["f"]),
        (Dropping, "a /f/ b /g/", "a", ["f", "g"]),
        (Slashes, "<think>/f/</think>/g/", "<think>/f/</think>", ["g"]),
        (Slashes, " \n<think>a", " \n<think>a", []),
        (Slashes, "<think>a /f/", "<think>a", ["f"]),
        (Slashes, "<thin", "<thin", []),
    ],
)
def test_white_space_beside_calls(parser: type[ToolParser], text: str, content: str, calls: list[str]) -> None:
    assert parsed(parser, text) == (content, calls)


def test_ids_are_drawn_from_a_seed() -> None:
    def ids(seed: str) -> list[Any]:
        parser = Slashes(schemas={})
        parser.id_seed = seed
        return [call.id for call in parser.append("/f//g/").tool_calls if call.id is not None]

    first = ids("a")
    assert ids("a") == first != ids("b")
    assert len(set(first)) == 2
    assert ids("") != ids("")
    assert Piece() == Piece("", "", [])


def test_a_named_call_is_the_whole_text() -> None:
    def read(*texts: str) -> tuple[str, list[tuple[Any, str]]]:
        parser = NamedCallParser(schemas={}, name="f")
        pieces = [*map(parser.append, texts), parser.finish()]
        calls = [(call.name, call.arguments) for piece in pieces for call in piece.tool_calls]
        return "".join(piece.content for piece in pieces), calls

    assert read(' {"a":', " 1}") == ("", [("f", ""), (None, '{"a":'), (None, " 1}")])
    assert read("[1]") == ("[1]", [])
    content, calls = read('{"a": 1} more')
    assert (content.strip(), calls) == ("more", [("f", ""), (None, '{"a": 1}')])


# Values.


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({}, set()),
        (True, set()),
        ({"type": "string"}, {"string"}),
        ({"type": ["string", 5, "null"]}, {"string", "null"}),
        ({"type": "string", "nullable": True}, {"string", "null"}),
        ({"nullable": True}, set()),
        ({"type": "string", "nullable": "yes"}, {"string"}),
        ({"enum": ["a", 1, None]}, {"string", "integer", "null"}),
        ({"const": 1.5}, {"number"}),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, {"string", "integer"}),
        ({"oneOf": [{"type": "string"}, {"type": "array"}]}, {"string", "array"}),
        ({"allOf": [{"type": ["string", "null"]}, {"type": ["null", "array"]}]}, {"null"}),
        ({"type": "string", "enum": ["a", 1]}, {"string"}),
        ({"type": "string", "anyOf": [{"type": "integer"}]}, {"string", "integer"}),
        ({"properties": {}}, {"object"}),
        ({"items": {}}, {"array"}),
        ({"prefixItems": []}, {"array"}),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "null"}}}, {"null"}),
    ],
)
def test_the_types_that_a_schema_allows(schema: Any, types: set[str]) -> None:
    assert types_of(schema) == types


def test_choices_of_a_schema() -> None:
    assert choices_of({"const": None}) == [None]
    assert choices_of({"enum": [1, 2]}) == [1, 2]
    assert choices_of({"enum": 5}) is None
    assert choices_of({}) is None
    assert choices_of({"const": 1, "enum": [2]}) == [1]


STRING, INTEGER, NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("5", {}, "5"),
        ("5", STRING, "5"),
        ("5", INTEGER, Digits("5")),
        ("5.0", INTEGER, Digits("5")),
        ("5e2", INTEGER, Digits("500")),
        ("1e400", INTEGER, Digits("1" + "0" * 400)),
        ("1e401", INTEGER, Digits("1e401")),
        ("5.5", INTEGER, Digits("5.5")),
        ("-5", INTEGER, Digits("-5")),
        ("5.0", NUMBER, Digits("5.0")),
        ("5", NUMBER, Digits("5")),
        ("5.0", {"type": ["integer", "number"]}, Digits("5.0")),
        ("5", {"type": ["string", "integer"]}, Digits("5")),
        ("5", {"type": ["string", "number"]}, Digits("5")),
        ("5.5", {"type": ["string", "integer"]}, "5.5"),
        ("[1]", {"type": ["string", "number"]}, "[1]"),
        ("5", {"enum": ["5", 5]}, "5"),
        ("6", {"enum": ["5", 6]}, Digits("6")),
        ("null", {"type": ["string", "null"]}, None),
        (" None ", {"type": "integer"}, None),
        ("null", STRING, "null"),
        ("null", {"type": ["string", "integer"]}, "null"),
        ("True", {"type": "boolean"}, True),
        ("false", {"type": ["boolean", "string"]}, False),
        ("yes", {"type": "boolean"}, "yes"),
        ("[1, 'a']", {"type": "array"}, [Digits("1"), "a"]),
        ("(1,)", {"type": "array"}, [Digits("1")]),
        ("{'a': 1}", {"type": "object"}, {"a": Digits("1")}),
        ("{'a': 1}", INTEGER, "{'a': 1}"),
        ("a", {"type": "array"}, "a"),
        ('"a"', {"type": ["string", "array"]}, "a"),
        ("NaN", NUMBER, "NaN"),
        ('"a\nb"', {"type": ["string", "array"]}, "a\nb"),
    ],
)
def test_a_text_stands_for_a_value(text: str, schema: dict[str, Any], value: Any) -> None:
    assert typed_value(text, schema) == value


def test_json_counts_where_a_schema_says_nothing_if_it_may() -> None:
    assert typed_value("5", {}, reads_untyped=True) == Digits("5")
    assert typed_value("null", {}, reads_untyped=True) is None
    assert typed_value("a", {}, reads_untyped=True) == "a"
    assert typed_value("true", {}, reads_untyped=True) is True
    root = {"$defs": {"a": INTEGER}}
    assert typed_value("5", {"$ref": "#/$defs/a"}, root) == Digits("5")
    chosen = {"$defs": {"a": {"enum": ["5", 5]}}}
    assert typed_value("5", {"$ref": "#/$defs/a"}, chosen) == "5", "a value that is listed as a text"


def test_depth_of_values_is_bounded() -> None:
    def nested(levels: int) -> Any:
        value: Any = 1
        for _ in range(levels):
            value = [value]
        return value

    assert checked(nested(200)) == nested(200)
    assert checked({"a": nested(199)}) == {"a": nested(199)}
    with pytest.raises(ValueError, match="too deep"):
        checked(nested(201))


def test_json_keeps_digits_and_can_be_sent() -> None:
    value = {"é": [Digits("1.50"), True, None, "a"], "b": {}}
    assert json_text(value) == '{"é": [1.50, true, null, "a"], "b": {}}'
    assert json_text({"é": "\ud800"}) == '{"\\u00e9": "\\ud800"}'
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_text(float("nan"))
    with pytest.raises(TypeError):
        json_text({"a": {1}})
    assert is_utf8("é")
    assert not is_utf8("\udfff")
    assert json_value("[1, 2.50]") == [Digits("1"), Digits("2.50")]
    for word in ("NaN", "Infinity", "-Infinity"):
        with pytest.raises(ValueError, match=f"{word} is no JSON"):
            json_value(word)


def test_names_of_types() -> None:
    values = [True, Digits("-5"), Digits("5.0"), Digits("1e5"), 5, 5.5, "a", [], {}, None]
    assert [type_name(value) for value in values] == [
        *("boolean", "integer", "number", "number", "integer", "number", "string", "array", "object", "null"),
    ]


# Formats.


def test_formats_are_parts_of_structural_tags() -> None:
    assert formats.text("a") == {"type": "const_string", "value": "a"}
    assert formats.regex("a+") == {"type": "regex", "pattern": "a+"}
    assert formats.json_value({}) == {"type": "json_schema", "json_schema": {}}
    a, b = formats.text("a"), formats.text("b")
    assert formats.sequence(a, b) == {"type": "sequence", "elements": [a, b]}
    assert formats.one_of(a, b) == {"type": "or", "elements": [a, b]}
    tag = formats.tag("<", a, ">")
    assert tag == {"type": "tag", "begin": "<", "content": a, "end": ">"}
    assert formats.tag("<", a)["end"] == ""
    listed = {"type": "tags_with_separator", "tags": [tag], "separator": ",", "at_least_one": True}
    assert formats.listed([tag], separator=",", is_parallel=True) == {**listed, "stop_after_first": False}
    assert formats.listed([tag], separator=",", is_parallel=False) == {**listed, "stop_after_first": True}
    optional = {"type": "tags_with_separator", "tags": [tag], "separator": "", "stop_after_first": True}
    assert formats.optional(tag) == optional
    triggered = {"type": "triggered_tags", "triggers": ["<", "["], "tags": [tag]}
    assert formats.triggered("<", "[", tags=[tag], is_parallel=True) == {**triggered, "stop_after_first": False}
    assert formats.triggered("<", "[", tags=[tag], is_parallel=False) == {**triggered, "stop_after_first": True}
    assert formats.NOTHING == {"type": "regex", "pattern": "()"}
    marked = formats.tag("m", a)
    assert formats.at_the_beginning(a, plain="p", marker="m") == formats.one_of(
        a,
        marked,
        formats.regex(r"\s*"),
        formats.sequence(formats.regex(r"\s*(p)"), formats.triggered("m", tags=[marked], is_parallel=False)),
    )


def test_an_array_of_calls_has_a_definition_for_each_tool() -> None:
    schemas = {"f": {"$ref": "#", "x": [{"$ref": "#/$defs/a"}]}, "g": {"$ref": "http://x"}}
    one = {
        "type": "object",
        "properties": {"name": {"const": "f"}, "parameters": {"$ref": "#/$defs/tool0"}},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }
    other = {
        "type": "object",
        "properties": {"name": {"const": "g"}, "parameters": {"$ref": "#/$defs/tool1"}},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }
    wanted = {
        "type": "array",
        "items": {"anyOf": [one, other]},
        "minItems": 1,
        "$defs": {
            "tool0": {"$ref": "#/$defs/tool0", "x": [{"$ref": "#/$defs/tool0/$defs/a"}]},
            "tool1": {"$ref": "http://x"},
        },
    }
    assert formats.array_schema(schemas, is_parallel=True) == wanted
    assert formats.array_schema(schemas, is_parallel=False) == {**wanted, "maxItems": 1}
    named = formats.array_schema({"f": {}}, is_parallel=True, arguments="arguments")
    assert named["items"]["anyOf"][0]["required"] == ["name", "arguments"]


def test_a_family_with_frames_has_a_format_of_its_own() -> None:
    hermes = find_tool_parser("hermes")
    assert hermes.free_format({"f": {}}, is_parallel=True) == formats.triggered(
        "<tool_call>",
        tags=[formats.tag('<tool_call>\n{"name": "f", "arguments": ', formats.json_value({}), "}\n</tool_call>")],
        is_parallel=True,
    )
    assert Slashes.free_format({"f": {}}, is_parallel=True) is None
