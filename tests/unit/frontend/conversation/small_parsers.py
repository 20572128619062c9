"""Parsers of calls and of reasoning with short markers, and a tokenizer whose tokens are words."""

from typing import ClassVar

from pagoda_frontend.conversation.message import ToolCallDelta
from pagoda_frontend.reasoning_parsers.base import TaggedReasoningParser
from pagoda_frontend.tool_parsers.base import Piece, ToolParser


class Tagged(TaggedReasoningParser):
    """Reasoning between R and /R."""

    markers: ClassVar = ("<R>", "</R>")
    start: ClassVar = "<R>"
    end: ClassVar = "</R>"


class Calls(ToolParser):
    """Every capital letter is a call of that name, all else is content."""

    markers: ClassVar = ("<C>",)

    def append(self, text: str) -> Piece:
        calls = [
            ToolCallDelta(index, f"id-{index}", letter, "")
            for index, letter in enumerate(letter for letter in text if letter.isupper())
        ]
        return Piece("", "".join(letter for letter in text if not letter.isupper()), calls)

    def finish(self) -> Piece:
        return Piece("", "!", [])

    def _advance(self, *, is_last: bool) -> bool:
        raise AssertionError("append and finish read it all")


class Words:
    """A tokenizer of some markers; special ones have no text."""

    def __init__(self, special: tuple[str, ...] = (), plain: tuple[str, ...] = ()) -> None:
        self._words = (*special, *plain)
        self._num_special = len(special)

    def token_id(self, token: str) -> int | None:
        return self._words.index(token) if token in self._words else None

    def decode(self, ids: list[int]) -> str:
        return "".join(self._words[one] for one in ids if one >= self._num_special)

    def token_piece(self, token_id: int) -> str:
        return f"piece-{token_id}"

    def token_text(self, token_id: int) -> str:
        return f"text-{token_id}"
