"""Schemas with not, if, contains and their kind: what is made is valid, and what can be said is said whole."""

import itertools
import json
from random import Random
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for
from llguidance import LLExecutor, LLMatcher

from pagoda_common.errors import InvalidRequest
from pagoda_common.grammar.matcher import GrammarCompiler
from pagoda_common.grammar.schema_names import opposite_of_pattern, opposite_of_words
from pagoda_common.params.structured_outputs import StructuredOutputsParams

STRING, INTEGER = {"type": "string", "maxLength": 5}, {"type": "integer", "minimum": 0, "maximum": 99}
AB = {"type": "object", "properties": {"a": INTEGER, "b": STRING, "c": {"type": "boolean"}}}
CLOSED_AB = {**AB, "additionalProperties": False}
SHAPE = {
    "type": "object",
    "properties": {"kind": {"enum": ["circle", "square"]}, "radius": INTEGER, "side": INTEGER},
    "required": ["kind"],
    "additionalProperties": False,
}
TREE = {
    "type": "object",
    "properties": {"value": INTEGER, "left": {"$ref": "#/$defs/tree"}, "note": STRING},
    "additionalProperties": False,
    "dependentRequired": {"left": ["value"]},
    "not": {"required": ["note", "left"]},
}
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
OBJECTS = [
    {},
    {"a": 1},
    {"a": 1, "b": "x"},
    {"a": 1, "b": "x", "c": True},
    {"b": "x"},
    {"c": False},
    {"a": 1, "c": True},
    {"a": 5},
]
ARRAYS: list[Any] = [
    [],
    [1],
    [2],
    [1, 2],
    [1, 1],
    [2, 2, 1],
    [1, 2, 1, 2],
    [3, 3],
    ["x"],
    ["x", 1],
    [1, "x"],
    [1, 1, 1],
]
VALUES: list[Any] = [None, True, False, 0, 1, 2, 7, 1.5, "", "a", "b", "ab", "abc", "ä", [], [1], {}, {"a": 1}]
SHAPES = [
    {"kind": "circle"},
    {"kind": "circle", "radius": 1},
    {"kind": "square", "radius": 1},
    {"kind": "square", "side": 1},
    {"kind": "square", "radius": 1, "side": 2},
]

