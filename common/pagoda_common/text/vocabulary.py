"""Token spellings: the bytes or text that one token id adds to the output. Knows no running text."""

import json
from enum import Enum
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

SPACE_MARK = "▁"
"""SentencePiece's sign for a space (U+2581)."""


class Spelling(Enum):
    """How a tokenizer's decoder puts tokens together."""

    BYTE_LEVEL = "byte_level"
    """Every token is a run of bytes, written in GPT-2's 256 characters."""
    BYTE_FALLBACK = "byte_fallback"
    """Every token is text with ▁ for a space, or one byte written <0x0A> (SentencePiece)."""
    OTHER = "other"
    """Known only to the tokenizer's own decoder (WordPiece, Metaspace, …)."""


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's characters for the 256 bytes: printable ones stand for themselves, others begin at U+0100."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


BYTE_OF_CHARACTER = _byte_level_alphabet()


def _is_sentence_piece(steps: list[dict[str, Any]]) -> bool:
    """Whether decoder steps are Replace(▁ by a space), ByteFallback, Fuse and perhaps Strip(one space at the start)."""
    replace = {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    shape = [replace, {"type": "ByteFallback"}, {"type": "Fuse"}]
    return steps in (shape, [*shape, strip])


def _decoder_steps(fast: FastTokenizer) -> list[dict[str, Any]]:
    """The steps of the decoder in order, with nested sequences flattened."""

    def flat(decoder: dict[str, Any]) -> list[dict[str, Any]]:
        return [step for part in decoder["decoders"] for step in flat(part)] if "decoders" in decoder else [decoder]

    return [] if fast.decoder is None else flat(json.loads(fast.decoder.__getstate__()))


class Vocabulary:
    """Spelling of every token of one tokenizer; built lazily, token by token."""

    def __init__(self, fast: FastTokenizer) -> None:
        self._fast = fast
        added = fast.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._steps = _decoder_steps(fast)
        self.spelling, self.is_first_space_stripped = self._read_decoder()
        self._bytes: dict[int, bytes] = {}

    def _read_decoder(self) -> tuple[Spelling, bool]:
        kinds = [step["type"] for step in self._steps]
        if "ByteLevel" in kinds and set(kinds) <= {"ByteLevel", "Fuse"}:
            return Spelling.BYTE_LEVEL, False
        if _is_sentence_piece(self._steps):
            return Spelling.BYTE_FALLBACK, kinds[-1] == "Strip"
        return Spelling.OTHER, False

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that `token_id` adds to a text, special tokens by their name; empty for an unknown id."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._spell(token_id)
        return known

    def byte_of(self, token_id: int) -> int | None:
        """The value of a <0x0A> token of a byte-fallback vocabulary, else None."""
        token = self._fast.id_to_token(token_id)
        if token is None or len(token) != 6 or not (token.startswith("<0x") and token.endswith(">")):
            return None
        try:
            return bytes.fromhex(token[3:5])[0]  # int() would take a sign
        except ValueError:
            return None

    def _spell(self, token_id: int) -> bytes:
        token: str | None = self._fast.id_to_token(token_id)
        if token is None:
            return b""
        match self.spelling:
            case Spelling.BYTE_LEVEL:
                try:
                    return bytes([BYTE_OF_CHARACTER[character] for character in token])
                except KeyError:  # an added token, spelled as it is
                    return token.encode()
            case Spelling.BYTE_FALLBACK:
                byte = self.byte_of(token_id)
                return token.replace(SPACE_MARK, " ").encode() if byte is None else bytes([byte])
            case Spelling.OTHER:
                return self._spell_within_text(token_id, token)

    def _spell_within_text(self, token_id: int, token: str) -> bytes:
        """The text that a token adds after another one: decoders remove a space from the first token of a text."""
        if token_id in self._added:
            return self._added[token_id].encode()
        kinds = {step["type"]: step for step in self._steps}
        if "ByteFallback" in kinds and (byte := self.byte_of(token_id)) is not None:
            return bytes([byte])
        if "BPEDecoder" in kinds:  # a word's end is a space unless the text ends as well
            return token.replace(kinds["BPEDecoder"]["suffix"], " ").encode()
        before = self._decode(self._first_word) if self._first_word else ""
        text = self._decode([*self._first_word, token_id])
        return (text.removeprefix(before) if text.startswith(before) else self._decode([token_id])).encode()

    @cached_property
    def _first_word(self) -> list[int]:
        """A token to decode others after; empty where none is a word."""
        for token_id in range(self._fast.get_vocab_size(with_added_tokens=False)):
            if token_id not in self._added and self._decode([token_id]).isalnum():
                return [token_id]
        return []

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._fast.decode(token_ids, skip_special_tokens=False)
        return text
