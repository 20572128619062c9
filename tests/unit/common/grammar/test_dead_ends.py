"""A walk along allowed tokens never stops half-way where patterns name properties that are there already."""

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from pagoda_common.grammar.matcher import GrammarCompiler
from pagoda_common.params.structured_outputs import StructuredOutputsParams
from pagoda_common.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load("pagoda-tiny")
COMPILER = GrammarCompiler(tokenizer=TOKENIZER, vocab_size=TOKENIZER.vocab_size)
ONE, TWO = {"enum": [1]}, {"enum": [1, 2]}
SCHEMAS: list[dict[str, Any]] = [
    {"properties": {"a": ONE, "ab": {"enum": [2]}}, "patternProperties": {"^a$": TWO}},
    {"properties": {"a": ONE, "b": ONE}, "patternProperties": {"^(a|b)$": TWO}},
    {"properties": {"a": ONE}, "required": ["a"], "patternProperties": {"^(?:a|c)$": TWO}},
    {"patternProperties": {"^x y$": ONE}},
]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("place", range(len(SCHEMAS)))
def test_a_walk_ends_in_a_document_that_fits(place: int, seed: int) -> None:
    schema = {"type": "object", "additionalProperties": False, **SCHEMAS[place]}
    matcher = COMPILER.compile(StructuredOutputsParams(json=schema))
    draw, ids = random.Random(seed), list[int]()
    while True:
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits)
        assert not matcher.is_error(), matcher.get_error()
        assert allowed.size
        if allowed[-1] == COMPILER.end_id:
            break
        ids.append(int(draw.choice(allowed.tolist())))
        assert matcher.consume_token(ids[-1])
    jsonschema.validate(json.loads(TOKENIZER.decode(ids, skip_special_tokens=False)), schema)
