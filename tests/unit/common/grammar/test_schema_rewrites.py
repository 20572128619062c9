"""What each rewrite of a JSON schema writes, keyword by keyword, with its bounds on both sides."""

import re
from typing import Any

import pytest

from pagoda_common.grammar import schema_endless
from pagoda_common.grammar.json_schema import (
    DECIMAL,
    FORMATS,
    resolved,
    rewritten,
    target,
    with_any_of,
    with_ends,
    with_listed_sets,
    without_additional_properties,
)
from pagoda_common.grammar.schema_endless import is_endless
from pagoda_common.grammar.schema_integers import with_exact_integers
from pagoda_common.grammar.schema_names import (
    literal_pattern,
    opposite_of_pattern,
    opposite_of_words,
    pattern_of_names,
    with_named_words,
)
from pagoda_common.grammar.schema_opposites import Inexpressible, any_of

ANY = r"(.|\n)"


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
