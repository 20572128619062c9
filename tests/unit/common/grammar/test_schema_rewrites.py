"""What each rewrite of a JSON schema writes, keyword by keyword, with its bounds on both sides."""

import re
from typing import Any

import pytest

from pagoda_common.errors import InvalidRequest
from pagoda_common.grammar import matcher, schema_endless, schema_logic, schema_opposites
from pagoda_common.grammar.bounded_grammar import constraint_bytes
from pagoda_common.grammar.json_schema import (
    DECIMAL,
    FORMATS,
    are_disjoint,
    resolved,
    rewritten,
    target,
    type_of,
    with_any_of,
    with_ends,
    with_listed_sets,
    without_additional_properties,
)
from pagoda_common.grammar.lark import lark_of, lark_regex
from pagoda_common.grammar.matcher import json_options
from pagoda_common.grammar.schema_endless import is_endless
from pagoda_common.grammar.schema_integers import with_exact_integers
from pagoda_common.grammar.schema_logic import guaranteed, without_logic
from pagoda_common.grammar.schema_names import (
    literal_pattern,
    opposite_of_pattern,
    opposite_of_words,
    pattern_of_names,
    with_named_words,
)
from pagoda_common.grammar.schema_opposites import Inexpressible, all_of, any_of, item_at, types_but
from pagoda_common.params.structured_outputs import StructuredOutputsParams

ANY = r"(.|\n)"
NOT_ARRAY = {"type": ["null", "boolean", "number", "string", "object"]}


def listed(**items: Any) -> Any:
    return with_listed_sets({"type": "array", "uniqueItems": True, **items})


# Sets.


def test_few_unique_values_are_lists_in_every_order() -> None:
    assert listed(items={"enum": ["a", "b"]}) == {"enum": [[], ["a"], ["b"], ["a", "b"], ["b", "a"]]}
    assert listed(items={"enum": ["a", "b"]}, minItems=1, maxItems=1, title="t") == {
        "type": "array",
        "items": {"enum": ["a", "b"]},
        "minItems": 1,
        "maxItems": 1,
        "title": "t",
    }
    assert listed(items={"enum": ["a", "b"]}, minItems=2, title="t") == {
        "title": "t",
        "enum": [["a", "b"], ["b", "a"]],
    }
    assert listed(items={"type": "boolean"}, minItems=2)["enum"] == [[True, False], [False, True]]
    assert listed(items={"const": 5}) == {"enum": [[], [5]]}
    assert listed(items={"type": "integer", "minimum": 2, "maximum": 3}, minItems=2)["enum"] == [[2, 3], [3, 2]]
    assert listed(items={"enum": ["a", 1, "a", None], "type": ["string", "null"]}, minItems=2)["enum"] == [
        ["a", None],
        [None, "a"],
    ]
    assert listed(items={"enum": ["a"], "type": "integer"}) == {"enum": [[]]}


def test_more_than_128_lists_keep_their_order() -> None:
    four = listed(items={"enum": [1, 2, 3, 4]})["enum"]
    assert len(four) == 1 + 4 + 12 + 24 + 24, "every order of four"
    five = listed(items={"enum": [1, 2, 3, 4, 5]})["enum"]
    assert len(five) == 2**5, "one order of five"
    assert len(listed(items={"enum": list(range(7))})["enum"]) == 128
    eight = {"type": "array", "items": {"enum": list(range(8))}, "uniqueItems": True}
    assert with_listed_sets(eight) == eight
    seven = listed(items={"type": "integer", "minimum": 0, "maximum": 6}, maxItems=0)
    assert seven == {"enum": [[]]}
    wide = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 7}, "uniqueItems": True}
    assert with_listed_sets(wide) == wide


