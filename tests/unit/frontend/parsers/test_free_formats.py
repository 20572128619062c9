"""Where a model is free to call strict tools: any text may be said, and whatever is read as a call fits its schema."""

import json
from random import Random
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from llguidance import LLExecutor, LLMatcher

from pagoda_common.errors import InvalidRequest
from pagoda_common.grammar.matcher import GrammarCompiler
from pagoda_frontend.conversation.tool_constraint import constraint_of
from pagoda_frontend.conversation.tools import ToolPlan
from pagoda_frontend.openai.protocol import Tool
from pagoda_frontend.tool_parsers.registry import find_tool_parser, tool_parser_names

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["C", "F"]},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "spans": {"type": "array", "items": {"$ref": "#/$defs/span"}, "maxItems": 2},
        "code": {"type": "string", "maxLength": 3},
    },
    "required": ["city", "unit"],
    "$defs": {"span": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
}
LIMIT = {"type": "object", "properties": {"limit": {"type": "number", "minimum": 0, "maximum": 5}}}
SCHEMAS = {"weather": WEATHER, "list_all": LIMIT, "now": {"type": "object", "properties": {}}, "log": None}
TEXTS = ["Hello.", "", "a [b](c) {d} < e", "\n\n1. 5 < 6", "[1, 2]", "<p>"]
SEEN = '{"city": "Rome", "days": 3, "unit": "C"}'
CALLS = {
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    + SEEN
    + "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": "So: <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
    + SEEN
    + "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
    '<｜DSML｜parameter name="city" string="true">Rome'
    '</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="unit" string="true">C</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "gemma4": '<|tool_call>call:weather{city:<|"|>Rome<|"|>,unit:<|"|>C<|"|>,days:3}<tool_call|>',
    "glm45": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>3</arg_value>\n<arg_key>unit</arg_key>\n<arg_value>C</arg_value>\n</tool_call>",
    "granite": '<|tool_call|>[{"name": "weather", "arguments": ' + SEEN + "}]",
    "hermes": 'So:\n<tool_call>\n{"name": "weather", "arguments": ' + SEEN + "}\n</tool_call>",
    "internlm": 'So: <|action_start|><|plugin|>\n{"name": "weather", "parameters": ' + SEEN + "}<|action_end|>",
    "jamba": 'So: <tool_calls>[{"name": "weather", "arguments": ' + SEEN + "}]</tool_calls>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    + SEEN
    + "<|tool_call_end|><|tool_calls_section_end|>",
    "lfm2": '<|tool_call_start|>[weather(city="Rome", unit="C", days=3)]<|tool_call_end|>Done.',
    "llama3_json": '{"name": "weather", "parameters": ' + SEEN + "}",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Rome</parameter>\n'
    '<parameter name="days">3</parameter>\n<parameter name="unit">C</parameter>\n</invoke>\n</minimax:tool_call>',
    "mistral": "[TOOL_CALLS]weather[ARGS]" + SEEN,
    "olmo3": '<function_calls>\nweather(city="Rome", unit="C", days=3)\nnow()\n</function_calls>',
    "openai": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
    "<|constrain|>json<|message|>" + SEEN,
    "phi4_mini_json": 'functools[{"name": "weather", "arguments": ' + SEEN + "}]",
    "pythonic": '[weather(city="Rome", unit="C", days=3)]',
    "seed_oss": "So: <seed:tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n"
    "</parameter>\n<parameter=unit>\nC\n</parameter>\n</function>\n</seed:tool_call>",
    "step3": "<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>"
    '<steptml:invoke name="weather">\n<steptml:parameter name="city">Rome</steptml:parameter>\n'
    '<steptml:parameter name="days">3</steptml:parameter>\n<steptml:parameter name="unit">C</steptml:parameter>\n'
    "</steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>",
    "qwen3_xml": "So: <tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n"
    "</parameter>\n<parameter=unit>\nC\n</parameter>\n</function>\n</tool_call>",
}
MORE_CALLS = {
    "llama3_json": ['<|python_tag|>{"type": "function", "name": "now", "parameters": {}}; ' + CALLS["llama3_json"]],
    "mistral": ['[TOOL_CALLS][{"name": "now", "arguments": {}}]', "[TOOL_CALLS]now[CALL_ID]123456789[ARGS]{}"],
    "pythonic": [
        "[now(), list_all(), list_all(limit=2)]",
        "<|python_start|>[now()]<|python_end|>",
        "[log(a='x)', b=f())]",
    ],
    "openai": ["<|channel|>final<|message|>Hello."],
    "qwen3_xml": ["<function=now>\n</function>", "<tool_call>\n<function=list_all>\n</function>\n</tool_call> and"],
}
BROKEN = {"days": ("3", "30"), "unit": ('"C"', '"K"')}
NAMES = sorted(CALLS)


