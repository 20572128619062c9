"""PromptMaker: texts, pairs and token ids as what a model pools."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pagoda_common.errors import InvalidRequest, RequestTooLong
from pagoda_common.params.truncation import Truncation
from pagoda_common.text.pooling_prompts import PoolingPrompt, PromptMaker, mean_of, pairs_of, score_template
from pagoda_common.text.tokenizer import Tokenizer
from tests.encoders import CLS, SEP, write_pair_tokenizer

TEMPLATE = "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}{% endfor %}"
ROLES = "{# 'query' 'document' #}" + TEMPLATE


@pytest.fixture(scope="module")
def maker(tmp_path_factory: pytest.TempPathFactory) -> PromptMaker:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_pair_tokenizer(directory)
    tokenizer = Tokenizer.load(str(directory))
    return PromptMaker(tokenizer=tokenizer, max_model_len=12, vocab_size=tokenizer.vocab_size, field="input")


def text_of(maker: PromptMaker, prompt: PoolingPrompt) -> str:
    return maker.tokenizer.decode(prompt.token_ids)


def test_many_are_made_as_each_alone(maker: PromptMaker) -> None:
    given = ["one", [CLS, 5, SEP], "three", ("a", "b")]
    plain = replace(maker, add_special_tokens=not maker.add_special_tokens)
    assert plain.make("one") != maker.make("one")
    cut = replace(maker, truncation=Truncation(num_tokens=4, side="right"))
    for one in (maker, plain, replace(maker, prefix="Q: "), cut):
        assert one.make_all(given) == [one.make(text) for text in given]


def test_a_prompt_goes_before_texts_and_before_nothing_else(maker: PromptMaker) -> None:
    named = replace(maker, prefix="Q: ")
    assert text_of(maker, named.make("one")) == "Q: one"
    assert text_of(maker, named.make_all(["one"])[0]) == "Q: one"
    assert text_of(maker, named.make(("a", "b"))) == "ab"
    assert named.make([CLS, 5, SEP]).token_ids == [CLS, 5, SEP]


def test_pairs_know_where_the_second_text_begins(maker: PromptMaker) -> None:
    made = maker.make(("ab", "cd"))
    assert made.second_text_start == 4
    assert text_of(maker, replace(maker, max_document_tokens=1).make(("ab", "cd"))) == "abc"


def test_a_template_with_both_roles_writes_the_pair(maker: PromptMaker) -> None:
    assert score_template(TEMPLATE) is None
    template = score_template(ROLES)
    made = replace(maker, template=template, max_model_len=64).make(("ab", "cd"))
    assert text_of(maker, made) == "<query>ab<document>cd"
    assert CLS not in made.token_ids


def test_what_is_too_long_is_refused_cut_or_divided(maker: PromptMaker) -> None:
    for make in (maker.make, lambda text: maker.make_all([text])):
        with pytest.raises(RequestTooLong, match="maximum context length is 12 tokens, but an input has 22 tokens"):
            make("z" * 20)
    cut = replace(maker, truncation=Truncation(num_tokens=5, side="right")).make("abcdefghijkl")
    assert cut.token_ids[0] == CLS
    assert cut.token_ids[-1] == SEP
    assert text_of(maker, cut) == "abc"
    divided = replace(maker, splits_long=True)
    for made in (divided.make("z" * 20), divided.make_all(["z" * 20])[0]):
        assert [len(piece) for piece in made.pieces] == [12, 12]


@pytest.mark.parametrize(
    ("given", "message"), [([9999], "token id 9999 is out of vocabulary"), ([-1], "must be at least 0")]
)
def test_wrong_token_ids_are_named(maker: PromptMaker, given: list[int], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        maker.make(given)


def test_pairs_are_one_against_many_or_each_against_its_own() -> None:
    assert pairs_of(["a"], ["b", "c"], field="x", other="y") == [("a", "b"), ("a", "c")]
    assert pairs_of(["a", "b"], ["c", "d"], field="x", other="y") == [("a", "c"), ("b", "d")]
    with pytest.raises(InvalidRequest, match="x has 2 texts, must have 1 or as many as y, 1"):
        pairs_of(["a", "b"], ["c"], field="x", other="y")


def test_a_mean_of_unit_vectors_is_one() -> None:
    vectors = [np.array([1, 0], np.float32), np.array([0, 1], np.float32)]
    np.testing.assert_allclose(mean_of(vectors, [3, 4]), [0.6, 0.8], rtol=1e-6)
    np.testing.assert_allclose(mean_of([vectors[0] * 2, vectors[1]], [1, 1]), [1, 0.5], rtol=1e-6)


def test_a_text_is_cut_where_a_token_ends(tmp_path: Path) -> None:
    write_pair_tokenizer(tmp_path)
    assert Tokenizer.load(str(tmp_path)).cut("abcdef", 3) == "abc"
    assert Tokenizer.load(str(tmp_path)).cut("ab", 3) == "ab"
