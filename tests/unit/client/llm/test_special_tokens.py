"""Special tokens that a tokenizer adds: where a call asks for none, and in conversations, whose template has them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from pagoda import SamplingParams
from pagoda.llm.hub_tokenizer import HubTokenizer
from pagoda.llm.llm_engine import LLMEngine
from pagoda_common.text.tokenizer import Tokenizer
from tests.unit.client.llm.llm_harness import Harness, Loop

STORIES = Path(__file__).resolve().parents[3] / "data/stories260K"
TEXT = "Once upon a time"
WITHOUT = {"add_special_tokens": False}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """One that begins each text with <s>."""
    return Tokenizer.load(str(STORIES))


@pytest.fixture
def harness(tokenizer: Tokenizer) -> Harness:
    return Harness(tokenizer, address="a:1")


@pytest.fixture
def ids(tokenizer: Tokenizer) -> list[int]:
    """Without it."""
    plain = tokenizer.encode(TEXT, add_special_tokens=False)
    assert tokenizer.encode(TEXT) == [1, *plain]
    return plain


@pytest.mark.parametrize("call", ["generate", "enqueue"])
def test_a_prompt_has_them_unless_the_call_says_no(harness: Harness, ids: list[int], call: str) -> None:
    for options in ({}, {"tokenization_kwargs": WITHOUT}):
        getattr(harness.llm, call)(TEXT, SamplingParams(max_tokens=3), use_tqdm=False, **options)
    harness.llm.wait_for_completion(use_tqdm=False)
    assert [request.prompt_token_ids for request in harness.requests] == [[1, *ids], ids]


def test_a_conversation_has_none_unless_the_call_asks_for_them(harness: Harness, ids: list[int]) -> None:
    for options in ({}, {"tokenization_kwargs": {"add_special_tokens": True}}):
        harness.llm.chat(
            [{"role": "user", "content": TEXT}],
            SamplingParams(max_tokens=3),
            use_tqdm=False,
            chat_template="{{ messages[0].content }}",
            **cast("Any", options),
        )
    assert [request.prompt_token_ids for request in harness.requests] == [ids, [1, *ids]]


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


def test_the_stepping_engine_takes_the_same_option(harness: Harness, ids: list[int], loop: Loop) -> None:
    engine = LLMEngine(harness.llm_async, cast("Any", loop))
    engine.add_request("a", TEXT, SamplingParams(max_tokens=3))
    engine.add_request("b", TEXT, SamplingParams(max_tokens=3), tokenization_kwargs=WITHOUT)
    assert [request.prompt_token_ids for request in harness.requests] == [[1, *ids], ids]
    while engine.has_unfinished_requests():
        engine.step()


def test_a_tokenizer_with_transformers_names_does_too(tokenizer: Tokenizer, ids: list[int]) -> None:
    named = HubTokenizer(tokenizer)
    assert (named.encode(TEXT), named.encode(TEXT, add_special_tokens=False)) == ([1, *ids], ids)
    assert (named(TEXT).input_ids, named(TEXT, add_special_tokens=False).input_ids) == ([1, *ids], ids)
    assert len(named.tokenize(TEXT)) == len(ids)
