"""What no document fits, and the opposite of each kind of JSON schema."""

from typing import Any

import pytest

from pagoda_common.grammar import schema_opposites
from pagoda_common.grammar.json_schema import (
    are_disjoint,
    type_of,
)
from pagoda_common.grammar.schema_logic import without_logic
from pagoda_common.grammar.schema_opposites import Inexpressible, all_of, any_of, item_at, types_but

ANY = r"(.|\n)"


NOT_ARRAY = {"type": ["null", "boolean", "number", "string", "object"]}


ONE, TWO, TEXT = {"const": 1}, {"const": 2}, {"type": "string"}


@pytest.mark.parametrize(
    ("one", "other", "is_disjoint"),
    [
        (ONE, TWO, True),
        (ONE, {"enum": [2, 1]}, False),
        (ONE, TEXT, True),
        (ONE, {"type": "integer"}, False),
        ({"type": "integer"}, {"type": "number"}, False),
        ({"type": ["string", "null"]}, {"type": ["number", "null"]}, False),
        (TEXT, {}, False),
        (True, ONE, False),
        ({"type": "string"}, {"type": "string"}, False),
        ({"type": "object"}, {"type": "object"}, False),
        (
            {"type": "object", "properties": {"k": ONE}, "required": ["k"]},
            {"type": "object", "properties": {"k": TWO}, "required": ["k"]},
            True,
        ),
        (
            {"type": "object", "properties": {"k": ONE}, "required": ["k"]},
            {"type": "object", "properties": {"k": TWO}},
            False,
        ),
        (
            {"type": "object", "properties": {"k": TEXT}, "required": ["k"]},
            {"type": "object", "properties": {"k": ONE}, "required": ["k"]},
            False,
        ),
        ({"type": "object", "properties": {"k": False}}, {"type": "object", "required": ["k"]}, True),
        ({"type": "object", "required": ["k"]}, {"type": "object", "properties": {"k": False}}, True),
        ({"type": "object", "additionalProperties": False}, {"type": "object", "required": ["k"]}, True),
        (
            {"type": "object", "additionalProperties": False, "properties": {"k": {}}},
            {"type": "object", "required": ["k"]},
            False,
        ),
        (
            {"type": "object", "additionalProperties": False, "patternProperties": {"k": {}}},
            {"type": "object", "required": ["k"]},
            False,
        ),
        ({"type": ["object", "null"], "properties": {"k": False}}, {"type": "object", "required": ["k"]}, False),
    ],
)
def test_what_no_document_fits_both_of(one: Any, other: Any, is_disjoint: bool) -> None:
    assert are_disjoint(one, other, {}) is is_disjoint
    assert are_disjoint(other, one, {}) is is_disjoint


def test_types_of_values() -> None:
    values = [True, None, 1, 1.5, "a", [], {}]
    assert [type_of(value) for value in values] == [
        *("boolean", "null", "number", "number", "string", "array", "object"),
    ]

    assert any_of([ONE]) == ONE
    assert any_of([ONE, TWO]) == {"anyOf": [ONE, TWO]}
    assert any_of([ONE, True]) is True
    assert all_of([]) is True
    assert all_of([True, {}]) is True
    assert all_of([True, ONE, {}]) == ONE
    assert all_of([ONE, TWO]) == {"allOf": [ONE, TWO]}
    assert all_of([ONE, False]) is False
    assert types_but("array") == NOT_ARRAY
    assert types_but("null", "boolean", "number", "string", "array", "object") is False
    assert item_at(0, ONE) == {"type": "array", "prefixItems": [ONE], "minItems": 1}
    assert item_at(2, ONE) == {"type": "array", "prefixItems": [True, True, ONE], "minItems": 3}


def negated(schema: Any) -> Any:
    """What takes the place of a `not`."""
    (only,) = without_logic({"not": schema})["allOf"]
    return only


def but(*names: str) -> Any:
    return types_but(*names)