@pytest.mark.parametrize(
    "part",
    [
        {"type": "array", "uniqueItems": True},
        {"type": "array", "uniqueItems": True, "items": {"type": "string"}},
        {"type": "array", "uniqueItems": True, "items": {"enum": [1], "minLength": 1}},
        {"uniqueItems": True, "items": {"enum": [1]}},
        {"type": "array", "uniqueItems": True, "items": {"enum": [1]}, "minItems": "1"},
        {"type": "array", "uniqueItems": True, "items": {"enum": [1]}, "maxItems": 1.5},
        {"type": "array", "uniqueItems": "yes", "items": {"enum": [1]}},
        {"type": "array", "items": {"enum": [1, 2]}},
    ],
)
def test_other_sets_stay_as_they_are(part: dict[str, Any]) -> None:
    assert with_listed_sets(part) == part


def test_what_says_nothing_of_uniqueness_loses_its_word() -> None:
    assert with_listed_sets({"type": "array", "uniqueItems": False}) == {"type": "array"}
    assert with_listed_sets({"maxItems": 1, "uniqueItems": True}) == {"maxItems": 1}
    root = {"$defs": {"k": {"enum": ["a"]}}, "type": "array", "items": {"$ref": "#/$defs/k"}, "uniqueItems": True}
    assert with_listed_sets(root)["enum"] == [[], ["a"]]


# Ends.


def test_the_ends_of_formats() -> None:
    assert {name: part.get("maxLength") for name, part in FORMATS.items()} == {
        "date": None,
        "date-time": 35,
        "time": 25,
        "duration": 40,
        "email": 64,
        "hostname": 64,
        "uri": 256,
    }
    assert DECIMAL == 1e-10
    email = {"type": "string", "format": "email"}
    assert with_ends(email) == {**email, "maxLength": 64}
    for said in ({"maxLength": 100}, {"pattern": "a"}):
        assert with_ends(email | said) == email | said
    assert with_ends({"format": "other"}) == {"format": "other"}
    assert with_ends({"format": ["email"]}) == {"format": ["email"]}


@pytest.mark.parametrize(
    ("day", "is_one"),
    [
        ("2023-02-28", True),
        ("2023-02-29", False),
        ("2024-02-29", True),
        ("1900-02-29", False),
        ("2000-02-29", True),
        ("0000-01-01", False),
        ("0001-01-01", True),
        ("2023-12-31", True),
        ("2023-10-09", True),
        ("2023-13-01", False),
        ("2023-00-01", False),
    ],
)
def test_days(day: str, is_one: bool) -> None:
    assert (re.search(FORMATS["date"]["pattern"], day) is not None) is is_one
    assert (re.search(FORMATS["date-time"]["pattern"], f"{day}T23:59:59Z") is not None) is is_one


def test_times_have_no_leap_seconds() -> None:
    pattern = FORMATS["time"]["pattern"]
    assert re.search(pattern, "23:59:59")
    assert not re.search(pattern, "23:59:60")


def test_numbers_between_bounds_have_ten_decimals() -> None:
    bounded = {"type": "number", "minimum": 0, "maximum": 1}
    assert with_ends(bounded) == {**bounded, "multipleOf": 1e-10}
    exclusive = {"type": ["null", "number"], "exclusiveMinimum": -1, "exclusiveMaximum": 0}
    assert with_ends(exclusive) == {**exclusive, "multipleOf": 1e-10}
    for other in (
        bounded | {"multipleOf": 0.5},
        bounded | {"type": "integer"},
        {"type": "number", "minimum": 0},
        {"type": "number", "maximum": 0},
        {"type": "number", "minimum": -1e-3, "maximum": 1e-3},
        {"type": "number", "minimum": 0, "maximum": "1"},
        {"type": ["string"], "minimum": 0, "maximum": 1},
    ):
        assert with_ends(other) == other
    assert "multipleOf" in with_ends({"type": "number", "minimum": -2e-3, "maximum": 0})


# Objects, branches, references.


def test_objects_that_name_properties_are_closed() -> None:
    schema = {"properties": {"a": {"properties": {}}}, "items": {"type": "object"}, "default": {"properties": {}}}
    assert without_additional_properties(schema) == {
        "additionalProperties": False,
        "properties": {"a": {"additionalProperties": False, "properties": {}}},
        "items": {"type": "object"},
        "default": {"properties": {}},
    }
    said = {"properties": {}, "additionalProperties": {"type": "null"}}
    assert without_additional_properties(said) == said


