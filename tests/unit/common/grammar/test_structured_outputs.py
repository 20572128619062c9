"""Constraints as parameters, on the wire, and as grammars: what they accept, and what they refuse."""

import json
from dataclasses import replace
from typing import Any

import pytest

from pagoda_common.engine.convert import sampling_params_from_proto, sampling_params_to_proto
from pagoda_common.errors import InvalidRequest
from pagoda_common.grammar.json_schema import with_any_of, with_ends, without_additional_properties
from pagoda_common.grammar.matcher import GrammarCompiler
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_common.params.structured_outputs import MAX_CHOICES, MAX_CONSTRAINT_BYTES, StructuredOutputsParams
from pagoda_common.text.tokenizer import Tokenizer

INTEGER = {"type": "integer"}
NEEDS_A = {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"not": schema}
    return schema


@pytest.mark.parametrize(
    "given",
    [
        {"json": NEEDS_A},
        {"json": '{"type": "object", "größe": 1}', "disable_any_whitespace": True},
        {"json": nested(64), "disable_additional_properties": True},
        {"json_object": True, "whitespace_pattern": " ?"},
        {"regex": "[a-z] +"},
        {"choice": ["yes", "no", "yes"], "start_after_token_ids": [1, 2, 2**32 - 1]},
        {"grammar": 'root ::= "a"'},
        {"structural_tag": {"format": {"type": "any_text"}}},
    ],
)
def test_a_constraint_crosses_the_wire_whole(given: dict[str, Any]) -> None:
    constraint = StructuredOutputsParams(**given)
    params = SamplingParams(temperature=0, structured_outputs=constraint)
    assert sampling_params_from_proto(sampling_params_to_proto(params)).structured_outputs == constraint


def test_no_constraint_crosses_the_wire_as_none() -> None:
    assert sampling_params_from_proto(sampling_params_to_proto(SamplingParams())).structured_outputs is None


def test_the_engine_that_vllm_would_take_is_accepted_and_not_kept() -> None:
    params = StructuredOutputsParams(regex="a+", backend="guidance", disable_fallback=True)
    assert params == StructuredOutputsParams(regex="a+")
    assert replace(params, regex="b") == StructuredOutputsParams(regex="b")


def test_values_are_stored_in_one_form() -> None:
    assert StructuredOutputsParams(json={"a": "ü"}).json == StructuredOutputsParams(json=' {"a":  "ü"}').json
    assert StructuredOutputsParams(choice=["b", "a", "b"]).choice == ("b", "a")
    assert StructuredOutputsParams(json_object=True).kind == "json_object"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "exactly one of json, regex, choice, grammar, json_object, structural_tag, got none"),
        ({"json": {}, "regex": "a"}, "got json and regex"),
        ({"json_object": False}, "got none"),
        ({"json_object": 1}, "json_object must be true"),
        ({"json": "{"}, "json is not valid JSON"),
        ({"json": [1]}, "json must be a JSON object"),
        ({"json": "7"}, "json must be a JSON object"),
        ({"json": nested(65)}, "at most 64 levels"),
        ({"json": "[" * 100_000}, "json"),
        ({"json": {"a": float("nan")}}, "json cannot be written"),
        ({"json": {"a": "\ud800"}}, "valid Unicode"),
        ({"regex": ""}, "regex must be a string that is not empty"),
        ({"regex": "a\0b"}, "NUL"),
        ({"regex": 5}, "regex must be a string"),
        ({"regex": "a" * (MAX_CONSTRAINT_BYTES + 1)}, f"at most {MAX_CONSTRAINT_BYTES} bytes"),
        ({"grammar": ""}, "grammar must be a string"),
        ({"choice": "yes"}, "choice must be a list"),
        ({"choice": []}, "between 1 and"),
        ({"choice": ["a"] * (MAX_CHOICES + 1)}, f"between 1 and {MAX_CHOICES}"),
        ({"choice": ["a", ""]}, "choice.1"),
        ({"choice": ["a", None]}, "choice.1"),
        ({"choice": ["x" * 1000 + str(k) for k in range(300)]}, "bytes"),
        ({"structural_tag": "tag"}, "structural_tag is not valid JSON"),
        ({"regex": "a", "disable_any_whitespace": "yes"}, "disable_any_whitespace must be true or false"),
        ({"regex": "a", "whitespace_pattern": ""}, "whitespace_pattern"),
        ({"regex": "a", "start_after_token_ids": [-1]}, "start_after_token_ids"),
        ({"regex": "a", "start_after_token_ids": list(range(65))}, "start_after_token_ids"),
    ],
)
def test_a_wrong_value_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        StructuredOutputsParams(**given)
    assert message in caught.value.message
    assert caught.value.field == "structured_outputs"


