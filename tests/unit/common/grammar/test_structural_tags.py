"""Structural tags as grammars, rule by rule, and every way in which one is wrong, word by word."""

import json
from typing import Any

import pytest

from pagoda_common.errors import InvalidRequest
from pagoda_common.grammar import structural_tag
from pagoda_common.grammar.structural_tag import structural_tag_grammar

SPECIAL = {"<|x|>": 7, "<|xy|>": 8}
ANY: dict[str, Any] = {"type": "any_text"}
KINDS = "const_string, json_schema, regex, grammar, any_text, sequence, or, tag, triggered_tags, tags_with_separator"


def text(value: Any) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def tag(begin: Any, content: Any = ANY, end: Any = "</t>") -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def of(kind: str, *elements: Any) -> dict[str, Any]:
    return {"type": kind, "elements": list(elements)}


def triggered(*tags: Any, triggers: Any = ("<a",), **more: Any) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": list(triggers), "tags": list(tags), **more}


def separated(*tags: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tags_with_separator", "tags": list(tags), **more}


def written(tag: Any) -> Any:
    return json.loads(structural_tag_grammar(json.dumps(tag), special_tokens=SPECIAL, json_options={"o": 1}))


A, B = tag("<a>", text("1")), tag("<ab>", text("2"))
ONE = ['"1" ("</t>")', '[lazy]TEXT "<a"', '"<a>" r1', 'r2 (">" r1)']
"""Rules of `A` below the trigger <a; what is [lazy] is written before."""


@pytest.mark.parametrize(
    ("value", "start", "rules"),
    [
        (ANY, "TEXT", []),
        (text("ab"), '"ab"', []),
        (text("a<|x|>b<|xy|>"), '"a" <[7]> "b" <[8]>', []),
        (
            {"type": "json_schema", "json_schema": {"type": "null"}},
            "r1",
            ['%json {"type": "null", "x-guidance": {"o": 1}}'],
        ),
        ({"type": "json_schema", "json_schema": True}, "r1", ['%json {"x-guidance": {"o": 1}}']),
        ({"type": "json_schema"}, "r1", ['%json {"x-guidance": {"o": 1}}']),
        ({"type": "regex", "pattern": "a+"}, "r1", ["/a+/"]),
        (of("or", text("a"), ANY), "r1", ['"a" | TEXT']),
        (of("sequence", text("a"), text("b")), "r1", ['"a" "b"']),
        (of("sequence", text("a"), ANY), "r1", ['"a" TEXT']),
        (of("sequence", ANY, text("b"), text("c")), "r2", ['[lazy]TEXT "b"', 'r1 "c"']),
        (of("sequence", ANY, text("<|x|>b")), "r1", ['TEXT <[7]> "b"']),
        (of("sequence", ANY, text("b<|x|>")), "r2", ['[lazy]TEXT "b"', "r1 <[7]>"]),
        (
            of("sequence", ANY, tag("<t>"), ANY),
            "r4",
            ['[lazy]TEXT "<t>"', '[lazy]TEXT "</t>"', "r2", "r1 r3 TEXT"],
        ),
        (tag("<t>"), "r3", ['[lazy]TEXT "</t>"', "r1", '"<t>" r2']),
        ({"type": "tag", "begin": "<t>"}, "r1", ['"<t>" TEXT ("")']),
        (tag("<t>", ANY, ["a", "b"]), "r4", ['[lazy]TEXT "a"', '[lazy]TEXT "b"', "r1 | r2", '"<t>" r3']),
        (tag("<t>", ANY, ["a", ""]), "r1", ['"<t>" TEXT ("a" | "")']),
        (tag("<|xy|>q", text("c"), ["<|x|>", "e"]), "r1", ['<[8]> "q" "c" (<[7]> | "e")']),
        (tag("", text("c"), ""), "r1", ['"" "c" ("")']),
        (triggered(A), "r4* TEXT", ONE),
        (triggered(A, at_least_one=True), "r3 r4* TEXT", ONE),
        (triggered(A, stop_after_first=True), "r5", [*ONE, "r4 | TEXT"]),
        (triggered(A, at_least_one=True, stop_after_first=True), "r3", ONE),
        (
            triggered(A, B, triggers=("<a", "<ab")),
            "r6* TEXT",
            [
                '"1" ("</t>")',
                '"2" ("</t>")',
                '[lazy]TEXT "<a"',
                '[lazy]TEXT "<ab"',
                '"<a>" r1 | "<ab>" r2',
                'r3 (">" r1) | r4 (">" r2)',
            ],
        ),
        (
            triggered(A, B, triggers=("<ab", "<a", "<unused")),
            "r6* TEXT",
            [
                '"1" ("</t>")',
                '"2" ("</t>")',
                '[lazy]TEXT "<ab"',
                '[lazy]TEXT "<a"',
                '"<a>" r1 | "<ab>" r2',
                'r3 (">" r2) | r4 (">" r1)',
            ],
        ),
        (separated(A), "(r3)?", ['"<a>" "1" ("</t>")', "r1", 'r2 ("" r2)*']),
        (
            separated(A, B, separator=",", at_least_one=True),
            "r4",
            ['"<a>" "1" ("</t>")', '"<ab>" "2" ("</t>")', "r1 | r2", 'r3 ("," r3)*'],
        ),
        (separated(A, stop_after_first=True), "(r2)?", ['"<a>" "1" ("</t>")', "r1"]),
        (separated(A, stop_after_first=True, at_least_one=True), "r2", ['"<a>" "1" ("</t>")', "r1"]),
    ],
)
def test_the_rules_of_a_format(value: Any, start: str, rules: list[str]) -> None:
    lines = [f"start: {start}", "TEXT: /(.|\\n)*/"]
    for number, rule in enumerate(rules, start=1):
        body = rule.removeprefix("[lazy]")
        lines.append(f"r{number}{'[lazy]' if body != rule else ''}: {body}")
    grammar = {"grammars": [{"name": "structural_tag", "lark_grammar": "\n".join(lines)}]}
    assert written({"format": value}) == grammar
    assert written({"type": "structural_tag", "format": value}) == grammar


def test_grammars_stand_beside() -> None:
    given = [{"type": "grammar", "grammar": f'start: "{name}"'} for name in "ab"]
    assert written({"format": of("or", *given)}) == {
        "grammars": [
            {"name": "structural_tag", "lark_grammar": "start: r1\nTEXT: /(.|\\n)*/\nr1: @g0 | @g1"},
            {"name": "g0", "lark_grammar": 'start: "a"'},
            {"name": "g1", "lark_grammar": 'start: "b"'},
        ]
    }


def test_the_older_shape_is_the_newer_one() -> None:
    older = [{"begin": "<a>", "schema": {"type": "null"}, "end": "</a>"}, {"begin": "<ab>"}]
    newer = triggered(
        tag("<a>", {"type": "json_schema", "json_schema": {"type": "null"}}, "</a>"),
        tag("<ab>", {"type": "json_schema", "json_schema": {}}, ""),
    )
    assert written({"structures": older, "triggers": ["<a"]}) == written({"format": newer})


def test_without_special_tokens_all_is_text() -> None:
    grammar = structural_tag_grammar(json.dumps({"format": text("a<|x|>")}), special_tokens={}, json_options={})
    assert json.loads(grammar)["grammars"][0]["lark_grammar"].startswith('start: "a<|x|>"\n')


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, " must be an object, got 3"),
        ({"type": "x"}, f".type must be one of {KINDS}, got 'x'"),
        ({"type": ["x"]}, f".type must be one of {KINDS}, got ['x']"),
        ({}, f".type must be one of {KINDS}, got None"),
        (text(""), ".value must be a string that is not empty, got ''"),
        (text(5), ".value must be a string that is not empty, got 5"),
        ({"type": "regex"}, ".pattern must be a string that is not empty, got None"),
        ({"type": "grammar", "grammar": ""}, ".grammar must be a string that is not empty, got ''"),
        ({"type": "json_schema", "json_schema": False}, ".json_schema must not be false"),
        ({"type": "json_schema", "json_schema": 3}, ".json_schema must be an object, got 3"),
        (of("or"), ".elements must be a list that is not empty, got []"),
        (of("sequence", 1), ".elements.0 must be an object, got 1"),
        (of("or", ANY, text(1)), ".elements.1.value must be a string that is not empty, got 1"),
        (of("sequence", ANY, text(1)), ".elements.1.value must be a string that is not empty, got 1"),
        (of("sequence", text("a"), ANY, ANY), ".elements.2 only const_string and tag may follow any_text"),
        (of("sequence", text("a"), text(1)), ".elements.1.value must be a string that is not empty, got 1"),
        (tag(3), ".begin must be a string, got 3"),
        (tag("a", 3), ".content must be an object, got 3"),
        (tag("a", ANY, 3), ".end must be a string, got 3"),
        (tag("a", ANY, ["b", None]), ".end must be a string, got None"),
        (tag("a", {"type": "x"}), f".content.type must be one of {KINDS}, got 'x'"),
        (triggered(), ".tags must be a list that is not empty, got []"),
        (triggered(3), ".tags.0 must be an object, got 3"),
        (triggered(A, triggers=()), ".triggers must be a list that is not empty, got []"),
        (triggered(A, triggers=("",)), ".triggers must be a string that is not empty, got ''"),
        (triggered(A, tag("")), ".tags.1.begin must be a string that is not empty, got ''"),
        (triggered(A, tag("<b>")), ".tags.1.begin must begin with one of the triggers, got '<b>'"),
        (triggered(A, tag("<a", text(1))), ".tags.1.content.value must be a string that is not empty, got 1"),
        (separated(A, 3), ".tags.1 must be an object, got 3"),
        (separated(A, tag(3)), ".tags.1.begin must be a string, got 3"),
        (separated(A, separator=3), ".separator must be a string, got 3"),
    ],
)
def test_what_is_wrong_is_named(value: Any, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        written({"format": value})
    assert (caught.value.message, caught.value.field) == (f"structural_tag.format{message}"[:500], "structured_outputs")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"type": "other", "format": ANY}, "structural_tag.type must be 'structural_tag', got 'other'"),
        ({}, "structural_tag.structures must be a list that is not empty, got None"),
        ({"structures": [3], "triggers": ["a"]}, "structural_tag.structures.0 must be an object, got 3"),
        (
            {"structures": [{"begin": "a"}]},
            "structural_tag.structures.triggers must be a list that is not empty, got None",
        ),
        (
            {"structures": [{"begin": None}], "triggers": ["a"]},
            "structural_tag.structures.tags.0.begin must be a string that is not empty, got None",
        ),
    ],
)
def test_what_is_wrong_of_the_whole_is_named(value: Any, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        written(value)
    assert caught.value.message == message


def test_a_schema_that_cannot_be_held_to_is_named_with_its_place() -> None:
    endless = {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}
    with pytest.raises(InvalidRequest, match=r"^structural_tag\.format\.elements\.1\.json_schema "):
        written({"format": of("or", ANY, {"type": "json_schema", "json_schema": endless})})


def test_formats_are_counted_and_messages_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structural_tag, "MAX_FORMATS", 3)
    assert written({"format": of("or", ANY, ANY)})
    with pytest.raises(InvalidRequest, match=r"^structural_tag\.format\.elements\.2 there may be at most 3 formats$"):
        written({"format": of("or", ANY, ANY, ANY)})
    with pytest.raises(InvalidRequest) as caught:
        written({"type": "x" * 600})
    assert len(caught.value.message) == 500
