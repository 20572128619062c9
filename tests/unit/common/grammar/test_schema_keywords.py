"""What takes the place of a keyword of JSON Schema that grammars do not have, and how large that is."""

from typing import Any

import pytest

from pagoda_common.errors import InvalidRequest
from pagoda_common.grammar import matcher, schema_logic
from pagoda_common.grammar.bounded_grammar import constraint_bytes
from pagoda_common.grammar.lark import lark_of, lark_regex
from pagoda_common.grammar.matcher import json_options
from pagoda_common.grammar.schema_logic import guaranteed, without_logic
from pagoda_common.grammar.schema_opposites import Inexpressible, item_at, types_but
from pagoda_common.params.structured_outputs import StructuredOutputsParams

ANY = r"(.|\n)"


NOT_ARRAY = {"type": ["null", "boolean", "number", "string", "object"]}


ONE, TWO, TEXT = {"const": 1}, {"const": 2}, {"type": "string"}


def negated(schema: Any) -> Any:
    """What takes the place of a `not`."""
    (only,) = without_logic({"not": schema})["allOf"]
    return only


def but(*names: str) -> Any:
    return types_but(*names)


# What takes the place of a keyword.

PLACES: list[tuple[Any, list[Any]]] = [
    ({"if": {"type": "null"}, "then": {"const": 1}}, [{"anyOf": [{"allOf": [{"type": "null"}, ONE]}, but("null")]}]),
    (
        {"if": {"type": "null"}, "then": {"const": 1}, "else": {"const": 2}},
        [{"anyOf": [{"allOf": [{"type": "null"}, ONE]}, {"allOf": [but("null"), TWO]}]}],
    ),
    ({"if": {"type": "null"}, "else": TWO}, [{"anyOf": [{"type": "null"}, {"allOf": [but("null"), TWO]}]}]),
    ({"if": {"type": "null"}, "then": False}, [but("null")]),
    (
        {"contains": ONE, "minContains": 0, "maxContains": 0},
        [{"anyOf": [NOT_ARRAY, {"type": "array", "minItems": 0, "items": negated(ONE)}]}],
    ),
    ({"propertyNames": {"enum": ["b", "a"]}}, [{"properties": {"a": True, "b": True}, "additionalProperties": False}]),
    (
        {"propertyNames": {"maxLength": 2}},
        [{"patternProperties": {rf"^{ANY}{{0,2}}$": True}, "additionalProperties": False}],
    ),
    ({"propertyNames": False}, [{"properties": {}, "additionalProperties": False}]),
    (
        {"dependentRequired": {"a": ["b"]}},
        [{"anyOf": [{"properties": {"a": False}}, {"allOf": [{"required": ["a"]}, {"required": ["b"]}]}]}],
    ),
    (
        {"dependencies": {"a": {"maxProperties": 2}}},
        [{"anyOf": [{"properties": {"a": False}}, {"allOf": [{"required": ["a"]}, {"maxProperties": 2}]}]}],
    ),
    ({"unevaluatedItems": False}, [{"items": False}]),
    ({"unevaluatedItems": TEXT}, [{"items": TEXT}]),
]


@pytest.mark.parametrize(("schema", "extra"), PLACES)
def test_what_takes_the_place_of_a_keyword(schema: Any, extra: list[Any]) -> None:
    written = without_logic({"title": "t", **schema})
    assert written == {"title": "t", "allOf": extra}


@pytest.mark.parametrize(
    "schema",
    [
        {"if": {"type": "null"}},
        {"contains": ONE, "minContains": 0},
        {"propertyNames": True},
        {"unevaluatedItems": True},
        {"unevaluatedProperties": True},
        {"uniqueItems": False},
    ],
)
def test_what_asks_for_nothing_goes(schema: Any) -> None:
    assert without_logic(schema) == {}


