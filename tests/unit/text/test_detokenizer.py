"""Deltas joined are what the tokenizer decodes at once."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models

from pagoda_common.text.detokenizer import REPLACEMENT, WindowDetokenizer
from pagoda_common.text.tokenizer import Tokenizer
from pagoda_common.text.vocabulary import Vocabulary
from tests.unit.text.tokenizers_at_hand import BYTE_FALLBACK, BYTE_LEVEL, NAMES, load

TEXTS = [
    "Hello, world!",
    " leading and trailing  ",
    "emoji: 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇰🇷",
    "漢字とかなと한국어",
    "עברית ו-العربية mixed",
    "tabs\t\tand\nnew\r\nlines",
    "ⴰⵎⴰⵣⵉⵖ 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 ᚠᚢᚦ",
    "don't can't  'quoted' <b>x</b> 3.14 1,000",
    "é vs e\u0301, zero\u200bwidth",
]


def stream(tokenizer: Tokenizer, token_ids: list[int], *, cuts: random.Random | None = None, **options: bool) -> str:
    """Text of `token_ids` in pieces of one token, or of sizes that `cuts` draws."""
    detokenizer = tokenizer.detokenizer((), **options)
    parts, start = [], 0
    while start < len(token_ids):
        size = cuts.randint(1, 5) if cuts else 1
        parts.append(detokenizer.append(token_ids[start : start + size]))
        start += size
    return "".join([*parts, detokenizer.flush()])


def is_spoilt_run(tokenizer: Tokenizer, token_ids: list[int]) -> bool:
    """Whether a run of byte tokens has whole characters before its first bad byte (see ByteFallbackDetokenizer)."""
    vocabulary, run = tokenizer._vocabulary, bytearray()
    for token_id in [*token_ids, -1]:
        byte = vocabulary.byte_of(token_id) if token_id >= 0 else None
        if byte is not None:
            run.append(byte)
        elif token_id not in vocabulary.special_ids:
            try:
                run.decode()
            except UnicodeDecodeError as error:
                if error.start > 0:
                    return True
            run.clear()
    return False


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", TEXTS)
def test_a_text_comes_back_whole(name: str, text: str) -> None:
    tokenizer = load(name)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert stream(tokenizer, ids) == tokenizer.decode(ids)
    assert stream(tokenizer, ids, cuts=random.Random(1)) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=60), seed=st.integers(0, 9))
def test_any_text_comes_back_whole(name: str, text: str, seed: int) -> None:
    tokenizer = load(name)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert stream(tokenizer, ids, cuts=random.Random(seed)) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_random_ids_decode_the_same(name: str, skip_special_tokens: bool) -> None:
    tokenizer, draw = load(name), random.Random(7)
    for _ in range(100):
        ids = [draw.randrange(tokenizer.vocab_size) for _ in range(draw.randint(1, 120))]
        if is_spoilt_run(tokenizer, ids):
            continue
        expected = tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        assert stream(tokenizer, ids, cuts=draw, skip_special_tokens=skip_special_tokens) == expected


@pytest.mark.parametrize("name", NAMES)
def test_random_bytes_and_rare_ids_decode_the_same(name: str) -> None:
    """Ids from the ends of the vocabulary: single bytes, special and added tokens."""
    tokenizer, draw = load(name), random.Random(8)
    rare = [*range(400), *range(tokenizer.vocab_size - 200, tokenizer.vocab_size)]
    for _ in range(300):
        ids = [draw.choice(rare) for _ in range(draw.randint(1, 40))]
        if name in BYTE_FALLBACK and is_spoilt_run(tokenizer, ids):
            continue
        assert stream(tokenizer, ids, cuts=draw) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", NAMES)
def test_the_output_goes_on_where_the_prompt_ended(name: str) -> None:
    tokenizer = load(name)
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        for cut in range(1, len(ids)):
            before = tokenizer.decode(ids[:cut])
            if before.endswith(REPLACEMENT):
                continue
            detokenizer = tokenizer.detokenizer(ids[:cut])
            after = detokenizer.append(ids[cut:]) + detokenizer.flush()
            assert before + after == tokenizer.decode(ids)


@pytest.mark.parametrize("name", NAMES)
def test_a_character_comes_out_with_its_last_byte(name: str) -> None:
    tokenizer = load(name)
    ids = tokenizer.encode("𓀀", add_special_tokens=False)
    detokenizer = tokenizer.detokenizer(tokenizer.encode("x", add_special_tokens=False))
    parts = [detokenizer.append([token_id]) for token_id in ids]
    assert parts[-1] == "𓀀"
    assert "".join(parts).strip() == "𓀀"


@pytest.mark.parametrize("name", BYTE_LEVEL[:1])
def test_what_is_incomplete_at_the_end_is_a_replacement_character(name: str) -> None:
    tokenizer = load(name)
    ids = tokenizer.encode("👋", add_special_tokens=False)[:-1]
    detokenizer = tokenizer.detokenizer(())
    assert detokenizer.append(ids).strip() == ""
    assert detokenizer.flush() == REPLACEMENT
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("name", BYTE_FALLBACK[:1])
def test_characters_before_a_bad_byte_stay(name: str) -> None:
    tokenizer = load(name)
    ids = [tokenizer.token_id(f"<0x{byte:02X}>") for byte in [*"€".encode(), 0xFF, 0x41]]
    assert None not in ids
    detokenizer = tokenizer.detokenizer(())
    assert [detokenizer.append([token_id]) for token_id in ids] == ["", "", "€", REPLACEMENT, REPLACEMENT]


def test_other_decoders_are_asked_themselves() -> None:
    words = ["[UNK]", "un", "##believ", "##able", "story", ".", "��"]
    fast = FastTokenizer(models.WordPiece({word: place for place, word in enumerate(words)}, unk_token="[UNK]"))
    fast.decoder = decoders.WordPiece()
    for ids in ([1, 2, 3, 4, 5], [4, 4, 5, 1, 2], [6, 4], [4, *([6] * 40), 4]):
        detokenizer = WindowDetokenizer(fast, Vocabulary(fast), (), skip_special_tokens=True)
        parts = [detokenizer.append([token_id]) for token_id in ids]
        assert "".join([*parts, detokenizer.flush()]) == fast.decode(ids)
