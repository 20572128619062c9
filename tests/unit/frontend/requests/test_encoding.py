"""What is tokenized of a text: all of a short one, no more than its use may need of a long one."""

from typing import Any

import pytest

from pagoda_common.errors import InvalidRequest, RequestTooLong
from pagoda_common.params.truncation import Truncation
from pagoda_common.text.tokenizer import Tokenizer
from pagoda_frontend.budget.work_pool import WorkPool
from pagoda_frontend.requests.encoding import LONG_TEXT_CHARS, MAX_COUNTED_CHARS, TextEncoder

MAX_MODEL_LEN = 20_000
WORDS = "Once upon a time there was a dog. "


class CountingTokenizer:
    """The embedded model's, and how many characters it was given."""

    def __init__(self) -> None:
        self.num_chars = 0
        self._tokenizer = Tokenizer.load("pagoda-tiny")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.num_chars += len(text)
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)


@pytest.fixture
def tokenizer() -> CountingTokenizer:
    return CountingTokenizer()


def encoder(tokenizer: Any, *, max_model_len: int = MAX_MODEL_LEN) -> TextEncoder:
    return TextEncoder(tokenizer=tokenizer, work=WorkPool(), max_model_len=max_model_len)


def long_text(num_chars: int) -> str:
    return (WORDS * (num_chars // len(WORDS) + 1))[:num_chars]


async def test_a_text_that_may_fit_is_tokenized_once(tokenizer: CountingTokenizer) -> None:
    text = long_text(60_000)
    ids = await encoder(tokenizer).encode(text, add_special_tokens=False, field="prompt")
    assert len(ids) > 1000
    assert tokenizer.num_chars == len(text)


async def test_a_text_that_is_much_too_long_is_refused_after_a_piece(tokenizer: CountingTokenizer) -> None:
    text = long_text(2_000_000)  # fewer characters than so many of the longest tokens, so only trying shows it
    with pytest.raises(RequestTooLong, match="maximum context length is 20000 tokens") as caught:
        await encoder(tokenizer).encode(text, add_special_tokens=False, field="messages")
    assert caught.value.field == "messages"
    assert tokenizer.num_chars < len(text) / 5


class LongTokens:
    """A tokenizer whose tokens have 20 characters."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [1] * (len(text) // 20)


async def test_a_long_text_of_few_tokens_is_tokenized_after_all() -> None:
    ids = await encoder(LongTokens()).encode("x" * 390_000, add_special_tokens=False, field="prompt")
    assert len(ids) == 19_500


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("num_chars", [1000, LONG_TEXT_CHARS, 3_000_000])
async def test_truncation_tokenizes_the_part_that_is_kept(
    tokenizer: CountingTokenizer, side: Any, num_chars: int
) -> None:
    text = long_text(num_chars // len(WORDS) * len(WORDS))
    truncation = Truncation(num_tokens=50, side=side)
    ids = await encoder(tokenizer).encode(text, add_special_tokens=True, field="prompt", truncation=truncation)
    assert tokenizer.num_chars <= 2 * LONG_TEXT_CHARS
    whole = long_text(2000 // len(WORDS) * len(WORDS))
    assert ids == truncation.apply(tokenizer.encode(whole, add_special_tokens=True))


async def test_truncation_takes_more_of_a_text_where_tokens_are_long(tokenizer: CountingTokenizer) -> None:
    text = WORDS * 3000 + " " * 1_000_000
    truncation = Truncation(num_tokens=5_000)
    ids = await encoder(tokenizer).encode(text, add_special_tokens=False, field="prompt", truncation=truncation)
    assert len(ids) == 5_000


class Words:
    """A tokenizer with a token for each whole word of 40 characters, and one for each character of a cut one."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = []
        for word in text.split():
            ids += [int(word)] if len(word) == 40 else [-1] * len(word)
        return ids


@pytest.mark.parametrize("side", ["left", "right"])
async def test_tokens_that_a_cut_makes_are_not_among_those_that_are_kept(side: Any) -> None:
    """The part that is tried has just enough tokens, some of them of half a word."""
    num_words = LONG_TEXT_CHARS // 41
    text = " ".join(f"{number:040d}" for number in range(10 * num_words))
    truncation = Truncation(num_tokens=num_words + 5, side=side)
    ids = await encoder(Words()).encode(text, add_special_tokens=False, field="prompt", truncation=truncation)
    everything = list(range(10 * num_words))
    assert ids == (everything[-num_words - 5 :] if side == "left" else everything[: num_words + 5])


async def test_a_text_that_is_only_counted_may_be_longer_than_the_context(tokenizer: CountingTokenizer) -> None:
    small = encoder(tokenizer, max_model_len=64)
    ids = await small.encode(long_text(100_000), add_special_tokens=False, field="prompt", is_counted=True)
    assert len(ids) > 1000
    with pytest.raises(InvalidRequest, match=f"prompt must have at most {MAX_COUNTED_CHARS} characters"):
        await small.encode("x" * (MAX_COUNTED_CHARS + 1), add_special_tokens=False, field="prompt", is_counted=True)