def test_branches_that_exclude_each_other_are_any_of() -> None:
    branches = [{"const": 1}, {"const": 2}]
    assert with_any_of({"oneOf": branches, "title": "t"}) == {"title": "t", "anyOf": branches}
    for other in (
        {"oneOf": branches, "anyOf": branches},
        {"oneOf": [{"const": 1}, {"const": 1}]},
        {"oneOf": [{"const": 0}, {"const": 1}, {"type": "integer"}]},
        {"oneOf": {"const": 1}},
    ):
        assert with_any_of(other) == other
    many = [{"const": place} for place in range(65)]
    assert "anyOf" in with_any_of({"oneOf": many[:64]})
    assert "oneOf" in with_any_of({"oneOf": many})
    root = {"oneOf": [{"$ref": "#/$defs/a"}, {"const": 2}], "$defs": {"a": {"const": 1}}}
    assert with_any_of(root)["anyOf"] == root["oneOf"]


def test_every_schema_in_a_schema_is_rewritten_and_no_value() -> None:
    def mark(part: dict[str, Any]) -> dict[str, Any]:
        return {**part, "seen": True}

    schema = {
        "properties": {"properties": {"type": "string"}},
        "patternProperties": {"^a": {}},
        "$defs": {"b": {}},
        "definitions": {"c": {}},
        "items": [{}, {}],
        "not": {},
        "const": {},
        "enum": [{}],
        "default": {},
        "examples": [{}],
        "title": "t",
    }
    seen = {"seen": True}
    assert rewritten(schema, mark) == {
        "properties": {"properties": {"type": "string", **seen}},
        "patternProperties": {"^a": seen},
        "$defs": {"b": seen},
        "definitions": {"c": seen},
        "items": [seen, seen],
        "not": seen,
        "const": {},
        "enum": [{}],
        "default": {},
        "examples": [{}],
        "title": "t",
        **seen,
    }


def test_references_lead_into_the_root() -> None:
    root = {"$defs": {"a/b": {"const": 1}, "c~d": {"const": 2}, "e": {"$ref": "#/$defs/a~1b"}}, "items": [5]}
    assert target("#", root) is root
    assert target("#/$defs/a~1b", root) == {"const": 1}
    assert target("#/$defs/c~0d", root) == {"const": 2}
    for missing in ("#/$defs/x", "#/items/0", "other#/$defs/e", "#/$defs/e/x"):
        assert target(missing, root) is None
    assert resolved({"$ref": "#/$defs/e"}, root) == {"const": 1}
    assert resolved({"$ref": "http://x"}, root) == {"$ref": "http://x"}
    assert resolved(True, root) is True
    chain: dict[str, Any] = {"$defs": {str(place): {"$ref": f"#/$defs/{place + 1}"} for place in range(15)}}
    chain["$defs"]["15"] = {"const": 1}
    assert resolved({"$ref": "#/$defs/1"}, chain) == {"const": 1}, "15 hops"
    assert resolved({"$ref": "#/$defs/0"}, chain) is None, "16 hops and no look at what is there"
    assert resolved({"$ref": "#/a"}, {"a": {"$ref": "#/a"}}) is None


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


# Endless schemas.

ITSELF = {"$ref": "#"}


@pytest.mark.parametrize(
    ("schema", "is_one"),
    [
        ({"type": "object", "properties": {"a": ITSELF}, "required": ["a"]}, True),
        ({"type": "object", "properties": {"a": ITSELF}}, False),
        ({"properties": {"a": ITSELF}, "required": ["a"]}, False),
        ({"type": "object", "additionalProperties": ITSELF, "required": ["a"]}, True),
        ({"type": "object", "additionalProperties": ITSELF, "patternProperties": {"a": {}}, "required": ["a"]}, False),
        ({"type": "array", "items": ITSELF, "minItems": 1}, True),
        ({"type": "array", "items": ITSELF}, False),
        ({"type": "array", "items": ITSELF, "minItems": 0}, False),
        ({"type": "array", "prefixItems": [{}], "items": ITSELF, "minItems": 1}, False),
        ({"type": "array", "prefixItems": [{}], "items": ITSELF, "minItems": 2}, True),
        ({"type": "array", "prefixItems": [{}, ITSELF], "minItems": 1}, False),
        ({"type": "array", "prefixItems": [{}, ITSELF], "minItems": 2}, True),
        ({"items": ITSELF, "minItems": 1}, False),
        ({"anyOf": [ITSELF, {"type": "null"}]}, False),
        ({"anyOf": [ITSELF, ITSELF]}, True),
        ({"oneOf": [ITSELF]}, True),
        ({"anyOf": []}, False),
        ({"allOf": [{}, ITSELF]}, True),
        ({"allOf": [{}]}, False),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, True),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "null"}}}, False),
    ],
)
def test_which_schemas_have_no_end(schema: Any, is_one: bool) -> None:
    assert is_endless(schema) is is_one


