"""The parts that all parsers share: markers, white space, values by their schema, formats."""

from typing import Any

import pytest

from pagoda_frontend.tool_parsers import formats
from pagoda_frontend.tool_parsers.base import Piece, ToolParser, after_start, find_marker
from pagoda_frontend.tool_parsers.named import NamedCallParser
from pagoda_frontend.tool_parsers.registry import find_tool_parser
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
        with pytest.raises(ValueError, match=f"{word} is not JSON"):
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