def test_sampling_params_take_nothing_else_for_a_constraint() -> None:
    with pytest.raises(InvalidRequest, match="StructuredOutputsParams"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]


class Grammars:
    """Says which texts a constraint accepts, for the embedded model's vocabulary."""

    def __init__(self) -> None:
        self.tokenizer = Tokenizer.load("pagoda-tiny")
        self.compiler = GrammarCompiler(tokenizer=self.tokenizer, vocab_size=3072, eos_token_ids=(0, 2))

    def accepts(self, text: str, **constraint: Any) -> bool:
        matcher = self.compiler.compile(StructuredOutputsParams(**constraint))
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        if matcher.validate_tokens(ids) != len(ids):
            return False
        return matcher.consume_tokens(ids) and matcher.is_accepting()


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars()


def tags(**options: Any) -> dict[str, Any]:
    tag = {"type": "tag", "begin": "<n>", "content": {"type": "json_schema", "json_schema": INTEGER}, "end": "</n>"}
    return {"format": {"type": "triggered_tags", "triggers": ["<"], "tags": [tag], **options}}


def sequence(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "structural_tag", "format": {"type": "sequence", "elements": list(elements)}}


OLD_TAG = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<f=a>", "schema": NEEDS_A, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"type": "boolean"}, "end": "</f>"},
    ],
    "triggers": ["<f="],
}
JSON_TAG = {"type": "json_schema", "json_schema": NEEDS_A}

ACCEPTED: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"json": NEEDS_A}, ['{"a":1}', '{"a": 1, "b": [{}]}', '{\n  "a": 1\n}'], ["{}", '{"a": 1.5}', '{"a":  1}', "[]"]),
    ({"json": NEEDS_A, "disable_any_whitespace": True}, ['{"a":1}'], ['{"a": 1}']),
    ({"json": NEEDS_A, "disable_additional_properties": True}, ['{"a":1}'], ['{"a":1,"b":2}']),
    ({"json": NEEDS_A, "whitespace_pattern": "_"}, ['{_"a"_:_1}'], ['{ "a":1}']),
    ({"json": {**NEEDS_A, "x-guidance": {"key_separator": "="}}}, ['{"a":1}'], ['{"a"=1}']),
    ({"json": True}, ["1", '"x"', "[null]"], ["x"]),
    ({"json_object": True}, ["{}", '{"a": {"b": 1}}'], ["[]", "1"]),
    ({"json": {"type": "string", "format": "unheard of"}}, ['"a"'], ["1"]),
    ({"regex": r"^\d{2,3}(a|b)$"}, ["12a", "123b"], ["1a", "12", "12ab", "١٢a"]),
    ({"regex": r"\w+\s[^/]/[\]\"]"}, ['ab_1 x/"', "a\ty/]"], ["ä x/]", "a  x/]"]),
    ({"regex": "é+/🙂"}, ["éé/🙂"], ["e/🙂"]),
    ({"choice": ["a b", 'q"\n\\', "\x7f🙂"]}, ["a b", 'q"\n\\', "\x7f🙂"], ["a", "a b "]),
    ({"choice": [f"choice {k}" for k in range(MAX_CHOICES)]}, ["choice 0", "choice 9999"], ["choice 10000"]),
    ({"grammar": 'root ::= list\nlist ::= "[" item ("," item)* "]" # c\nitem ::= [0-9]+'}, ["[1,22]"], ["[]", "1"]),
    ({"grammar": 'start: "SELECT " NAME\nNAME: /[a-z]+/'}, ["SELECT abc"], ["SELECT ", "select a"]),
    ({"structural_tag": OLD_TAG}, ["x", 'x<f=a>{"a":1}</f>y<f=b>true</f>'], ["<f=c>", "<f=b>1</f>", "<f=b>true"]),
    ({"structural_tag": tags()}, ["", "a", "a<n>5</n>b"], ["a<b", "<n>x</n>"]),
    ({"structural_tag": tags(at_least_one=True)}, ["<n>5</n>", "<n>5</n>b<n>6</n>"], ["", "a<n>5</n>"]),
    ({"structural_tag": tags(stop_after_first=True)}, ["a", "a<n>5</n>"], ["<n>5</n>b"]),
    ({"structural_tag": tags(stop_after_first=True, at_least_one=True)}, ["<n>5</n>"], ["a", "<n>5</n>b"]),
    (
        {"structural_tag": sequence({"type": "any_text"}, {"type": "const_string", "value": "</t>"}, JSON_TAG)},
        ['hm </t>{"a":1}'],
        ['{"a":1}', 'hm</t>x</t>{"a":1}'],
    ),
    (
        {"structural_tag": sequence({"type": "any_text"}, {"begin": "<j>", "type": "tag", "content": JSON_TAG})},
        ['hm <j>{"a":1}'],
        ["hm", "hm <j>x"],
    ),
    (
        {"structural_tag": sequence({"type": "tag", "begin": "<a>", "end": ["</a>", "</b>"]})},
        ["<a>x</a>", "<a></b>"],
        ["<a>x</a>y", "x</a>"],
    ),
    (
        {
            "structural_tag": {
                "format": {
                    "type": "or",
                    "elements": [
                        {"type": "regex", "pattern": "[0-9/]+\n"},
                        {"type": "grammar", "grammar": 'root ::= "}"+'},
                    ],
                }
            }
        },
        ["1/2\n", "}}"],
        ["1", "}1\n"],
    ),
    (
        {
            "structural_tag": {
                "format": {
                    "type": "tags_with_separator",
                    "separator": ", ",
                    "tags": [{"begin": "(", "content": {"type": "regex", "pattern": "[a-z]"}, "end": ")"}],
                }
            }
        },
        ["", "(a)", "(a), (b)"],
        ["(a)(b)", "(a), "],
    ),
]