def test_one_of_three_items_is_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema_logic, "MAX_WINDOW", 3)
    (found,) = without_logic({"contains": ONE})["allOf"]
    assert found == {"anyOf": [NOT_ARRAY, *(item_at(place, ONE) for place in range(3))]}
    (two,) = without_logic({"contains": ONE, "minContains": 2})["allOf"]
    assert two["anyOf"][1:] == [
        {"type": "array", "minItems": 2, "prefixItems": [ONE, ONE]},
        {"type": "array", "minItems": 3, "prefixItems": [ONE, True, ONE]},
        {"type": "array", "minItems": 3, "prefixItems": [True, ONE, ONE]},
    ]
    (most,) = without_logic({"contains": {"type": "null"}, "maxContains": 1})["allOf"]
    rest = but("null")
    assert most["anyOf"][1:] == [
        {
            "type": "array",
            "minItems": place + 1,
            "prefixItems": [*([rest] * place), {"type": "null"}],
            "items": rest,
        }
        for place in range(3)
    ]
    (many,) = without_logic({"contains": ONE, "minContains": 64})["allOf"]
    assert many["anyOf"][1] == {"type": "array", "minItems": 64, "prefixItems": [ONE] * 64}
    monkeypatch.setattr(schema_logic, "MAX_PLACEMENTS", 2)
    (few,) = without_logic({"contains": ONE})["allOf"]
    assert len(few["anyOf"]) == 1 + 2


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"contains": ONE, "minContains": 65}, "'contains' at #: minContains is 65, which is more than 64"),
        ({"contains": ONE, "minContains": -1}, "'contains' at #: minContains and maxContains must be whole numbers"),
        ({"contains": ONE, "maxContains": "1"}, "'contains' at #: minContains and maxContains must be whole numbers"),
        (
            {"propertyNames": {"format": "email"}},
            "'propertyNames' at #: only type, pattern, lengths, enum, const and their like can be asked of names",
        ),
        ({"dependencies": 5}, "'dependencies' at #: must be an object"),
        (
            {"uniqueItems": True, "items": {}},
            "'uniqueItems' at #: the items have too many values to tell that none is there twice",
        ),
        (
            {"uniqueItems": True, "prefixItems": [{}, {}], "items": False},
            "'uniqueItems' at #: two items may be the same",
        ),
        (
            {"unevaluatedProperties": False, "anyOf": [{}] * 65},
            "'unevaluatedProperties' at #: there are too many combinations",
        ),
        (
            {"properties": {"a": {}}, "minProperties": 3},
            "'minProperties' at # is 3: only properties that are named are sure to differ",
        ),
        ({"items": {"not": {"format": "x"}}}, "'not' at #/items: #/items/not/format: its opposite cannot be written"),
    ],
)
def test_what_cannot_be_replaced(schema: Any, told: str) -> None:
    with pytest.raises(Inexpressible) as caught:
        without_logic(schema)
    assert str(caught.value).replace("/contains:", ":") == told or str(caught.value) == told


def test_unique_items_may_be_a_tuple_of_different_things() -> None:
    first = {"prefixItems": [{"type": "null"}, {"type": "string"}], "uniqueItems": True}
    for closed in ({"items": False}, {"maxItems": 2}):
        written = without_logic({**first, **closed})
        assert written == {"prefixItems": first["prefixItems"], **closed}
    with pytest.raises(Inexpressible, match="too many values"):
        without_logic({**first, "maxItems": 3})


AB = {"properties": {"a": ONE, "b": TWO}}


@pytest.mark.parametrize(
    ("sizes", "extra"),
    [
        ({"minProperties": 1}, {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}),
        ({"minProperties": 2}, {"required": ["a", "b"]}),
        ({"minProperties": 3}, {"required": ["a", "b"], "minProperties": 3}),
        ({"minProperties": 0}, True),
        ({"minProperties": 1, "required": ["a"]}, True),
        ({"minProperties": 2, "required": ["a"]}, {"required": ["b"]}),
        ({"maxProperties": 1, "required": ["a", "b"]}, False),
        ({"maxProperties": 2, "additionalProperties": False}, True),
        (
            {"maxProperties": 1, "additionalProperties": False},
            {
                "anyOf": [
                    {"properties": {"a": True, "b": False}, "additionalProperties": False},
                    {"properties": {"a": False, "b": True}, "additionalProperties": False},
                ]
            },
        ),
        ({"maxProperties": 0}, {"properties": {"a": False, "b": False}, "additionalProperties": False}),
        (
            {"maxProperties": 1, "required": ["a"]},
            {"properties": {"a": True, "b": False}, "additionalProperties": False},
        ),
    ],
)
def test_how_many_properties_there_are_is_said_by_their_names(sizes: Any, extra: Any) -> None:
    written = without_logic({**AB, **sizes})
    kept = {name: value for name, value in sizes.items() if name not in ("minProperties", "maxProperties")}
    assert written == {**AB, **kept, "allOf": [extra]}


def test_sizes_without_names_stay() -> None:
    for schema in ({"minProperties": 1}, {"maxProperties": 1}, {"minProperties": True}, {"maxProperties": "1"}):
        assert without_logic(schema) == schema


def test_each_branch_of_one_of_is_without_the_others() -> None:
    written = without_logic({"oneOf": [{"minimum": 1}, {"maximum": 5}, {"type": "string"}], "title": "t"})
    assert set(written) == {"title", "allOf"}
    (found,) = written["allOf"]
    assert found["anyOf"][0]["allOf"][:2] == [{"minimum": 1}, {"type": "number", "exclusiveMinimum": 5}]
    assert len(found["anyOf"]) == 3
    cannot = {"oneOf": [{"pattern": "a+"}, {"pattern": "b+"}]}
    assert without_logic(cannot) == cannot


