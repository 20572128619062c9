"""Constraints: what is refused and why, their greatest size, and which are the same."""

from typing import Any

import pytest

from pagoda_common.errors import InvalidRequest
from pagoda_common.params.structured_outputs import StructuredOutputsParams, is_deeper_than

CONSTRAINTS: list[tuple[dict[str, Any], str]] = [
    (
        {},
        "structured_outputs must have exactly one of json, regex, choice, grammar, json_object, structural_tag, "
        "got none",
    ),
    (
        {"regex": "a", "grammar": "b"},
        "structured_outputs must have exactly one of json, regex, choice, grammar, json_object, structural_tag, "
        "got regex and grammar",
    ),
    ({"regex": "a\0"}, "structured_outputs.regex must not contain a NUL character"),
    ({"regex": ""}, "structured_outputs.regex must be a string that is not empty, got ''"),
    ({"regex": "\ud800"}, "structured_outputs.regex must be valid Unicode"),
    ({"grammar": "a" * 262_145}, "structured_outputs.grammar must have at most 262144 bytes, got 262145"),
    ({"json_object": 1}, "structured_outputs.json_object must be true, got 1"),
    ({"choice": "a"}, "structured_outputs.choice must be a list of strings, got 'a'"),
    ({"choice": []}, "structured_outputs.choice must have between 1 and 10000 strings, got 0"),
    ({"choice": ["a", 1]}, "structured_outputs.choice.1 must be a string that is not empty, got 1"),
    ({"choice": ["a" * 200_000, "é" * 31_073]}, "structured_outputs.choice must have at most 262144 bytes, got 262146"),
    (
        {"regex": "a", "disable_any_whitespace": 1},
        "structured_outputs.disable_any_whitespace must be true or false, got 1",
    ),
    ({"json": "[1]"}, "structured_outputs.json must be a JSON object, got [1]"),
    ({"structural_tag": "true"}, "structured_outputs.structural_tag must be a JSON object, got True"),
    (
        {"json": {"a": {1}}},
        "structured_outputs.json cannot be written as JSON: Object of type set is not JSON serializable",
    ),
    (
        {"regex": "a", "start_after_token_ids": "1"},
        "structured_outputs.start_after_token_ids must be at most 64 token ids, got '1'",
    ),
    (
        {"regex": "a", "start_after_token_ids": [-1]},
        "structured_outputs.start_after_token_ids must be token ids, got -1",
    ),
]


@pytest.mark.parametrize(("values", "message"), CONSTRAINTS, ids=[text[:60] for _, text in CONSTRAINTS])
def test_what_a_refused_constraint_says(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        StructuredOutputsParams(**values)
    assert str(caught.value) == message


def test_a_constraint_takes_its_greatest_run_and_depth() -> None:
    assert len(StructuredOutputsParams(regex="a", start_after_token_ids=[0] * 64).start_after_token_ids) == 64
    assert StructuredOutputsParams(choice=["a" * 200_000, "é" * 31_072]).kind == "choice"
    deep: Any = {}
    for _ in range(63):
        deep = {"a": deep}
    assert StructuredOutputsParams(json=deep).kind == "json"
    with pytest.raises(InvalidRequest) as caught:
        StructuredOutputsParams(json={"a": deep})
    assert str(caught.value) == "structured_outputs.json must be nested at most 64 levels deep"


def test_how_deep_a_value_is() -> None:
    assert not is_deeper_than(1, 1)
    assert not is_deeper_than([], 1)
    assert not is_deeper_than({"a": 1}, 1)
    assert is_deeper_than({"a": {}}, 1)
    assert is_deeper_than([()], 1)
    assert not is_deeper_than([{"a": 1}, [2]], 2)
    assert is_deeper_than([1, {"b": 2, "a": [1]}], 2)
    assert is_deeper_than([([],)], 2)


def test_what_makes_two_grammars_the_same() -> None:
    first = StructuredOutputsParams(json={"a": 1})
    assert first.grammar_key == ("json", '{"a":1}', False, False, None)
    whole = StructuredOutputsParams(
        regex="b",
        disable_any_whitespace=True,
        disable_additional_properties=True,
        whitespace_pattern=" ",
        start_after_token_ids=[1],
    )
    assert whole.grammar_key == ("regex", "b", True, True, " ")
    assert StructuredOutputsParams(choice=["x"]).grammar_key[:2] == ("choice", ("x",))
    one_of_two = StructuredOutputsParams(regex="b", disable_additional_properties=True)
    assert one_of_two.grammar_key == ("regex", "b", False, True, None)