CASES: list[tuple[dict[str, Any], list[Any]]] = [
    ({"not": {"type": "string"}}, VALUES),
    ({"not": {"enum": ["a", 1, None, True, []]}}, VALUES),
    ({"not": {"const": {"a": 1}}}, VALUES),
    ({"not": {"const": [1]}}, VALUES),
    ({"type": ["string", "integer"], "not": {"enum": ["a", "ab", 1]}}, VALUES),
    ({"type": "string", "not": {"pattern": "^ab"}, "maxLength": 6}, VALUES),
    ({"type": "string", "not": {"pattern": "^ab$"}, "maxLength": 6}, VALUES),
    ({"type": "string", "not": {"minLength": 2}}, VALUES),
    ({"type": "integer", "minimum": 0, "not": {"minimum": 2, "maximum": 6}, "maximum": 10}, VALUES),
    ({"not": {"not": {"type": "boolean"}}}, VALUES),
    ({"not": {"anyOf": [{"type": "string"}, {"type": "object"}, {"maximum": 1}]}}, VALUES),
    ({"enum": VALUES, "not": {"allOf": [{"type": "string"}, {"minLength": 2}]}}, VALUES),
    ({"not": {"oneOf": [{"type": "string"}, {"enum": ["a", "b", 1]}]}, "enum": VALUES}, VALUES),
    ({**CLOSED_AB, "not": {"required": ["a", "b"]}}, OBJECTS),
    ({**CLOSED_AB, "not": {"properties": {"a": {"const": 1}}, "required": ["a"]}}, OBJECTS),
    ({**CLOSED_AB, "minProperties": 2}, OBJECTS),
    ({**CLOSED_AB, "minProperties": 1, "maxProperties": 2}, OBJECTS),
    ({**AB, "minProperties": 1}, OBJECTS),
    ({"type": "object", "minProperties": 1}, OBJECTS),
    ({"type": "object", "required": ["a"], "minProperties": 2}, OBJECTS),
    ({"required": ["a", "b"], "properties": {"a": INTEGER, "b": STRING}, "minProperties": 2}, OBJECTS),
    ({"type": "object", "propertyNames": {"enum": ["a", "b"]}, "minProperties": 2}, OBJECTS),
    ({**AB, "maxProperties": 2, "required": ["a"]}, OBJECTS),
    ({**CLOSED_AB, "dependentRequired": {"a": ["b"], "c": ["a"]}}, OBJECTS),
    ({**CLOSED_AB, "$schema": DRAFT_7, "dependencies": {"a": ["b"], "c": {"required": ["a"]}}}, OBJECTS),
    ({**CLOSED_AB, "dependentSchemas": {"b": {"properties": {"a": {"minimum": 3}}, "required": ["c"]}}}, OBJECTS),
    ({**AB, "if": {"required": ["a"]}, "then": {"required": ["b"]}, "else": {"required": ["c"]}}, OBJECTS),
    ({**AB, "if": {"required": ["a"]}, "else": {"required": ["c"]}}, OBJECTS),
    ({**AB, "unevaluatedProperties": False}, [*OBJECTS, {"d": 1}]),
    ({"allOf": [AB], "unevaluatedProperties": False, "properties": {"d": INTEGER}}, [*OBJECTS, {"d": 1}, {"e": 1}]),
    (
        {"type": "object", "anyOf": [{"properties": {"a": INTEGER}, "required": ["a"]}, {"properties": {"b": STRING}}]}
        | {"unevaluatedProperties": False},
        [{}, {"a": 1}, {"b": "x"}, {"c": True}],
    ),
    (
        {
            **SHAPE,
            "if": {"properties": {"kind": {"const": "circle"}}},
            "then": {"required": ["radius"], "properties": {"side": False}},
            "else": {"required": ["side"]},
        },
        SHAPES,
    ),
    (
        {
            **SHAPE,
            "allOf": [
                {"if": {"properties": {"kind": {"const": name}}}, "then": {"required": [part]}}
                for name, part in (("circle", "radius"), ("square", "side"))
            ],
        },
        SHAPES,
    ),
    ({"oneOf": [{"type": "integer"}, {"enum": [1, "a", "b"]}]}, VALUES),
    ({"oneOf": [{"type": "string", "maxLength": 2}, {"type": "string", "pattern": "^ab"}]}, VALUES),
    ({**CLOSED_AB, "oneOf": [{"required": ["a"]}, {"required": ["b"]}, {"required": ["c"]}]}, OBJECTS),
    ({"oneOf": [{**CLOSED_AB, "required": ["a"]}, {"type": "object", "maxProperties": 0}]}, OBJECTS),
    ({"type": "array", "items": INTEGER, "contains": {"const": 1}, "maxItems": 5}, ARRAYS),
    ({"type": "array", "contains": {"type": "string"}, "maxItems": 3}, ARRAYS),
    ({"type": "array", "items": {"enum": [1, 2]}, "contains": {"const": 1}, "minContains": 2, "maxItems": 5}, ARRAYS),
    ({"type": "array", "items": {"enum": [1, 2]}, "contains": {"const": 1}, "maxContains": 1, "maxItems": 5}, ARRAYS),
    ({"type": "array", "contains": {"const": 1}, "minContains": 0, "maxItems": 3}, ARRAYS),
    ({"type": "array", "items": {"enum": [1, 2]}, "not": {"contains": {"const": 1}}, "maxItems": 5}, ARRAYS),
    ({"type": "array", "not": {"items": {"type": "integer"}}, "maxItems": 4}, ARRAYS),
    ({"type": "array", "items": INTEGER, "not": {"prefixItems": [{"const": 1}]}, "maxItems": 4}, ARRAYS),
    ({"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 3}, "uniqueItems": True}, ARRAYS),
    (
        {"type": "array", "prefixItems": [{"type": "string"}, INTEGER], "items": False, "uniqueItems": True},
        [[], ["x"], ["x", 1], ["x", 1, 1]],
    ),
    ({"type": "array", "prefixItems": [{"type": "string"}], "unevaluatedItems": False}, [[], ["x"], ["x", 1], [1]]),
    ({"contains": {"const": 1}, "maxItems": 3, "type": ["array", "null"]}, [*ARRAYS, None]),
    ({"type": "object", "propertyNames": {"pattern": "^[ab]$"}, "maxProperties": 2}, OBJECTS),
    ({**AB, "propertyNames": {"enum": ["a", "c"]}}, OBJECTS),
    ({**AB, "propertyNames": {"maxLength": 2}}, [*OBJECTS, {"dd": 1}, {"ddd": 1}]),
    ({**AB, "propertyNames": {"pattern": "^[a-z]+$", "maxLength": 2}}, [*OBJECTS, {"dd": 1}, {"ddd": 1}, {"D": 1}]),
    ({**CLOSED_AB, "propertyNames": {"not": {"const": "a"}}}, OBJECTS),
    ({**AB, "propertyNames": False}, OBJECTS),
    ({"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 5}, [0, 1, 1.5, 1.3, 6]),
    ({"$ref": "#/$defs/tree", "$defs": {"tree": TREE}}, [{}, {"value": 1}, {"left": {}}, {"value": 1, "left": {}}]),
    ({"not": {"$ref": "#/$defs/text"}, "$defs": {"text": {"type": ["string", "object"]}}}, VALUES),
]


class Letters:
    """Stands for a tokenizer: a token is a byte."""

    vocab_size = 256
    special_token_ids = frozenset({0})

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(text.encode())


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer=Letters(), vocab_size=256)  # type: ignore[arg-type]


def accepted(matcher: LLMatcher, documents: list[Any]) -> list[Any]:
    """Those that `matcher` takes."""
    found = []
    for document in documents:
        copy, text = matcher.deep_copy(), list(json.dumps(document, ensure_ascii=False).encode())
        if copy.try_consume_tokens(text) == len(text) and copy.is_accepting():
            found.append(document)
    return found


@pytest.mark.parametrize(("schema", "documents"), CASES)
def test_what_is_valid_is_accepted_and_nothing_else(
    compiler: GrammarCompiler, schema: dict[str, Any], documents: list[Any]
) -> None:
    validator = validator_for(schema, default=Draft202012Validator)(schema)
    valid = [document for document in documents if validator.is_valid(document)]
    assert accepted(compiler.compile(StructuredOutputsParams(json=schema)), documents) == valid
    assert valid


def walk(compiler: GrammarCompiler, template: LLMatcher, random: Random) -> str | None:
    """A random text that `template` takes; None when it came to no end."""
    matcher, executor = template.deep_copy(), LLExecutor(1)
    bits = np.zeros((1, -(-compiler.num_bits // 32)), dtype=np.uint32)
    text = bytearray()
    while len(text) < 120:
        bits[:] = 0
        executor.unsafe_compute_mask_ptr([(matcher, 0)], bits.ctypes.data, bits.nbytes, 1)
        assert not matcher.is_error(), matcher.get_error()
        allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8)[0], bitorder="little"))
        if compiler.end_id in allowed and (len(allowed) == 1 or random.random() < 0.3):
            return text.decode()
        allowed = allowed[allowed < compiler.end_id]
        closing = [token for token in allowed if token in b'"]}']
        plain = [token for token in allowed if token < 128]
        token = random.choice(closing) if closing and random.random() < 0.4 else random.choice(plain or list(allowed))
        assert matcher.consume_token(int(token))
        text.append(int(token))
    return None


@pytest.mark.parametrize("schema", [schema for schema, _ in CASES])
def test_a_random_walk_ends_in_a_valid_document(compiler: GrammarCompiler, schema: dict[str, Any]) -> None:
    random = Random(json.dumps(schema))
    template = compiler.compile(StructuredOutputsParams(json=schema, disable_any_whitespace=True))
    texts = [text for _ in range(8) if (text := walk(compiler, template, random)) is not None]
    validator = validator_for(schema, default=Draft202012Validator)(schema)
    assert [text for text in texts if not validator.is_valid(json.loads(text))] == []
    assert texts


def random_schema(random: Random, depth: int) -> dict[str, Any]:
    """Some schema of everything."""
    names, inner = "abc", lambda: random_schema(random, depth - 1)
    plain = [
        lambda: {"type": random.sample(["string", "integer", "object", "array", "null"], 3)},
        lambda: {"enum": random.sample([1, 2, 3, "a", "b", "ab", None, True, {}, []], 4)},
        lambda: {"minimum": random.randint(0, 3)},
        lambda: {"maxLength": random.randint(0, 3)},
        lambda: {"pattern": random.choice(["^a", "^b$", "^[ab]*$"])},
        lambda: {"required": random.sample(names, 2)},
        lambda: {"minItems": random.randint(0, 2)},
        lambda: {"maxProperties": random.randint(0, 2)},
        lambda: {"dependentRequired": {random.choice(names): [random.choice(names)]}},
    ]
    nested = [
        lambda: {"not": inner()},
        lambda: {"oneOf": [inner(), inner()]},
        lambda: {"anyOf": [inner(), inner()]},
        lambda: {"allOf": [inner(), inner()]},
        lambda: {"if": inner(), "then": inner(), "else": inner()},
        lambda: {"properties": {random.choice(names): inner(), random.choice(names): inner()}},
        lambda: {"items": inner()},
        lambda: {"contains": inner(), "maxContains": 2},
        lambda: {"dependentSchemas": {random.choice(names): inner()}},
        lambda: {"propertyNames": {"maxLength": 3}},
        lambda: {"properties": {random.choice(names): inner()}, "unevaluatedProperties": False},
    ]
    schema: dict[str, Any] = {}
    for _ in range(random.randint(1, 2)):
        schema |= random.choice(plain + nested * 2 if depth else plain)()
    return schema


def test_whatever_compiles_makes_valid_documents(compiler: GrammarCompiler) -> None:
    num_compiled = num_texts = 0
    for seed in range(60):
        random = Random(seed)
        schema = random_schema(random, 2)
        validator = Draft202012Validator(schema)
        try:
            template = compiler.compile(StructuredOutputsParams(json=schema, disable_any_whitespace=True))
        except InvalidRequest:
            continue
        num_compiled += 1
        for _ in range(3):
            text = walk(compiler, template, random)
            if text is not None:
                num_texts += 1
                assert validator.is_valid(json.loads(text)), (seed, schema, text)
        invalid = [document for document in (*VALUES, *OBJECTS, *ARRAYS) if not validator.is_valid(document)]
        assert accepted(template, invalid) == [], (seed, schema)
    assert num_compiled > 40
    assert num_texts > 70


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"properties": {"p": {"type": "array", "uniqueItems": True}}}, "'uniqueItems' at #/properties/p"),
        ({"type": "string", "not": {"format": "email"}}, "'not' at #: #/not/format"),
        ({"items": {"not": {"multipleOf": 3, "type": "number"}, "type": "number"}}, "'not' at #/items"),
        ({"propertyNames": {"format": "email"}}, "'propertyNames' at #"),
        ({"contains": {}, "minContains": 1000}, "minContains is 1000"),
        ({"oneOf": [{"pattern": "a+"}, {"pattern": "b+"}]}, "oneOf"),
        ({"properties": {"p": {"minProperties": 2}}}, "'minProperties' at #/properties/p is 2"),
        ({"additionalProperties": {"type": "integer"}, "required": ["a"], "minProperties": 3}, "'minProperties' at #"),
        ({"properties": {"a": {}}, "patternProperties": {"^x": {}}, "minProperties": 3}, "'minProperties' at #"),
        ({"propertyNames": {"pattern": "^[ab]"}, "minProperties": 2}, "'minProperties' at #"),
        ({"type": "object", "not": {"maxProperties": 1}}, "'not' at #: #/not/maxProperties"),
        (
            {"unevaluatedProperties": False, "anyOf": [{}] * 9, "oneOf": [{}] * 9},
            "many",
        ),
    ],
)
def test_what_cannot_be_guaranteed_is_named(compiler: GrammarCompiler, schema: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        compiler.compile(StructuredOutputsParams(json=schema))
    assert message in caught.value.message


def test_opposites_of_words_are_all_others() -> None:
    import re

    pattern = opposite_of_words(["", "a", "ab", "b-c"])
    assert pattern is not None
    spelled = re.compile(re.sub(r"\\x\{(\w+)\}", lambda match: f"\\x{int(match[1], 16):02x}", pattern))
    words = ["", "a", "ab", "b-c", "b", "b-", "abc", "\n", "b-cd", "c"]
    assert [word for word in words if spelled.fullmatch(word)] == words[4:]
    assert opposite_of_words(["x" * 5000]) is None
    assert opposite_of_pattern("^(a|b)") is None


@pytest.mark.parametrize(
    ("schema", "text", "is_accepted"),
    [
        ({"properties": {"a": INTEGER}, "required": ["a"], "minProperties": 2}, '{"a": 1, "x": 2}', True),
        ({"properties": {"a": INTEGER}, "required": ["a"], "minProperties": 2}, '{"a": 1, "a": 2}', False),
        ({"properties": {"a": INTEGER}, "minProperties": 2}, '{"a": 1, "x": 2}', True),
        ({"properties": {"a": INTEGER}, "minProperties": 2}, '{"x": 1, "x": 2}', False),
        ({"properties": {"a": INTEGER}, "minProperties": 2}, '{"a": 1}', False),
    ],
)
def test_a_name_that_is_there_twice_is_no_second_property(
    compiler: GrammarCompiler, schema: dict[str, Any], text: str, is_accepted: bool
) -> None:
    matcher, tokens = compiler.compile(StructuredOutputsParams(json={"type": "object", **schema})), list(text.encode())
    assert (matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()) == is_accepted


@pytest.mark.parametrize(
    ("keywords", "is_possible"),
    [
        ({"minLength": 2, "type": "string", "format": "email"}, True),
        ({"type": "string", "format": "email"}, False),
        ({"multipleOf": 3, "minimum": 2, "type": "number"}, True),
        ({"patternProperties": {"x": {}}, "required": ["a"], "type": "object"}, True),
        ({"patternProperties": {"x": {}}, "type": "object"}, False),
    ],
)
def test_an_opposite_does_not_hang_on_the_order_of_keywords(
    compiler: GrammarCompiler, keywords: dict[str, Any], is_possible: bool
) -> None:
    """What of a schema can be written as its opposite is enough, unless it is another type alone."""
    for names in itertools.permutations(keywords):
        params = StructuredOutputsParams(json={"not": {name: keywords[name] for name in names}})
        if is_possible:
            compiler.compile(params)
            continue
        with pytest.raises(InvalidRequest, match="'not' at #"):
            compiler.compile(params)