class Letters:
    """Stands for a tokenizer: a token is a byte."""

    vocab_size = 256
    special_token_ids = frozenset({0})

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(text.encode())


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer=Letters(), vocab_size=256)  # type: ignore[arg-type]


def plan_of(schemas: dict[str, Any]) -> ToolPlan:
    """All tools strict but those without a schema."""
    functions = [
        {"name": name, "strict": schema is not None, **({"parameters": schema} if schema else {})}
        for name, schema in schemas.items()
    ]
    return ToolPlan(
        tools=[Tool.model_validate({"type": "function", "function": function}) for function in functions], choice="auto"
    )


def matcher_of(compiler: GrammarCompiler, name: str) -> LLMatcher:
    constraint = constraint_of(plan_of(SCHEMAS), find_tool_parser(name))
    assert constraint is not None
    return compiler.compile(constraint)


def accepts(matcher: LLMatcher, text: str) -> bool:
    copy, letters = matcher.deep_copy(), list(text.encode())
    return copy.try_consume_tokens(letters) == len(letters) and copy.is_accepting()


def calls_in(name: str, text: str) -> list[tuple[str, str]]:
    """Names and arguments of the calls that the parser reads."""
    parser = find_tool_parser(name)(schemas=plan_of(SCHEMAS).schemas)
    parser.is_strict = True
    calls: list[tuple[str, str]] = []
    for delta in (*parser.append(text).tool_calls, *parser.finish().tool_calls):
        if delta.name is not None:
            calls.append((delta.name, delta.arguments))
        else:
            calls[-1] = (calls[-1][0], calls[-1][1] + delta.arguments)
    return calls


@pytest.mark.parametrize("name", NAMES)
def test_a_call_as_the_model_writes_it_is_accepted(compiler: GrammarCompiler, name: str) -> None:
    matcher = matcher_of(compiler, name)
    assert accepts(matcher, CALLS[name])
    assert json.loads(calls_in(name, CALLS[name])[0][1]) == json.loads(SEEN)
    assert [text for text in MORE_CALLS.get(name, []) if not accepts(matcher, text)] == []


@pytest.mark.parametrize("name", NAMES)
def test_wrong_arguments_are_not(compiler: GrammarCompiler, name: str) -> None:
    matcher = matcher_of(compiler, name)
    call = CALLS[name]
    for wrong in (call.replace("3", "30"), call.replace("weather", "water"), call.replace("city", "town")):
        if calls_in(name, wrong):
            assert not accepts(matcher, wrong), wrong


@pytest.mark.parametrize("name", [name for name in NAMES if name != "openai"])
def test_all_else_may_be_said(compiler: GrammarCompiler, name: str) -> None:
    matcher = matcher_of(compiler, name)
    assert [text for text in TEXTS if not accepts(matcher, text)] == []


@pytest.mark.parametrize("name", NAMES)
def test_whatever_is_read_as_a_call_fits(compiler: GrammarCompiler, name: str) -> None:
    matcher, random = matcher_of(compiler, name), Random(name)
    plan = plan_of(SCHEMAS)
    schemas, num_calls = plan.closed_schemas(), 0
    for call in (CALLS[name], *MORE_CALLS.get(name, [])):
        for _ in range(6):
            beginning = call[: random.randint(1, len(call))]
            text = walk(compiler, matcher, beginning, random)
            for called, arguments in calls_in(name, text) if text is not None else ():
                num_calls += 1
                Draft202012Validator(schemas[called]).validate(json.loads(arguments))
    assert num_calls


