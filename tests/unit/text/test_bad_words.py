"""Words that may not be written, as token sequences: with and without the space before them, none of them twice."""

from collections.abc import Sequence
from typing import cast

import pytest

from pagoda_common.errors import InvalidRequest
from pagoda_common.params.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS
from pagoda_common.text.bad_words import bad_words_token_ids
from pagoda_common.text.tokenizer import Tokenizer

SPACE = 1


class Letters:
    """A tokenizer with a token for each letter, and one for each whole word after a space that it knows."""

    def __init__(self, *words: str) -> None:
        self._words = {word: 1000 + number for number, word in enumerate(words)}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        if text in self._words:
            return [self._words[text]]
        return [SPACE if letter == " " else ord(letter) for letter in text]


def sequences(bad_words: Sequence[str], *known: str) -> tuple[tuple[int, ...], ...]:
    return bad_words_token_ids(bad_words, cast("Tokenizer", Letters(*known)))


def test_a_word_whose_tokens_end_those_after_a_space_is_one_sequence() -> None:
    assert sequences(["ab"]) == ((97, 98),), "it rules out the space and itself as well"


def test_a_word_with_a_token_of_its_own_after_a_space_is_two() -> None:
    assert sequences(["ab"], " ab") == ((97, 98), (1000,))
    assert sequences(["ab", "c"], " ab") == ((97, 98), (1000,), (99,))


def test_a_sequence_that_only_begins_like_the_other_is_kept() -> None:
    class Continued(Letters):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            return [7, 8] if text.startswith(" ") else [7]

    assert bad_words_token_ids(["x"], cast("Tokenizer", Continued())) == ((7,), (7, 8))


def test_spaces_before_a_word_mean_nothing() -> None:
    assert sequences(["  ab"], " ab") == sequences(["ab"], " ab")


@pytest.mark.parametrize("word", ["", "  ", "\t"])
def test_nothing_is_no_word(word: str) -> None:
    with pytest.raises(InvalidRequest, match="must not contain an empty string") as caught:
        sequences(["a", word])
    assert caught.value.field == "bad_words"


def test_words_and_their_tokens_are_bounded() -> None:
    assert len(sequences(["a" * MAX_BAD_WORD_TOKENS])[0]) == MAX_BAD_WORD_TOKENS
    with pytest.raises(InvalidRequest, match=f"at most {MAX_BAD_WORD_TOKENS} tokens each"):
        sequences(["a" * (MAX_BAD_WORD_TOKENS + 1)])
    words = [chr(300 + number) for number in range(MAX_BAD_WORDS)]
    assert len(sequences(words)) == MAX_BAD_WORDS
    with pytest.raises(InvalidRequest, match=f"got {MAX_BAD_WORDS + 1}"):
        sequences([*words, "a"])
    with pytest.raises(InvalidRequest, match=f"got {MAX_BAD_WORDS + 1}"):
        sequences(words, f" {words[0]}")
