"""Constraints over popular tokenizers: every walk along allowed tokens spells a text that the constraint allows."""

import json
import random
import re
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher

from pagoda_common.grammar.matcher import GrammarCompiler
from pagoda_common.params.structured_outputs import StructuredOutputsParams
from tests.unit.text.tokenizers_at_hand import NAMES, load

SCHEMA = {
    "type": "object",
    "properties": {
        "größe": {"type": "integer", "minimum": 0, "maximum": 99},
        "a b": {"type": "array", "items": {"enum": ["x 🙂", "long text with spaces", 1.5, None]}, "maxItems": 3},
        "s": {"type": "string", "maxLength": 5},
    },
    "required": ["größe", "a b", "s"],
    "additionalProperties": False,
}
PATTERN = r"  indented( \w{1,4}){2}: \d{1,4}/é🙂\n"
NUM_WALKS = 12


def walk(compiler: GrammarCompiler, matcher: LLMatcher, draw: random.Random) -> list[int]:
    """Tokens drawn from those allowed, until the end is allowed or one is not taken."""
    ids: list[int] = []
    while len(ids) < 400:
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits)
        assert not matcher.is_error()
        if allowed[-1] == compiler.end_id and (len(allowed) == 1 or draw.random() < 0.5):
            return ids
        token_id = int(draw.choice(allowed[allowed < compiler.end_id].tolist()))
        assert matcher.consume_token(token_id), "an allowed token is not taken"
        ids.append(token_id)
    raise AssertionError("the walk did not end")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("constraint", [{"json": SCHEMA}, {"regex": PATTERN}])
def test_every_walk_spells_an_allowed_text(name: str, constraint: dict[str, Any]) -> None:
    tokenizer = load(name)
    compiler = GrammarCompiler(tokenizer=tokenizer, vocab_size=tokenizer.vocab_size + 3)
    matcher = compiler.compile(StructuredOutputsParams(**constraint))
    draw = random.Random(0)
    for _ in range(NUM_WALKS):
        ids = walk(compiler, matcher.deep_copy(), draw)
        spelled = b"".join(tokenizer.token_bytes(token_id) or b"" for token_id in ids).decode()
        if "regex" in constraint:
            assert re.fullmatch(PATTERN, spelled, re.ASCII), spelled
        else:
            jsonschema.validate(json.loads(spelled), SCHEMA)
            assert tokenizer.decode(ids) == spelled