def walk(compiler: GrammarCompiler, template: LLMatcher, beginning: str, random: Random) -> str | None:
    """A text that goes on after `beginning` at random; None when it came to no end."""
    matcher, executor, text = template.deep_copy(), LLExecutor(1), bytearray(beginning.encode())
    assert matcher.try_consume_tokens(list(text)) == len(text)
    bits = np.zeros((1, -(-compiler.num_bits // 32)), dtype=np.uint32)
    for _ in range(300):
        bits[:] = 0
        executor.unsafe_compute_mask_ptr([(matcher, 0)], bits.ctypes.data, bits.nbytes, 1)
        allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8)[0], bitorder="little"))
        if compiler.end_id in allowed and (len(allowed) == 1 or random.random() < 0.2):
            return text.decode()
        allowed = allowed[allowed < compiler.end_id]
        closing = [token for token in allowed if token in b'"]})\n</']
        plain = [token for token in allowed if token < 128]
        token = int(
            random.choice(closing) if closing and random.random() < 0.5 else random.choice(plain or list(allowed))
        )
        assert matcher.consume_token(token)
        text.append(token)
    return None


@pytest.mark.parametrize(
    ("name", "schema", "message"),
    [
        ("pythonic", {"type": "object", "properties": {"not a name": {}}}, "not a name"),
        ("pythonic", {"type": "object", "anyOf": [{"required": ["a"]}]}, "anyOf beside properties"),
        ("qwen3_xml", {"type": "object", "properties": {"a<b": {}}}, "a<b"),
        ("qwen3_xml", {"type": "object", "properties": {"a": {"type": "string", "format": "date"}}}, "format of 'a'"),
        ("glm45", {"type": "object", "required": ["a"]}, "'a' required"),
        ("gemma4", {"type": "object", "properties": {"a:b": {}}}, "a property called 'a:b'"),
        ("gemma4", {"type": "object", "properties": {" a": {}}}, "a property called ' a'"),
        ("gemma4", {"type": "object", "properties": {"": {}}}, "a property called ''"),
        ("qwen3_xml", {"type": "object", "properties": {"a ": {}}}, "a property called 'a '"),
        ("qwen3_xml", {"type": "object", "properties": {"": {}}}, "a property called ''"),
        (
            "qwen3_xml",
            {"type": "object", "properties": {"a": {"enum": ["", "x</parameter>"]}}},
            "with the values of 'a'",
        ),
        (
            "qwen3_xml",
            {"type": "object", "properties": {"a": {"type": "string", "pattern": "a<$"}}},
            "with pattern of 'a'",
        ),
    ],
)
def test_what_a_dialect_cannot_promise_is_refused(name: str, schema: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        constraint_of(plan_of({"tool": schema}), find_tool_parser(name))
    assert caught.value.field == "tools"


@pytest.mark.parametrize(
    ("part", "values"),
    [
        ({"enum": ["one", "", "a</parameter>b", "two"]}, {"one": True, "two": True, "three": False, "": False}),
        ({"const": "one"}, {"one": True, "two": False}),
        ({"type": "string", "pattern": "^a[bc]+$"}, {"abc": True, "a": False, "xab": False}),
        ({"type": "string", "minLength": 2, "maxLength": 3}, {"ab": True, "abc": True, "a": False, "abcd": False}),
        ({"type": "string", "minLength": 2}, {"abcdef": True, "a": False}),
        ({"type": "string"}, {"a\nb": True, "": True}),
        ({"type": "integer"}, {"5": True, "five": False}),
    ],
)
def test_values_of_tags_are_as_the_schema_says(compiler: GrammarCompiler, part: Any, values: dict[str, bool]) -> None:
    schema = {"type": "object", "properties": {"never": False, "a": part}, "required": ["a"]}
    constraint = constraint_of(plan_of({"f": schema}), find_tool_parser("qwen3_xml"))
    assert constraint is not None
    matcher = compiler.compile(constraint)
    call = "<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>"
    assert {value: accepts(matcher, call.format(value)) for value in values} == values
    assert not accepts(matcher, call.format("one").replace("=a>", "=never>"))


def test_every_parser_holds_strict_tools() -> None:
    plan = plan_of(SCHEMAS)
    assert [name for name in tool_parser_names() if constraint_of(plan, find_tool_parser(name)) is None] == []
