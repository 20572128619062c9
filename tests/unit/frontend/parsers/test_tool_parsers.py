"""Tool call parsers: what they find, and that it does not depend on how the text is cut."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagoda_frontend.tool_parsers import ToolParser
from pagoda_frontend.tool_parsers.harmony import MAX_HEADER_CHARS
from pagoda_frontend.tool_parsers.json_calls import RequiredCallsParser
from pagoda_frontend.tool_parsers.named import NamedCallParser
from pagoda_frontend.tool_parsers.pythonic import MAX_CALL_CHARS
from pagoda_frontend.tool_parsers.registry import find_tool_parser, tool_parser_names
from pagoda_frontend.tool_parsers.values import typed_value

SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "units": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "options": {"type": "object"},
            "is_exact": {"type": "boolean"},
        },
    },
    "now": {"type": "object", "properties": {}},
}
Call = tuple[str, str]
Message = tuple[str, str, list[Call]]
"""Reasoning, content, and (name, arguments) of each call."""


def make(name: str) -> ToolParser:
    if name == "required":
        return RequiredCallsParser(schemas=SCHEMAS)
    if name == "named":
        return NamedCallParser(schemas=SCHEMAS, name="weather")
    return find_tool_parser(name)(schemas=SCHEMAS)


ALL = [*tool_parser_names(), "required", "named"]


def parse(name: str, *texts: str) -> Message:
    parser = make(name)
    reasoning, content = "", ""
    calls: list[list[str]] = []
    for piece in [*map(parser.append, texts), parser.finish()]:
        reasoning += piece.reasoning
        content += piece.content
        for call in piece.tool_calls:
            if call.name is not None:
                assert call.index == len(calls)
                assert call.id
                assert call.arguments == ""
                calls.append([call.name, ""])
            else:
                assert call.id is None
                assert call.index == len(calls) - 1
                assert call.arguments
                calls[call.index][1] += call.arguments
    return reasoning, content, [(call, arguments) for call, arguments in calls]


WEATHER = '{"city": "Rome \\"{}\\" <b>", "days": 3}'
FOUND: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    (
        "hermes",
        'Let me look.\n<tool_call>\n{"name": "weather", "arguments": ' + WEATHER + "}\n</tool_call>",
        "Let me look.\n",
        [("weather", json.loads(WEATHER))],
    ),
    (
        "hermes",
        '<tool_call>{"name":"weather","arguments":{"city":"A"}}</tool_call>\n<tool_call>{"name":"now"}</tool_call>',
        "",
        [("weather", {"city": "A"}), ("now", {})],
    ),
    ("hermes", '<tool_call>{"arguments": {"days": 1}, "name": "weather"}</tool_call>', "", [("weather", {"days": 1})]),
    ("hermes", '<tool_call>{"name": "weather", "arguments": "{\\"days\\": 1}"}', "", [("weather", {"days": 1})]),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>\nDone.', "\nDone.", [("now", {})]),
    ("hermes", '<tool_call>{"name": "now", "arguments": {}, "id": 5}</tool_call>', "", [("now", {})]),
    (
        "hermes",
        '<tool_call>{"name": "weather", "arguments": {"city": "a\nb"}}</tool_call>',
        "",
        [("weather", {"city": "a\nb"})],
    ),
    ("llama3_json", ' {"name": "weather", "parameters": {"days": 2}}', "", [("weather", {"days": 2})]),
    (
        "llama3_json",
        '<|python_tag|>{"type": "function", "name": "now", "parameters": {}}; '
        '{"name": "weather", "parameters": {"days": 1}}',
        "",
        [("now", {}), ("weather", {"days": 1})],
    ),
    *(
        (name, f'{{"{field}": {{"days": 1}}, "name": "weather"}}', "", [("weather", {"days": 1})])
        for name in ("llama3_json", "llama4_json")
        for field in ("parameters", "arguments")
    ),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "now", "arguments": {}}, {"name": "weather", "arguments": {"days": 1}}]',
        "",
        [("now", {}), ("weather", {"days": 1})],
    ),
    (
        "mistral",
        'So: [TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]weather[ARGS]{"days": 1}',
        "So: ",
        [("now", {}), ("weather", {"days": 1})],
    ),
    ("mistral", '[TOOL_CALLS]weather{"days": 1}', "", [("weather", {"days": 1})]),
    ("granite", '<|tool_call|>[{"name": "now", "arguments": {}}]', "", [("now", {})]),
    ("phi4_mini_json", 'functools[{"name": "weather", "arguments": {"days": 1}}]', "", [("weather", {"days": 1})]),
    (
        "deepseek_v3",
        "Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n" + WEATHER + "\n```"
        "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Hm.",
        [("weather", json.loads(WEATHER)), ("now", {})],
    ),
    (
        "deepseek_v31",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
        + WEATHER
        + "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        [("weather", json.loads(WEATHER))],
    ),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{}"
        "<|tool_call_end|><|tool_calls_section_end|>",
        "",
        [("weather", {})],
    ),
    (
        "qwen3_xml",
        "I look.\n<tool_call>\n<function=weather>\n<parameter=city>\n5\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n"
        '<parameter=units>\nnull\n</parameter>\n<parameter=options>\n{"a": [1]}\n</parameter>\n'
        "<parameter=is_exact>\nTrue\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "I look.\n",
        [("weather", {"city": "5", "days": 3, "units": None, "options": {"a": [1]}, "is_exact": True}), ("now", {})],
    ),
    ("qwen3_coder", "<function=weather><parameter=city>two\nlines", "", [("weather", {"city": "two\nlines"})]),
    (
        "glm45",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n<arg_key>days</arg_key>"
        "<arg_value>2</arg_value>\n</tool_call>",
        "",
        [("weather", {"city": "Rome", "days": 2})],
    ),
    (
        "pythonic",
        """[weather(city='a ")]', options={"x": [1, (2, 3)], "y": true}), geo.now()]""",
        "",
        [("weather", {"city": 'a ")]', "options": {"x": [1, [2, 3]], "y": True}}), ("geo.now", {})],
    ),
    ("pythonic", "[now()]]", "]", [("now", {})]),
    ("pythonic", "[now()] [geo.now(x=1)]", "", [("now", {}), ("geo.now", {"x": 1})]),
    ("pythonic", " \n[now()]", "", [("now", {})]),
    ("pythonic", r"[weather(city='it\'s ) so', days=0x1F)]", "", [("weather", {"city": "it's ) so", "days": 31})]),
    ("mistral", "So: [TOOL_CALLS]now ", "So: ", []),
    (
        "gemma4",
        '<|tool_call>call:weather{<|"|>city<|"|>:<|"|>Rome<|"|>,"days":2}<tool_call|>',
        "",
        [("weather", {"city": "Rome", "days": 2})],
    ),
    ("openai", "<|channel|>commentary to=functions.now <|message|> \n", "", [("now", {})]),
    ("llama4_pythonic", "<|python_start|>[now()]<|python_end|>", "", [("now", {})]),
    (
        "openai",
        "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>" + WEATHER + "<|call|>",
        "",
        [("weather", json.loads(WEATHER))],
    ),
    ("openai", "<|start|>assistant to=functions.now<|channel|>commentary<|message|>", "", [("now", {})]),
    (
        "required",
        '[{"name": "now", "parameters": {}}, {"name":"weather","parameters":{"days":1}}]',
        "",
        [("now", {}), ("weather", {"days": 1})],
    ),
    ("named", ' {"days": 1}', "", [("weather", {"days": 1})]),
]

NOT_FOUND: list[tuple[str, str]] = [
    ("hermes", "no call"),
    ("hermes", "<tool_call>"),
    ("hermes", "<tool_call>\nnot json\n</tool_call>"),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "weather", "argu'),
    ("hermes", "a < b and <tool_cal"),
    ("hermes", " spaces \n"),
    ("llama3_json", '{"name": "Alice", "age": 5}'),
    ("llama3_json", 'Hello {"name": "unknown", "parameters": {}}'),
    ("llama3_json", '{"answer": {"name": "now"}, "more": [{"name": "now"}]} {'),
    ("granite", "<|tool_call|>[]"),
    ("phi4_mini_json", "use functools.partial"),
    ("deepseek_v3", "<｜tool▁call▁begin｜>weather {}"),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Ro'),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}'),
    ("glm45", "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>"),
    ("qwen3_xml", "<function=>x"),
    ("pythonic", "[1, 2, 3]"),
    ("pythonic", "[link](url)"),
    ("pythonic", "[__import__('os').system('true')]"),
    ("pythonic", "[f(x=g())]"),
    ("pythonic", "[f(1)]"),
    ("pythonic", "[f(x=1e999)]"),
    ("pythonic", "[" * 1000),
    ("openai", "plain text"),
    ("required", '{"name": "now"}'),
    ("required", "[]"),
    ("required", '[{"name": "now"}]'),
    ("named", "sorry"),
]


def at_every_split(text: str) -> list[tuple[str, ...]]:
    return [(text[:place], text[place:]) for place in range(1, len(text))]


@pytest.mark.parametrize(("name", "text", "content", "calls"), FOUND)
def test_calls_are_found_wherever_the_text_is_cut(
    name: str, text: str, content: str, calls: list[tuple[str, Any]]
) -> None:
    whole = parse(name, text)
    assert whole[:2] == ("", content)
    assert [(call, json.loads(arguments)) for call, arguments in whole[2]] == calls
    assert parse(name, *text) == whole
    for texts in at_every_split(text):
        assert parse(name, *texts) == whole


@pytest.mark.parametrize(("name", "text"), NOT_FOUND)
def test_what_is_no_call_is_content(name: str, text: str) -> None:
    assert parse(name, text) == parse(name, *text) == ("", text, [])
    for texts in at_every_split(text[:60]):
        assert parse(name, *texts) == ("", text[:60], [])


PIECES = [
    *(
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "<|python_tag|>",
        "functools",
        "<|tool_call|>",
    ),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "function<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<function=", "</function>"),
    *("<parameter=", "</parameter>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|python_start|>"),
    *("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|call|>", " to=functions.now", "analysis", "final"),
    *(
        '{"name": "weather", "arguments": ',
        '{"name": "now", "parameters": {}}',
        '"name"',
        ":",
        ",",
        ";",
        "weather",
        "now",
    ),
    *(
        "{",
        "}",
        "[",
        "]",
        "(",
        ")",
        '"',
        "'",
        "\\",
        "\n",
        " ",
        ">",
        "<",
        "=",
        "1",
        "true",
        "null",
        "a",
        "é",
        "```json\n",
        "a" * 150,
        '{"name": "now", "arguments": {"',
    ),
]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=14), st.data())
def test_no_text_is_parsed_differently_in_pieces(pieces: list[str], data: st.DataObject) -> None:
    text = "".join(pieces)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=5)))
    texts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for name in ALL:
        whole = parse(name, text)
        assert parse(name, *texts) == whole, name
        assert parse(name, *text) == whole, name


def test_constrained_arguments_stream_while_they_are_written() -> None:
    parser = make("hermes")
    parser.is_constrained = True
    [begin, arguments] = parser.append('<tool_call>{"name": "weather", "arguments": {"city": "Ro').tool_calls
    assert (begin.name, begin.arguments, arguments.arguments) == ("weather", "", '{"city": "Ro')
    assert parser.append("me").tool_calls[0].arguments == "me"


def test_free_arguments_stream_once_they_are_long() -> None:
    parser = make("hermes")
    assert parser.append('<tool_call>{"name": "weather", "arguments": {"city": "' + "a" * 240).tool_calls == []
    [begin, arguments] = parser.append("a" * 20).tool_calls
    assert (begin.name, arguments.arguments) == ("weather", '{"city": "' + "a" * 260)
    assert parser.append("b").tool_calls[0].arguments == "b"


def test_short_arguments_that_are_no_json_make_no_call_and_long_ones_are_shown_as_they_are() -> None:
    short = '<tool_call>{"name": "weather", "arguments": {"city": ...}}</tool_call> Done.'
    assert parse("hermes", short) == parse("hermes", *short) == ("", short, [])
    long = '<tool_call>{"name": "weather", "arguments": {"a": "' + "a" * 300 + "\", 'b': 1}}</tool_call> Done."
    expected = '{"a": "' + "a" * 300 + "\", 'b': 1}}"
    assert parse("hermes", long) == parse("hermes", *long) == ("", " Done.", [("weather", expected)])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mistral", "[TOOL_CALLS]weather[ARGS]{'days': 1}[TOOL_CALLS]now[ARGS]{}"),
        (
            "kimi_k2",
            "<|tool_calls_section_begin|>"
            "<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{'days': 1}<|tool_call_end|>"
            "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
            "<|tool_calls_section_end|>",
        ),
    ],
)
def test_framed_arguments_that_are_no_json_end_at_their_marker(name: str, text: str) -> None:
    expected = ("", "", [("weather", "{'days': 1}"), ("now", "{}")])
    assert parse(name, text) == parse(name, *text) == expected


def test_a_long_call_that_is_cut_off_keeps_the_beginning_of_its_arguments() -> None:
    begin = '{"city": "' + "a" * 300
    text = '<tool_call>{"name": "weather", "arguments": ' + begin
    assert parse("hermes", text) == parse("hermes", *text) == ("", "", [("weather", begin)])
    text = "<tool_call>weather<arg_key>city</arg_key><arg_value>" + "a" * 300
    assert parse("glm45", text) == parse("glm45", *text) == ("", "", [("weather", '{"city": "' + "a" * 300 + '"}')])
    short = '<tool_call>{"name": "weather", "arguments": {"days": 1}</tool_call>'
    assert parse("hermes", short)[2] == [("weather", '{"days": 1}')], "only a brace is missing"


@pytest.mark.parametrize("num_too_many", [0, 1])
def test_a_head_of_harmony_is_no_longer_than_1024_characters(num_too_many: int) -> None:
    head = "<|channel|>commentary to=functions.now"
    text = head + " " * (MAX_HEADER_CHARS - len(head) + num_too_many) + "<|message|>{}"
    reasoning, content, calls = parse("openai", text)
    assert parse("openai", *text) == (reasoning, content, calls)
    assert calls == ([] if num_too_many else [("now", "{}")])
    assert content == (text.removeprefix("<|channel|>") if num_too_many else "")


@pytest.mark.parametrize("num_too_many", [0, 1])
def test_a_call_of_python_is_no_longer_than_256_kib(num_too_many: int) -> None:
    call = "weather(city='" + "a" * (MAX_CALL_CHARS - len("weather(city='')") + num_too_many) + "')"
    content, calls = parse("pythonic", f"[{call}]")[1:]
    assert (content, [name for name, _ in calls]) == ((f"[{call}]", []) if num_too_many else ("", ["weather"]))


def test_framed_arguments_that_are_cut_off_are_told_as_far_as_they_came() -> None:
    text = '[TOOL_CALLS]weather[ARGS]{"city": "Rome\\'
    assert parse("mistral", text) == parse("mistral", *text) == ("", "", [("weather", '{"city": "Rome\\')])


def test_an_escape_that_is_cut_off_is_neither_argument_nor_content() -> None:
    begin = '{"city": "' + "a" * 300
    text = '<tool_call>{"name": "weather", "arguments": ' + begin + "\\"
    assert parse("hermes", text) == parse("hermes", *text) == ("", "", [("weather", begin)])


def test_the_channels_of_harmony_are_told_apart() -> None:
    text = (
        "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>commentary to=functions.now "
        "<|constrain|>json<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>Hello.<|return|>"
    )
    assert parse("openai", text) == parse("openai", *text) == ("Think.", "Hello.", [("now", "{}")])


def test_ids_are_as_the_models_templates_want_them() -> None:
    [begin, _] = make("mistral").append("[TOOL_CALLS]now[ARGS]{}").tool_calls
    assert len(begin.id or "") == 9
    text = "<|tool_call_begin|>functions.now:3<|tool_call_argument_begin|>{}"
    assert make("kimi_k2").append(text).tool_calls[0].id == "functions.now:3"
    assert (make("hermes").append('<tool_call>{"name": "now"}').tool_calls[0].id or "").startswith("call_")


def test_a_word_for_nothing_is_null_only_where_a_schema_wants_it_or_it_is_json() -> None:
    for text, schema, wanted in (
        ("null", {}, None),
        ("None", {}, "None"),
        ("None", {"type": ["string", "null"]}, None),
        ("None", {"type": "integer"}, None),
        ("None", {"type": ["string", "integer"]}, "None"),
    ):
        assert typed_value(text, schema, reads_untyped=True) == wanted, (text, schema)


@pytest.mark.parametrize(
    ("word", "value"),
    [
        *((word, None) for word in ("null", "None", "nil", "NULL")),
        *((word, True) for word in ("true", "True")),
        *((word, False) for word in ("false", "False")),
        ("5", 5),
        ("-2.5", -2.5),
        ("nothing", "nothing"),
        ("TRUE", "TRUE"),
    ],
)
def test_gemma_s_words_without_quotes_are_values_where_they_name_one(word: str, value: Any) -> None:
    _, _, [(name, arguments)] = parse("gemma4", f"<|tool_call>call:weather{{options:{{n: {word} }}}}<tool_call|>")
    assert name == "weather"
    assert json.loads(arguments) == {"options": {"n": value}}