def test_unevaluated_properties_are_those_of_no_branch() -> None:
    schema = {
        "properties": {"a": ONE},
        "allOf": [{"properties": {"b": {}}, "patternProperties": {"^c": {}}}],
        "unevaluatedProperties": False,
    }
    assert without_logic(schema)["allOf"][-1] == {
        "properties": {"a": True, "b": True},
        "patternProperties": {"^c": True},
        "additionalProperties": False,
    }
    opened = {"additionalProperties": TEXT, "unevaluatedProperties": False}
    assert without_logic(opened) == {"additionalProperties": TEXT, "allOf": [True]}
    branches = {"anyOf": [{"properties": {"a": ONE}}, {"properties": {"b": TWO}}], "unevaluatedProperties": TEXT}
    (closed,) = without_logic(branches)["allOf"]
    assert closed["anyOf"] == [
        {
            "allOf": [
                {"properties": {name: value}},
                {"properties": {name: True}, "patternProperties": {}, "additionalProperties": TEXT},
            ]
        }
        for name, value in (("a", ONE), ("b", TWO))
    ]
    condition = {
        "if": {"properties": {"a": ONE}, "required": ["a"]},
        "then": {"properties": {"b": {}}},
        "unevaluatedProperties": False,
    }
    _, ways = without_logic(condition)["allOf"]
    assert [way["allOf"][-1]["properties"] for way in ways["anyOf"]] == [{"a": True, "b": True}, {}]


def test_unevaluated_items_come_after_all_first_ones() -> None:
    schema = {"prefixItems": [ONE], "allOf": [{"prefixItems": [ONE, TWO]}], "unevaluatedItems": False}
    assert without_logic(schema)["allOf"][-1] == {"prefixItems": [True, True], "items": False}
    said = {"items": TEXT, "unevaluatedItems": False}
    assert without_logic(said) == {"items": TEXT}


def test_what_cannot_be_guaranteed_names_its_reason() -> None:
    with pytest.raises(InvalidRequest) as caught:
        guaranteed({"allOf": [{"$ref": "#"}]})
    told = "Unsatisfiable schema: each document that fits would hold another one"
    assert (str(caught.value), caught.value.field) == (told, "structured_outputs")
    with pytest.raises(InvalidRequest) as caught:
        guaranteed({"not": {"format": "x"}})
    told = "cannot be guaranteed: 'not' at #: #/not/format: its opposite cannot be written"
    assert (str(caught.value), caught.value.field) == (told, "structured_outputs")
    long = "n" * 600
    with pytest.raises(InvalidRequest) as caught:
        guaranteed({"properties": {long: {"not": {"format": "x"}}}})
    assert len(str(caught.value)) == 500
    whole = guaranteed({"oneOf": [ONE, TWO], "patternProperties": {"^a$": {"minimum": 2**53 + 1}}})
    assert whole == {"anyOf": [ONE, TWO], "properties": {"a": {"minimum": 2**53 + 2}}}


# Options, sizes, grammars.


def test_options_of_json() -> None:
    base = {"lenient": True, "coerce_one_of": False, "json_allowed_escapes": 'nrbtf\\"'}
    assert matcher.WHITESPACE == r" |\n[ \t]{0,20}"
    assert json_options(StructuredOutputsParams(json={})) == {**base, "whitespace_pattern": matcher.WHITESPACE}
    assert json_options(StructuredOutputsParams(json={}, whitespace_pattern=" ")) == {**base, "whitespace_pattern": " "}
    tight = StructuredOutputsParams(json={}, whitespace_pattern=" ", disable_any_whitespace=True)
    assert json_options(tight) == {**base, "whitespace_flexible": False}


def test_the_size_of_what_is_compiled_is_in_bytes() -> None:
    assert constraint_bytes(StructuredOutputsParams(regex="é")) == 2
    assert constraint_bytes(StructuredOutputsParams(choice=["é", "a"])) == 3
    assert constraint_bytes(StructuredOutputsParams(json_object=True)) == 0


def test_which_grammars_are_read_as_lark() -> None:
    for lark in ("start: x", "?start: x", "!a.1 : b", "%llguidance {}\nstart: x", "  start[a]: b", "a{b} : c"):
        assert lark_of(lark) == lark
    for other in ("start", "", ": a"):
        with pytest.raises(InvalidRequest) as caught:
            lark_of(other)
        told = "structured_outputs.grammar cannot be read: it has no rule, neither `root ::= …` nor `start: …`"
        assert (str(caught.value), caught.value.field) == (told, "structured_outputs")
    assert lark_regex("a/b") == r"/a\/b/"