OPPOSITES: list[tuple[Any, Any]] = [
    (True, False),
    (False, True),
    ({}, False),
    ({"title": "t"}, False),
    ({"type": "string"}, but("string")),
    ({"type": ["string", "null"]}, but("string", "null")),
    ({"type": "integer"}, but("number")),
    ({"minimum": 3}, {"type": "number", "exclusiveMaximum": 3}),
    ({"exclusiveMinimum": 3}, {"type": "number", "maximum": 3}),
    ({"maximum": 3}, {"type": "number", "exclusiveMinimum": 3}),
    ({"exclusiveMaximum": 3.5}, {"type": "number", "minimum": 3.5}),
    ({"minLength": 3}, {"type": "string", "maxLength": 2}),
    ({"minLength": 0}, False),
    ({"minLength": 1}, {"type": "string", "maxLength": 0}),
    ({"maxLength": 3}, {"type": "string", "minLength": 4}),
    ({"minItems": 3}, {"type": "array", "maxItems": 2}),
    ({"maxItems": 3}, {"type": "array", "minItems": 4}),
    ({"minProperties": 3}, {"type": "object", "maxProperties": 2}),
    ({"maxProperties": 0}, {"type": "object", "minProperties": 1}),
    ({"pattern": "^a"}, {"type": "string", "pattern": f"^(|[^a]{ANY}*)$"}),
    ({"required": ["a"]}, {"type": "object", "properties": {"a": False}}),
    (
        {"required": ["a", "b"]},
        {
            "anyOf": [
                {"type": "object", "properties": {"a": False}},
                {"type": "object", "properties": {"b": False}},
            ]
        },
    ),
    (
        {"properties": {"a": {"maxLength": 1}, "b": True}},
        {"type": "object", "properties": {"a": {"type": "string", "minLength": 2}}, "required": ["a"]},
    ),
    ({"prefixItems": [True, {"type": "null"}]}, item_at(1, but("null"))),
    ({"anyOf": [{"type": "null"}, {"type": "string"}]}, {"allOf": [but("null"), but("string")]}),
    ({"allOf": [{"type": "null"}, {"maxLength": 1}]}, {"anyOf": [but("null"), {"type": "string", "minLength": 2}]}),
    ({"not": {"type": "null"}}, {"type": "null"}),
    ({"uniqueItems": False}, False),
    ({"const": True}, {"anyOf": [but("boolean"), {"const": False}]}),
    ({"enum": [True, False]}, but("boolean")),
    ({"const": None}, but("null")),
    (
        {"enum": [3, 1]},
        {
            "anyOf": [
                but("number"),
                {"type": "number", "exclusiveMaximum": 1},
                {"type": "number", "exclusiveMinimum": 1, "exclusiveMaximum": 3},
                {"type": "number", "exclusiveMinimum": 3},
            ]
        },
    ),
    ({"const": "a"}, {"anyOf": [but("string"), {"type": "string", "pattern": f"^(|[^a]{ANY}*|a{ANY}+)$"}]}),
    ({"minimum": 0, "type": "number"}, {"anyOf": [{"type": "number", "exclusiveMaximum": 0}, but("number")]}),
    (
        {"dependentRequired": {"a": ["b"]}},
        {
            "allOf": [
                {"type": "object", "required": ["a"]},
                {"type": "object", "properties": {"b": False}},
            ]
        },
    ),
    (
        {"dependentSchemas": {"a": {"maxProperties": 0}}},
        {"allOf": [{"type": "object", "required": ["a"]}, {"type": "object", "minProperties": 1}]},
    ),
    (
        {"if": {"type": "null"}, "then": {"type": "string"}},
        {"allOf": [{"type": "null"}, but("string")]},
    ),
    (
        {"if": {"type": "null"}, "else": {"type": "string"}},
        {"allOf": [but("null"), but("string")]},
    ),
    (
        {"oneOf": [{"type": "null"}, {"type": "string"}]},
        {"allOf": [but("null"), but("string")]},
    ),
    (
        {"oneOf": [{"minimum": 1}, {"maximum": 5}]},
        {
            "anyOf": [
                {
                    "allOf": [
                        {"type": "number", "exclusiveMaximum": 1},
                        {"type": "number", "exclusiveMinimum": 5},
                    ]
                },
                {"allOf": [{"minimum": 1}, {"maximum": 5}]},
            ]
        },
    ),
]


@pytest.mark.parametrize(("schema", "opposite"), OPPOSITES)
def test_the_opposite_of_a_schema(schema: Any, opposite: Any) -> None:
    assert negated(schema) == opposite


def test_the_opposite_of_items_looks_at_eight_of_them() -> None:
    found = negated({"items": {"type": "null"}})["anyOf"]
    assert found == [item_at(place, but("null")) for place in range(8)]
    after = negated({"prefixItems": [True, True], "items": {"type": "null"}})["anyOf"]
    assert after == [item_at(place, but("null")) for place in range(2, 10)]
    assert negated({"items": True}) is False


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        (
            {"not": {"pattern": "a+"}},
            "#/not/pattern: the opposite of a pattern cannot be written but of a plain beginning",
        ),
        ({"not": {"minimum": "1"}}, "#/not/minimum must be a number"),
        ({"not": {"minimum": True}}, "#/not/minimum must be a number"),
        ({"not": {"enum": 5}}, "#/not/enum must be a list"),
        ({"not": {"items": [{}]}}, "#/not/items: the opposite of a list of items cannot be written"),
        ({"not": {"uniqueItems": True}}, "#/not/uniqueItems: its opposite cannot be written"),
        ({"not": {"maxProperties": 1}}, "#/not/maxProperties: only properties that are named are sure to differ"),
        ({"not": {"const": "x" * 4001}}, "#/not/const: there are too many values"),
        ({"not": 5}, "#/not is not a schema"),
        ({"not": {"$ref": "#/none"}}, "#/not/$ref: the opposite of what refers to itself cannot be written"),
        *(
            ({"not": {name: {}}}, f"#/not/{name}: its opposite cannot be written")
            for name in (
                *("$dynamicRef", "format", "multipleOf", "patternProperties", "additionalProperties"),
                *("propertyNames", "unevaluatedProperties", "unevaluatedItems"),
            )
        ),
    ],
)
def test_opposites_that_cannot_be_written(schema: Any, told: str) -> None:
    with pytest.raises(Inexpressible) as caught:
        without_logic(schema)
    assert str(caught.value) == f"'not' at #: {told}"


def test_copies_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = {"allOf": [{}, {}]}
    monkeypatch.setattr(schema_opposites, "MAX_PARTS", 3)
    assert without_logic(schema) == schema
    monkeypatch.setattr(schema_opposites, "MAX_PARTS", 2)
    with pytest.raises(Inexpressible, match="#/allOf/1: there are too many combinations"):
        without_logic(schema)