def test_what_is_too_large_to_look_through_counts_as_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = {"allOf": [{}, {}, ITSELF]}
    monkeypatch.setattr(schema_endless, "MAX_PARTS", 8)
    assert is_endless(schema)
    monkeypatch.setattr(schema_endless, "MAX_PARTS", 7)
    assert not is_endless(schema)


# Names.


def test_patterns_of_a_few_words_are_properties() -> None:
    schema = {
        "properties": {"a": ONE},
        "patternProperties": {"^(a|b)$": TWO, "^c$": TEXT, "^d": TEXT, r"^e\.f$": {}, "^(?:g|g)$": TEXT},
        "title": "t",
    }
    assert with_named_words(schema) == {
        "title": "t",
        "properties": {"a": {"allOf": [ONE, TWO]}, "b": TWO, "c": TEXT, "e.f": {}, "g": TEXT},
        "patternProperties": {"^d": TEXT},
    }
    assert with_named_words({"patternProperties": {"^a$": {}}}) == {"properties": {"a": {}}}
    assert with_named_words({"patternProperties": 5}) == {"patternProperties": 5}


def test_words_and_their_opposites_as_patterns() -> None:
    assert literal_pattern("aZ0-é") == r"aZ0\x{2d}\x{e9}"
    assert opposite_of_words([""]) == f"^{ANY}+$"
    assert opposite_of_words(["a"]) == f"^(|[^a]{ANY}*|a{ANY}+)$"
    assert opposite_of_words(["b", "a", "b"]) == f"^(|[^ab]{ANY}*|a{ANY}+|b{ANY}+)$"
    assert opposite_of_words(["ab"]) == f"^(|[^a]{ANY}*|a(|[^b]{ANY}*|b{ANY}+))$"
    assert opposite_of_pattern("^a") == f"^(|[^a]{ANY}*)$"
    assert opposite_of_pattern("^ab") == f"^(|[^a]{ANY}*|a(|[^b]{ANY}*))$"
    assert opposite_of_pattern("^a$") == opposite_of_words(["a"])
    assert opposite_of_pattern(r"^\.$") == opposite_of_words(["."])
    for other in ("a", "^", "^$", "^a+", 5, None, "^[a]$"):
        assert opposite_of_pattern(other) is None
    assert opposite_of_words(["x" * 100] * 40) is not None
    assert opposite_of_words(["x" * 4001]) is None
    assert opposite_of_words(["x" * 2000, "y" * 2001]) is None


