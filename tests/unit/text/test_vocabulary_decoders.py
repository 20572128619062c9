"""The bytes of a token are what it adds within a text, whatever decoder the tokenizer has: constraints rest on it."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as FastTokenizer

from pagoda_common.grammar.matcher import GrammarCompiler
from pagoda_common.params.structured_outputs import StructuredOutputsParams
from pagoda_common.text.tokenizer import Tokenizer
from pagoda_common.text.tokenizer_files import TokenizerFiles
from pagoda_common.text.vocabulary import Vocabulary

TEXT = 'the cat sat on the mat. yes no maybe {"name": "bob smith"} isn\'t 0123456789 été 日本 , !'
SPECIAL = ["<unk>", "<s>", "</s>"]
CHOICES = ("the cat sat", "yes no", '{"name": "bob"}', " on  the mat.")


def trained(model: Any, trainer: Any, pre_tokenizer: Any, decoder: Any) -> FastTokenizer:
    fast = FastTokenizer(model)
    fast.pre_tokenizer, fast.decoder = pre_tokenizer, decoder
    fast.train_from_iterator([TEXT] * 50, trainer)
    return fast


def unigram(decoder: Any, **pre: Any) -> FastTokenizer:
    trainer = trainers.UnigramTrainer(vocab_size=140, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    return trained(models.Unigram(), trainer, pre_tokenizers.Metaspace(**pre), decoder)


def bpe(decoder: Any, pre_tokenizer: Any, *, with_bytes: bool = False, **options: Any) -> FastTokenizer:
    special = SPECIAL + ([f"<0x{byte:02X}>" for byte in range(256)] if with_bytes else [])
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False, **options)
    fast = trained(models.BPE(unk_token="<unk>", byte_fallback=with_bytes), trainer, pre_tokenizer, decoder)
    if not with_bytes:
        return fast
    # Byte tokens stand in the vocabulary, and are no added tokens.
    plain = FastTokenizer(fast.model)
    plain.pre_tokenizer, plain.decoder = pre_tokenizer, decoder
    plain.add_special_tokens(SPECIAL)
    return plain


def word_piece(**options: Any) -> FastTokenizer:
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=SPECIAL, show_progress=False)
    model = models.WordPiece(unk_token="<unk>")
    return trained(model, trainer, pre_tokenizers.BertPreTokenizer(), decoders.WordPiece(**options))


def sentence_piece(*, steps: list[Any]) -> FastTokenizer:
    fast = bpe(decoders.Sequence(steps), pre_tokenizers.Metaspace(prepend_scheme="never"), with_bytes=True)
    fast.normalizer = normalizers.Sequence([])
    return fast


REPLACE = decoders.Replace("▁", " ")
TOKENIZERS: dict[str, Callable[[], FastTokenizer]] = {
    "Metaspace": lambda: unigram(decoders.Metaspace()),
    "Metaspace, first": lambda: unigram(decoders.Metaspace(prepend_scheme="first"), prepend_scheme="first"),
    "Metaspace, never": lambda: unigram(decoders.Metaspace(prepend_scheme="never"), prepend_scheme="never"),
    "Metaspace, another mark": lambda: unigram(decoders.Metaspace(replacement="_"), replacement="_"),
    "WordPiece": word_piece,
    "WordPiece, no clean-up": lambda: word_piece(cleanup=False),
    "BPEDecoder": lambda: bpe(decoders.BPEDecoder(), pre_tokenizers.Whitespace(), end_of_word_suffix="</w>"),
    "ByteLevel": lambda: bpe(
        decoders.ByteLevel(),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    ),
    "ByteLevel, Fuse": lambda: bpe(
        decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()]),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    ),
    "Replace, ByteFallback, Fuse": lambda: sentence_piece(steps=[REPLACE, decoders.ByteFallback(), decoders.Fuse()]),
    "Replace, ByteFallback, Fuse, Strip": lambda: sentence_piece(
        steps=[REPLACE, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    ),
    "ByteFallback, Metaspace": lambda: sentence_piece(
        steps=[decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="never")]
    ),
    "ByteFallback, Fuse, Replace, Strip": lambda: sentence_piece(
        steps=[decoders.ByteFallback(), decoders.Fuse(), decoders.Replace(Regex("▁"), " "), decoders.Strip(" ", 1, 0)]
    ),
    "Fuse": lambda: bpe(decoders.Fuse(), pre_tokenizers.Split(" ", "isolated")),
    "no decoder": lambda: bpe(None, pre_tokenizers.Whitespace()),
}


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    files = TokenizerFiles(directory=tmp_path, config={}, special_tokens={})
    return Tokenizer(name=request.param, fast=TOKENIZERS[request.param](), files=files)


def after(tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> str:
    detokenizer = tokenizer.detokenizer(prompt)
    return "".join([detokenizer.append([token_id]) for token_id in ids]) + detokenizer.flush()


def test_bytes_of_tokens_join_to_the_text_after_a_prompt(tokenizer: Tokenizer) -> None:
    words = tokenizer.encode("the cat", add_special_tokens=False)
    plain = [token_id for token_id in range(tokenizer.vocab_size) if token_id not in tokenizer.special_token_ids]
    draw = random.Random(0)
    for _ in range(200):
        ids = draw.choices(plain, k=draw.randint(1, 6))
        spelled = b"".join(tokenizer.token_bytes(token_id) or b"" for token_id in ids)
        if spelled.decode(errors="replace").encode() != spelled:
            continue  # bytes that are not text
        text = after(tokenizer, words, ids)
        if tokenizer.name == "BPEDecoder":  # a space more after the last word, one less before the first
            text, spelled = text.strip(), spelled.decode().strip().encode()
        assert text == spelled.decode(), ids


@pytest.mark.parametrize("seed", range(4))
def test_a_constraint_spells_one_of_its_choices(tokenizer: Tokenizer, seed: int) -> None:
    if tokenizer.name in ("BPEDecoder", "no decoder"):
        pytest.skip("no token is the rest of a word that has begun, and punctuation has spaces around it")
    prompt = tokenizer.encode("the cat", add_special_tokens=False)
    compiler = GrammarCompiler(tokenizer=tokenizer, vocab_size=tokenizer.vocab_size)
    choices = CHOICES if tokenizer.name.startswith(("Byte", "Replace", "Meta")) else CHOICES[:2]
    matcher = compiler.compile(StructuredOutputsParams(choice=choices))
    draw, ids = random.Random(seed), list[int]()
    while True:
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits)
        assert not matcher.is_error(), matcher.get_error()
        if allowed[-1] == compiler.end_id:
            break
        token_id = int(draw.choice(allowed.tolist()))
        assert matcher.consume_token(token_id)
        ids.append(token_id)
    assert after(tokenizer, prompt, ids) in choices


def test_a_byte_token_is_two_hexadecimal_digits_between_its_marks() -> None:
    wrong = ["<0xZZ>", "<0x0A|", "|0x0A>", "|0x0A|", "<1x0A>", "<0x0>", "<0x00A>", "<0x+A>", "<0x A>"]
    names = ["<0x0A>", "<0xff>", *wrong]
    vocabulary = Vocabulary(FastTokenizer(models.BPE(vocab={name: id for id, name in enumerate(names)}, merges=[])))
    found = [vocabulary.byte_of(token_id) for token_id in range(len(names) + 1)]
    assert found == [10, 255, *[None] * (len(wrong) + 1)]
