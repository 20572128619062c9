"""A bound on reasoning is a grammar of tokens: its end is forced, and the answer is as it was asked for."""

from typing import Any, cast

import pytest

from pagoda_common.config.frontend_config import FrontendConfig
from pagoda_common.errors import InvalidRequest
from pagoda_common.grammar.matcher import GrammarCompiler
from pagoda_common.params.structured_outputs import StructuredOutputsParams
from pagoda_common.text.tokenizer import Tokenizer
from pagoda_frontend.conversation.dialect import Dialect, dialect_of
from pagoda_frontend.conversation.thinking_budget import with_thinking_budget
from tests.unit.frontend.parsers.test_free_formats import Letters

START, END = 1, 2
OPEN = "<think>\n"


class Vocabulary(Letters):
    """Its first bytes stand for the markers of reasoning."""

    def token_id(self, token: str) -> int | None:
        return {"<think>": START, "</think>": END}.get(token)


TOKENIZER = cast("Tokenizer", Vocabulary())


def constraint(budget: int | None, *, parser: str | None = "qwen3", prompt: str = OPEN, **given: Any) -> Any:
    dialect = dialect_of(FrontendConfig(model="other", reasoning_parser=parser)) if parser else Dialect()
    answer = StructuredOutputsParams(**given) if given else None
    return with_thinking_budget(answer, budget, dialect=dialect, prompt=prompt, tokenizer=TOKENIZER, max_model_len=1000)


def accepts(params: StructuredOutputsParams, token_ids: bytes) -> bool:
    matcher = GrammarCompiler(tokenizer=TOKENIZER, vocab_size=256).compile(params)
    return matcher.try_consume_tokens(list(token_ids)) == len(token_ids)


@pytest.mark.parametrize("prompt", [OPEN, ""])
def test_the_end_is_forced_after_the_budget_and_the_answer_is_free(prompt: str) -> None:
    params = constraint(3, prompt=prompt)
    opening = b"" if prompt else bytes([START])
    for thoughts in (b"", b"ab", b"abc"):
        assert accepts(params, opening + thoughts + bytes([END]) + b"any answer of any length")
    assert not accepts(params, opening + b"abcd")
    assert not accepts(constraint(0, prompt=prompt), opening + b"a")
    assert accepts(constraint(0, prompt=prompt), opening + bytes([END]) + b"answer")


def test_a_model_that_may_answer_at_once_still_may() -> None:
    assert accepts(constraint(1, prompt=""), b"an answer")


def test_the_answer_is_as_it_was_asked_for() -> None:
    cases: list[tuple[dict[str, Any], bytes, bytes]] = [
        ({"json": {"type": "integer"}}, b"5", b"x"),
        ({"json_object": True}, b"{}", b"5"),
        ({"regex": "[ab]"}, b"b", b"c"),
        ({"choice": ["yes", "no"]}, b"no", b"x"),
        ({"grammar": 'start: "x"'}, b"x", b"y"),
        ({"structural_tag": {"format": {"type": "const_string", "value": "z"}}}, b"z", b"y"),
    ]
    for given, right, wrong in cases:
        params = constraint(2, **given, start_after_token_ids=(END,))
        assert params.start_after_token_ids == ()
        assert accepts(params, b"ab" + bytes([END]) + right), given
        assert not accepts(params, b"ab" + bytes([END]) + wrong), given
        assert not accepts(params, b"abc"), given


def test_without_a_budget_or_reasoning_nothing_changes() -> None:
    assert constraint(999, prompt=OPEN) is not None
    for budget, prompt in ((None, OPEN), (-1, OPEN), (1000, OPEN), (5000, OPEN), (3, "<think>\n</think>\n")):
        assert constraint(budget, prompt=prompt) is None
        assert constraint(budget, prompt=prompt, regex="a") == StructuredOutputsParams(regex="a")


@pytest.mark.parametrize(
    ("budget", "parser", "message"),
    [(-2, "qwen3", "at least 0"), (3, None, "--reasoning-parser"), (3, "mistral", "single tokens")],
)
def test_a_budget_that_cannot_be_held_is_refused(budget: int, parser: str | None, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        constraint(budget, parser=parser)
    assert caught.value.field == "thinking_token_budget"
