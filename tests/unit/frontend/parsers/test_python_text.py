"""Literals of Python as models write them are what Python reads, JSON's words besides; all else is refused."""

import ast
import json
from typing import Any

import pytest

from pagoda_frontend.tool_parsers.python_text import MAX_DEPTH, CallSpan, read_call, read_python


def read(text: str) -> Any:
    return read_python(text, number=json.loads)


def call(text: str) -> tuple[str, dict[str, Any]]:
    return read_call(text, number=json.loads)


@pytest.mark.parametrize(
    "text",
    [
        *("1", "-1", "+1", "0", "1_000", "1.5", "-1.5e3", "1E-2", ".5", "5."),
        *("0x1F", "-0XfF", "0o17", "0b1_01"),
        *("'a'", '"a"', "'''a'b'''", '"""a\nb"""', "''", "'a' \"b\"", r"r'a\n'", "u'a'", "'\\\n'"),
        *(r"'\n\t\r\a\b\f\v\\\'\"'", r"'\x41\u00e9\U0001F600\101\0'", r"'\N{BULLET}'", "'é 日本 🙂'"),
        *("True", "False", "None", "[]", "{}", "(1)", "[1]", "[1,]", "[1, 'a', None]", "[[1], [2, [3]]]"),
        *("{'a': 1}", "{'a': {'b': [1, 2]}, 'c': None,}", "{'a' 'b': 1}", " [ 1 ,\n2 ] ", "{'a': 1, 'a': 2}"),
    ],
)
def test_what_python_reads(text: str) -> None:
    assert read(text) == ast.literal_eval(text.strip())


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True),
        ("false", False),
        ("null", None),
        ("()", []),
        ("(1, 2)", [1, 2]),
        ("(1,)", [1]),
        ("[true, null]", [True, None]),
    ],
)
def test_what_json_has_besides(text: str, value: Any) -> None:
    assert read(text) == value


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "a", "[", "[1", "[1 2]", "(1", "{", "{'a'}", "{'a': }", "{'a': 1", "{1: 2}", "{a: 1}", "[,]"),
        *("01", "-07.5", "1e999", "-1e999"),
        *("'a", '"a', "'a\\'", "1 2", "1]", "'a' 1", "f(1)", "1 + 1", "--1", "[1]]", "{} {}", "lambda: 1"),
    ],
)
def test_what_is_no_literal(text: str) -> None:
    with pytest.raises(ValueError):
        read(text)


@pytest.mark.parametrize("text", [r"\q", r"\8", r"\9", r"\xg", r"\x4", r"\u00", r"\N{NO SUCH NAME}", r"\U00110000"])
def test_what_escapes_nothing_stays(text: str) -> None:
    assert read(f"'{text}'") == text


@pytest.mark.parametrize(
    "call_text",
    [
        r"(a='it\'s )')",
        r'(a="\")")',
        "(a=''')'')''')",
        "(a='')",
        "(a='', b=\"\")",
        '(a="""x")""")',
        "(a=[1, {'b': (2,)}])",
        r"(a='\\')",
    ],
)
def test_a_call_ends_at_its_bracket_however_the_text_is_cut(call_text: str) -> None:
    text = call_text + ")'\""
    for first in range(len(text) + 1):
        for second in range(first, len(text) + 1):
            span = CallSpan()
            for end in (first, second):
                span.read(text[:end], is_last=False)
            span.read(text, is_last=True)
            assert (span.place, span.is_closed) == (len(call_text), True), (text[:first], text[first:second])


def test_a_quote_at_the_end_of_all_begins_a_string() -> None:
    span = CallSpan()
    span.read("(a='", is_last=False)
    assert span.place == 3, "three quotes may come"
    span.read("(a='", is_last=True)
    assert (span.place, span.is_closed) == (4, False)


def test_depth_is_bounded() -> None:
    value = read("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    assert value != []
    with pytest.raises(ValueError, match="too deep"):
        read("[" * (MAX_DEPTH + 1) + "1" + "]" * (MAX_DEPTH + 1))


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        ("f()", "f", {}),
        (" f ( ) ", "f", {}),
        ("a.b_c(x=1)", "a.b_c", {"x": 1}),
        ("f(x=1, y='a', z=[None],)", "f", {"x": 1, "y": "a", "z": [None]}),
        ("f(x={'a': (1,)})", "f", {"x": {"a": [1]}}),
        ("f(\n  x = true\n)\n", "f", {"x": True}),
    ],
)
def test_calls(text: str, name: str, arguments: dict[str, Any]) -> None:
    assert call(text) == (name, arguments)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("f(x=1, x=2)", "x is there twice"),
        ("f() g()", "there is text after it"),
        ("f()x", "there is text after it"),
        ("f().y", "there is text after it"),
        ("f(1)", ""),
        ("f(x)", ""),
        ("f(x=)", ""),
        ("f(x=1", ""),
        ("f(x=1 y=2)", ""),
        ("f", ""),
        ("(x=1)", ""),
        ("1f()", ""),
        ("", ""),
    ],
)
def test_what_is_no_call(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message or "."):
        call(text)
