"""Whatever a matcher lets a walk write under a random schema ends, and fits the schema.

PAGODA_WALK_SCHEMAS=20000 PAGODA_WALK_SEEDS=10 takes more schemas, and more walks under each.
"""

import json
import os
from decimal import Decimal
from functools import cache
from random import Random
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from pagoda_common.errors import InvalidRequest
from pagoda_common.grammar.matcher import GrammarCompiler
from pagoda_common.params.structured_outputs import StructuredOutputsParams
from pagoda_common.text.tokenizer import Tokenizer
from tests.grammar_walk import DeadEnd, Walker
from tests.random_schemas import random_schema
from tests.unit.text.tokenizers_at_hand import byte_tokenizer, load

NUM_SCHEMAS = int(os.environ.get("PAGODA_WALK_SCHEMAS", "200"))
NUM_SEEDS = int(os.environ.get("PAGODA_WALK_SEEDS", "2"))
NUM_PARTS = 10


@cache
def walker(name: str) -> tuple[GrammarCompiler, Walker]:
    tokenizer = byte_tokenizer() if name == "bytes" else load(name)
    compiler = GrammarCompiler(tokenizer=tokenizer, vocab_size=tokenizer.vocab_size)
    return compiler, Walker(compiler, tokenizer)


@pytest.mark.parametrize("tokenizer", ["pagoda-tiny", "bytes", "phi-3"])
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_a_walk_ends_in_a_document_that_fits(tokenizer: str, part: int) -> None:
    compiler, walk = walker(tokenizer)
    num_compiled = 0
    for number in range(part, NUM_SCHEMAS, NUM_PARTS):
        schema = random_schema(number)
        try:
            matcher = compiler.compile(StructuredOutputsParams(json=schema))
        except InvalidRequest:
            continue  # said at once, which is no dead end
        num_compiled += 1
        exact = json.loads(json.dumps(schema), parse_float=Decimal)
        judge = Draft202012Validator(exact, format_checker=Draft202012Validator.FORMAT_CHECKER)
        for seed in range(NUM_SEEDS):
            text = walk.text(matcher.deep_copy(), Random(f"{number} {seed}"))
            document = json.loads(text, parse_float=_number, parse_constant=_refuse)
            problem = next(judge.iter_errors(document), None)
            assert problem is None, f"schema {number}, seed {seed}: {text!r}: {problem.message}"
    assert num_compiled > NUM_SCHEMAS / NUM_PARTS / 2


def _number(text: str) -> Decimal | float:
    try:
        return Decimal(text)
    except ArithmeticError:  # an exponent of many digits
        return float(text)


def _refuse(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("json", True),
        ("json_object", True),
        ("regex", r"[a-z]{2,5}(\d{1,3}|x)?"),
        ("regex", r"(ab|c)*d"),
        ("regex", r"^\w+@\w+\.(com|org)$"),
        ("regex", "[^a]"),
        ("choice", ["yes", "no", "yes, but", 'q"', "ü"]),
        ("grammar", 'root ::= "[" item ("," item)* "]"\nitem ::= [0-9]{1,2} | root'),
        ("grammar", 'root ::= [^"\\\\] "é" | "" "x"?'),
        ("grammar", 'start: (A | B)+ "."\nA: /[a-c]+/\nB: /\\d{2}/'),
        ("grammar", 'start: a\na: "(" a ")" | "x"'),
    ],
)
@pytest.mark.parametrize("tokenizer", ["pagoda-tiny", "bytes"])
def test_a_walk_ends_under_every_kind_of_constraint(tokenizer: str, kind: str, value: Any) -> None:
    compiler, walk = walker(tokenizer)
    matcher = compiler.compile(StructuredOutputsParams(**{kind: value}))
    for seed in range(10):
        text = walk.text(matcher.deep_copy(), Random(seed))
        if kind.startswith("json"):
            json.loads(text)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"anyOf": [{"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1}, {"$ref": "#"}]},
        {"type": "object", "additionalProperties": {"$ref": "#"}, "required": ["x"]},
    ],
)
def test_a_schema_that_asks_for_itself_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        walker("pagoda-tiny")[0].compile(StructuredOutputsParams(json=schema))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"$ref": "#"}}},
        {"anyOf": [{"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1}, {"type": "null"}]},
        {"type": "array", "items": {"$ref": "#"}},
    ],
)
def test_a_schema_that_may_end_is_taken(schema: dict[str, Any]) -> None:
    compiler, walk = walker("pagoda-tiny")
    walk.text(compiler.compile(StructuredOutputsParams(json=schema)), Random(1))


def test_a_name_in_escapes_is_no_way_around_its_schema() -> None:
    compiler, _ = walker("pagoda-tiny")
    tokenizer = Tokenizer.load("pagoda-tiny")
    for schema in (
        {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
        {"type": "object", "patternProperties": {"^a": {"type": "integer"}}, "additionalProperties": True},
    ):
        matcher = compiler.compile(StructuredOutputsParams(json=schema))
        ids = tokenizer.encode(r'{"\u0061":"x"}', add_special_tokens=False)
        assert matcher.validate_tokens(ids) < len(ids)


def test_a_name_whose_value_cannot_be_is_never_begun() -> None:
    compiler, walk = walker("pagoda-tiny")
    schema = {"type": "object", "patternProperties": {"^a": {"type": "string", "minLength": 2, "maxLength": 1}}}
    matcher = compiler.compile(StructuredOutputsParams(json=schema))
    tokenizer = Tokenizer.load("pagoda-tiny")
    ids = tokenizer.encode('{"a', add_special_tokens=False)
    assert matcher.validate_tokens(ids) < len(ids)
    with pytest.raises(DeadEnd):
        walk.text(compiler.compile(StructuredOutputsParams(regex="x{20}")), Random(0), max_tokens=5)
