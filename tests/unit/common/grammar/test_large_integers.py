"""Integers in schemas fit to the digit, or are refused."""

from typing import Any

import pytest

from pagoda_common.errors import InvalidRequest
from pagoda_common.grammar.matcher import GrammarCompiler
from pagoda_common.params.structured_outputs import StructuredOutputsParams
from pagoda_common.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load("pagoda-tiny")
COMPILER = GrammarCompiler(tokenizer=TOKENIZER, vocab_size=TOKENIZER.vocab_size)
TOO_LONG = [2**53 + 1, -(2**53) - 1, 1 - 2**63, 2**63, 12345678901234567890, 2**64 + 1, -(2**63), -(2**63) - 1, 10**100]


def takes(schema: dict[str, Any], text: str) -> bool:
    matcher = COMPILER.compile(StructuredOutputsParams(json=schema))
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    return all(map(matcher.consume_token, ids)) and matcher.is_accepting()


@pytest.mark.parametrize("value", [2**53, 2**53 + 2, 2**60, 2**63 - 1024, 2**63 - 1, -(2**53), -(2**53) - 2, -(2**60)])
@pytest.mark.parametrize("shape", ["const", "enum", "nested"])
def test_a_value_that_a_float_holds_is_written_to_the_digit(value: int, shape: str) -> None:
    schemas: dict[str, Any] = {
        "const": {"const": value},
        "enum": {"enum": [value]},
        "nested": {"const": {"a": [value]}},
    }
    text = f'{{"a": [{value}]}}' if shape == "nested" else str(value)
    assert takes(schemas[shape], text)
    assert not takes(schemas[shape], text.replace(str(value), str(value - 1)))


@pytest.mark.parametrize(
    "value",
    TOO_LONG,
)
@pytest.mark.parametrize("shape", ["const", "enum", "nested", "property", "items"])
def test_a_value_that_would_be_rounded_is_refused(value: int, shape: str) -> None:
    schemas: dict[str, Any] = {
        "const": {"const": value},
        "enum": {"enum": [1, value]},
        "nested": {"const": {"a": [value]}},
        "property": {"type": "object", "properties": {"a": {"enum": [value]}}},
        "items": {"type": "array", "items": {"anyOf": [{"const": value}, {"type": "null"}]}},
    }
    with pytest.raises(InvalidRequest, match="more digits than can be written exactly"):
        COMPILER.compile(StructuredOutputsParams(json=schemas[shape]))


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"minimum": 2**53 + 1}, 2**53 + 2, 2**53),
        ({"minimum": 2**53 + 1, "maximum": 2**63 - 1}, 2**54, 2**63),
        ({"maximum": 2**53 + 1}, 2**53, 2**53 + 2),
        ({"minimum": -(2**63), "maximum": 2**63 - 1}, -(2**62), 2**63 + 1),
        ({"minimum": 0, "maximum": 2**64 - 1}, 2**62, 2**64),
        ({"exclusiveMinimum": -(2**53) - 1}, -(2**53) + 1, -(2**53) - 2),
        ({"minimum": -(10**100), "maximum": 10**100}, 5, 10**101),
    ],
)
def test_a_bound_is_never_moved_outwards(schema: dict[str, Any], right: int, wrong: int) -> None:
    schema = {"type": "integer", **schema}
    assert takes(schema, str(right))
    assert not takes(schema, str(wrong))


def test_a_bound_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="does not fit into 64 bits"):
        COMPILER.compile(StructuredOutputsParams(json={"type": "integer", "minimum": 2**64}))


def test_a_bound_that_a_float_holds_is_kept() -> None:
    schema = {"type": "integer", "minimum": 2**53, "maximum": 2**53 + 2}
    assert takes(schema, str(2**53 + 1))
    assert not takes(schema, str(2**53 - 1))
    assert not takes(schema, str(2**53 + 3))


@pytest.mark.parametrize("value", [2**70])
def test_what_is_no_demand_may_be_any_number(value: int) -> None:
    assert takes({"type": "null", "default": value, "examples": [value]}, "null")