@pytest.mark.parametrize(
    ("schema", "names"),
    [
        (True, True),
        (False, False),
        ({"maxLength": 3}, rf"^{ANY}{{0,3}}$"),
        ({"minLength": 2}, rf"^{ANY}{{2,}}$"),
        ({"minLength": 2, "maxLength": 3}, rf"^{ANY}{{2,3}}$"),
        ({"pattern": "^a"}, "^a"),
        ({"pattern": 5}, None),
        ({"pattern": "^[a-z]+$", "maxLength": 3}, "^[a-z]{1,3}$"),
        ({"pattern": "^[a-z]*$", "maxLength": 3}, "^[a-z]{0,3}$"),
        ({"pattern": "^[a-z]+$", "minLength": 2}, "^[a-z]{2,}$"),
        ({"pattern": r"^\d*$", "minLength": 1}, r"^\d{1,}$"),
        ({"pattern": "^a+$", "maxLength": 3}, None),
        ({"maxLength": "3"}, None),
        ({"minLength": 1.5}, None),
        ({"not": {"pattern": "^a"}}, f"^(|[^a]{ANY}*)$"),
        ({"not": {"const": "a"}}, f"^(|[^a]{ANY}*|a{ANY}+)$"),
        ({"not": {"enum": ["a", 5]}}, f"^(|[^a]{ANY}*|a{ANY}+)$"),
        ({"not": {"minLength": 5}}, None),
        ({"not": {}}, None),
        ({"not": True}, None),
        ({"not": {"const": "a"}, "maxLength": 2}, None),
        ({"format": "email"}, None),
        ({"$ref": "#/$defs/a"}, "^b"),
    ],
)
def test_what_is_asked_of_names(schema: Any, names: Any) -> None:
    root = {"$defs": {"a": {"pattern": "^b"}}}
    assert pattern_of_names(schema, root=root) == names


def test_listed_names_are_a_set() -> None:
    assert pattern_of_names({"enum": ["a", "b", 1]}, root={}) == frozenset(("a", "b"))
    assert pattern_of_names({"const": "a"}, root={}) == frozenset(("a",))


# Integers.


@pytest.mark.parametrize(
    ("schema", "exact"),
    [
        ({"minimum": 2**53 + 1}, {"minimum": 2**53 + 2}),
        ({"maximum": 2**53 + 1}, {"maximum": 2**53}),
        ({"exclusiveMinimum": 2**53 + 1}, {"exclusiveMinimum": 2**53 + 2}),
        ({"exclusiveMaximum": 2**53 + 1}, {"exclusiveMaximum": 2**53}),
        ({"minimum": -(2**53) - 1}, {"minimum": -(2**53)}),
        ({"maximum": -(2**53) - 1}, {"maximum": -(2**53) - 2}),
        ({"maximum": 2**63}, {"maximum": 2**63 - 1024}),
        ({"minimum": -(2**64)}, {"minimum": -(2**63) + 1024}),
        ({"minimum": 5, "maximum": 2.5}, {"minimum": 5, "maximum": 2.5}),
        ({"default": 2**53 + 1, "examples": [2**53 + 1]}, {"default": 2**53 + 1, "examples": [2**53 + 1]}),
        ({"items": [{"minimum": 2**53 + 1}]}, {"items": [{"minimum": 2**53 + 2}]}),
        ({"const": 2**63 - 1}, {"const": 2**63 - 1}),
        ({"enum": [True, 2**53]}, {"enum": [True, 2**53]}),
    ],
)
def test_bounds_move_inwards(schema: Any, exact: Any) -> None:
    assert with_exact_integers(schema) == exact


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"const": 2**53 + 1}, "9007199254740993 at #/const has more digits than can be written exactly"),
        (
            {"items": [{"enum": [{"a": [2**53 + 1]}]}]},
            "9007199254740993 at #/items/0/enum has more digits than can be written exactly",
        ),
        ({"const": 2**63}, "9223372036854775808 at #/const has more digits than can be written exactly"),
        ({"const": 10**40}, "a number of more than 40 digits at #/const has more digits than can be written exactly"),
        ({"const": 10**40 - 1}, f"{10**40 - 1} at #/const has more digits than can be written exactly"),
        ({"maximum": -(2**63)}, "-9223372036854775808 at #/maximum does not fit into 64 bits"),
        ({"minimum": 2**63}, "-9223372036854775808 at #/minimum does not fit into 64 bits"),
    ],
)
def test_integers_that_cannot_be_written(schema: Any, told: str) -> None:
    with pytest.raises(Inexpressible) as caught:
        with_exact_integers(schema)
    assert str(caught.value) == told


# Alternatives.


def test_alternatives_and_demands_are_as_short_as_they_can_be() -> None:
    assert any_of([]) is False
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
        ({"not": 5}, "#/not is no schema"),
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
        guaranteed({"allOf": [ITSELF]})
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
