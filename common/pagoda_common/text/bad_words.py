"""Converts bad words to the token sequences that a sampler must avoid."""

from collections.abc import Sequence

from pagoda_common.errors import InvalidRequest
from pagoda_common.params.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS
from pagoda_common.text.tokenizer import Tokenizer


def bad_words_token_ids(bad_words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Each word as it is tokenized at the start of a text and after a space, which is how it mostly appears.

    vLLM leaves the second out where it has another number of tokens, and then still writes the word.

    Raises:
        InvalidRequest: a word is empty or too long, or they are too many token sequences.
    """
    _check_number(len(bad_words))
    sequences: list[tuple[int, ...]] = []
    for word in bad_words:
        if not word.strip():
            raise InvalidRequest("bad_words must not contain an empty string", field="bad_words")
        plain = tuple(tokenizer.encode(word.lstrip(), add_special_tokens=False))
        spaced = tuple(tokenizer.encode(" " + word.lstrip(), add_special_tokens=False))
        sequences.append(plain)
        if spaced[-len(plain) :] != plain:  # else the first one rules out the second
            sequences.append(spaced)
    _check_number(len(sequences))
    longest = max(map(len, sequences), default=0)
    if longest > MAX_BAD_WORD_TOKENS:
        message = f"bad_words must have at most {MAX_BAD_WORD_TOKENS} tokens each, got {longest}"
        raise InvalidRequest(message, field="bad_words")
    return tuple(sequences)


def _check_number(number: int) -> None:
    if number > MAX_BAD_WORDS:
        message = f"bad_words must be at most {MAX_BAD_WORDS} token sequences (with and without a space), got {number}"
        raise InvalidRequest(message, field="bad_words")