@pytest.mark.parametrize(("constraint", "good", "bad"), ACCEPTED)
def test_a_grammar_accepts_what_it_says(
    grammars: Grammars, constraint: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    assert [text for text in good if not grammars.accepts(text, **constraint)] == []
    assert [text for text in bad if grammars.accepts(text, **constraint)] == []


def test_special_tokens_of_a_tag_are_those_tokens(grammars: Grammars) -> None:
    tag = sequence({"type": "const_string", "value": "a<|im_start|>b"}, {"type": "any_text"})
    matcher = grammars.compiler.compile(StructuredOutputsParams(structural_tag=tag))
    first, last = (grammars.tokenizer.encode(text, add_special_tokens=False) for text in "ab")
    assert matcher.consume_tokens([*first, 1, *last])
    assert matcher.is_accepting()


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        ({"json": False}, "Unsatisfiable"),
        ({"json": {"type": "nonsense"}}, "Invalid type: nonsense"),
        ({"json": {"$ref": "#/$defs/missing"}}, "missing"),
        ({"json": {"$ref": "http://example.invalid/schema"}}, "example.invalid"),
        ({"json": {"type": "array", "uniqueItems": True}}, "cannot be guaranteed"),
        ({"json": {"oneOf": [{"type": "string"}, {"format": "email"}]}}, "cannot be guaranteed"),
        ({"json": {"allOf": [{"type": "string"}, INTEGER]}}, "Unsatisfiable"),
        ({"json": NEEDS_A, "whitespace_pattern": "("}, "regex"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": "(a"}, "unclosed"),
        ({"grammar": "root ::= missing"}, "missing"),
        ({"grammar": "start: missing"}, "missing"),
        ({"grammar": "not a grammar ((("}, "cannot be read"),
        ({"grammar": "root ::= " + "(" * 3000 + '"a"' + ")" * 3000}, "cannot be read"),
        ({"structural_tag": {"type": "nonsense"}}, "type"),
        ({"structural_tag": {"format": {"type": "nonsense"}}}, "format.type must be one of"),
        ({"structural_tag": {"structures": [], "triggers": ["a"]}}, "structures must be a list that is not empty"),
        (
            {"structural_tag": {"structures": [{"begin": "b"}], "triggers": ["a"]}},
            "must begin with one",
        ),
        ({"structural_tag": sequence({"type": "any_text"}, JSON_TAG)}, "only const_string and tag"),
        ({"structural_tag": sequence({"type": "regex", "pattern": "("})}, ""),
    ],
)
def test_a_constraint_that_cannot_be_compiled_is_refused(
    grammars: Grammars, constraint: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        grammars.compiler.compile(StructuredOutputsParams(**constraint))
    assert message in caught.value.message
    assert caught.value.field == "structured_outputs"


def kind(name: str) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": {"const": name}}, "required": ["kind"]}


@pytest.mark.parametrize(
    ("branches", "is_exclusive"),
    [
        ([{"type": "string"}, {"type": "integer"}, {"type": ["null", "boolean"]}], True),
        ([{"type": "number"}, {"type": "integer"}], False),
        ([{"const": 1}, {"enum": [2, "a"]}], True),
        ([{"const": 1}, {"enum": [2, 1]}], False),
        ([{"const": 1}, {"type": "string"}], True),
        ([kind("a"), kind("b"), kind("c")], True),
        ([kind("a"), kind("a")], False),
        ([kind("a"), {**kind("b"), "required": []}], False),
        ([{"$ref": "#/$defs/a~1"}, {"$ref": "#/$defs/b"}], True),
        ([{"$ref": "#/$defs/missing"}, {"$ref": "#/$defs/b"}], False),
        ([True, {"type": "string"}], False),
    ],
)
def test_one_of_becomes_any_of_where_its_branches_exclude_each_other(branches: list[Any], is_exclusive: bool) -> None:
    schema = {"properties": {"p": {"oneOf": branches}}, "$defs": {"a/": kind("a"), "b": kind("b")}}
    assert with_any_of(schema)["properties"]["p"] == ({"anyOf": branches} if is_exclusive else {"oneOf": branches})


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"items": {"enum": ["a", "b", "c"]}}, ["[]", '["c","a"]', '["a", "b", "c"]'], ['["a","a"]', '["d"]']),
        ({"items": {"enum": [1, 2, 3]}, "minItems": 2, "maxItems": 2}, ["[3,1]"], ["[3]", "[1,2,3]", "[1,1]"]),
        ({"items": {"$ref": "#/$defs/color"}, "title": "t"}, ['["red"]', '["green","red"]'], ['["red","red"]']),
        ({"items": {"enum": list("abcdefg")}}, ['["a","c","g"]', json.dumps(list("abcdefg"))], ['["a","a"]']),
        ({"items": {"type": "boolean"}}, ["[true,false]", "[false]"], ["[true,true]"]),
        ({"items": {"type": "string"}, "maxItems": 1}, ['["x"]', "[]"], ['["x","y"]']),
        ({"items": INTEGER, "uniqueItems": False}, ["[1,1]"], ["[x]"]),
    ],
)
def test_a_set_of_few_values_is_a_list_without_repetition(
    grammars: Grammars, schema: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    whole = {"type": "array", "uniqueItems": True, "$defs": {"color": {"enum": ["red", "green"]}}, **schema}
    assert [text for text in good if not grammars.accepts(text, json=whole)] == []
    assert [text for text in bad if grammars.accepts(text, json=whole)] == []


def test_rewrites_leave_values_and_names_of_properties_alone() -> None:
    schema = {
        "properties": {"properties": {"type": "object", "properties": {"oneOf": INTEGER}}, "format": {"enum": [{}]}},
        "const": {"properties": {}},
        "default": {"oneOf": [{"type": "string"}, {"type": "null"}]},
    }
    closed = without_additional_properties(schema)
    assert closed["const"] == {"properties": {}}
    assert closed["properties"]["properties"]["additionalProperties"] is False
    assert "additionalProperties" not in closed["properties"]
    assert with_any_of(schema) == schema
    assert with_ends(schema) == schema


@pytest.mark.parametrize(
    ("text", "is_date"),
    [
        ("2023-02-28", True),
        ("2023-02-29", False),
        ("2024-02-29", True),
        ("1900-02-29", False),
        ("2000-02-29", True),
        ("2023-04-31", False),
        ("2023-12-31", True),
        ("0000-01-01", False),
        ("0001-01-01", True),
    ],
)
def test_dates_are_days_of_the_calendar(grammars: Grammars, text: str, is_date: bool) -> None:
    assert grammars.accepts(f'"{text}"', json={"type": "string", "format": "date"}) is is_date
    assert grammars.accepts(f'"{text}T23:59:59Z"', json={"type": "string", "format": "date-time"}) is is_date
    assert not grammars.accepts(f'"{text}T23:59:60Z"', json={"type": "string", "format": "date-time"})


def test_endless_forms_end(grammars: Grammars) -> None:
    number = {"type": "number", "minimum": 0, "maximum": 2}
    assert grammars.accepts("1.5", json=number)
    assert not grammars.accepts("1." + "5" * 20, json=number)
    assert grammars.accepts("1." + "5" * 15, json={"type": "number"})
    assert not grammars.accepts(
        '"2000-01-01T00:00:00.' + "1" * 30 + 'Z"', json={"type": "string", "format": "date-time"}
    )
    assert grammars.accepts('"2000-01-01T00:00:00.123456+01:00"', json={"type": "string", "format": "date-time"})
