"""Literals of Python as models write them are what Python reads, JSON's words besides; all else is refused."""

import ast
import json
from typing import Any

import pytest

from pagoda_frontend.tool_parsers.python_text import MAX_DEPTH, read_call, read_python


def read(text: str) -> Any:
    return read_python(text, number=json.loads)


def call(text: str) -> tuple[str, dict[str, Any]]:
    return read_call(text, number=json.loads)


@pytest.mark.parametrize(
    "text",
    [
        *("1", "-1", "+1", "0", "1_000", "1.5", "-1.5e3", "1E-2", ".5", "5."),
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
        *("'a", '"a', "'a\\'", "1 2", "1]", "'a' 1", "f(1)", "1 + 1", "--1", "[1]]", "{} {}", "lambda: 1"),
    ],
)
def test_what_is_no_literal(text: str) -> None:
    with pytest.raises(ValueError):
        read(text)


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
