"""Mistral's calls, in both formats of its templates, and its ids."""

import re
from collections.abc import Mapping
from typing import Any

from pagoda_frontend.tool_parsers import formats
from pagoda_frontend.tool_parsers.base import Piece, ToolParser, find_marker
from pagoda_frontend.tool_parsers.formats import Format, Schemas
from pagoda_frontend.tool_parsers.framed import MAX_HEADER_CHARS, FramedParser
from pagoda_frontend.tool_parsers.json_calls import JsonToolParser
from pagoda_frontend.tool_parsers.json_text import after_space

_START = "[TOOL_CALLS]"
_BARE_NAME = re.compile(r"[^\s\[\]{}]+\s*")
ID_CHARS = 9
"""Length of ids: Mistral's templates accept only ids of nine letters and digits."""


class _Named(FramedParser):
    keeps_space = True
    start = _START
    header = re.compile(
        r"(?P<name>[^\s\[\]]+?)\s*(?:\[CALL_ID\]\s*(?:(?P<id>[A-Za-z0-9]{9})|\S*?)\s*)?(?:\[ARGS\])?", re.ASCII
    )


class _Array(JsonToolParser):
    keeps_space = True
    drops_rest = True
    starts = (_START,)


class MistralParser(ToolParser):
    """``[TOOL_CALLS][{"name": …, "arguments": …}]``, and since version 11 ``[TOOL_CALLS]NAME[ARGS]{…}``.

    As in vLLM, words between the marker and the array are skipped, and so is what follows the array. A marker without a
    call is not content, nor is a name alone.
    """

    keeps_space = True
    markers = (_START, "[ARGS]", "[CALL_ID]")
    id_pattern = re.compile(f"[A-Za-z0-9]{{{ID_CHARS}}}")
    openers = (_START,)

    @classmethod
    def free_format(cls, schemas: Schemas, *, is_parallel: bool) -> Format:
        """Read an array or named calls, of which several may follow each other."""
        named = []
        for name, schema in schemas.items():
            arguments = formats.json_value(schema)
            numbered = formats.sequence(formats.regex("[A-Za-z0-9]{9}"), formats.text("[ARGS]"), arguments)
            named += [formats.tag(f"{name}[ARGS]", arguments), formats.tag(f"{name}[CALL_ID]", numbered)]
        array = formats.json_value(formats.array_schema(schemas, is_parallel=is_parallel, arguments="arguments"))
        calls = formats.one_of(formats.listed(named, separator=_START, is_parallel=is_parallel), array)
        return formats.triggered(_START, tags=[formats.tag(_START, calls)], is_parallel=False)

    @staticmethod
    def call_id(name: str, index: int, drawn: str) -> str:
        return drawn[:ID_CHARS]

    def __init__(self, *, schemas: Mapping[str, dict[str, Any]]) -> None:
        super().__init__(schemas=schemas)
        self._inner: ToolParser | None = None

    def append(self, text: str) -> Piece:
        if self._inner is None:
            return super().append(text)
        return self._inner.append(text)

    def finish(self) -> Piece:
        return super().finish() if self._inner is None else self._inner.finish()

    def _advance(self, *, is_last: bool) -> bool:
        """Text up to the first marker is content; the text after it decides between the two formats."""
        place, marker = find_marker(self._text, (_START,), is_last=is_last)
        self._say(self._read(place))
        place = after_space(self._text, len(_START)) if marker else 0
        if marker is None or place == len(self._text):
            return False
        call = self._call_after(place, is_last=is_last)
        if call is None:
            return False
        kind, start = call
        if kind is None:
            self._read(start)
            return True
        self._read(start)
        self._text = _START + self._text
        self._inner = kind(schemas=self._schemas)
        self._inner.id_seed = self.id_seed
        self._inner.make_id = self.make_id
        self._inner._read_on, self._inner._has_said = self._inner._advance, self._has_said
        piece = self._inner.append(self._held + self._read(len(self._text)))
        self._held = ""
        self._content.append(piece.content)
        self._calls += piece.tool_calls
        return False

    def _call_after(self, place: int, *, is_last: bool) -> tuple[type[ToolParser] | None, int] | None:
        """The format that begins at `place`, after the marker, and its position: an array, a named call, or neither (no
        class).

        None while that is not known.
        """
        if self._text[place] in "[{":
            return _Array, place
        brace = self._text.find("{", place, place + MAX_HEADER_CHARS + 1)
        again = self._text.find(_START, place, brace if brace >= 0 else None)
        if is_last and brace < 0 and _BARE_NAME.fullmatch(self._text, place):
            return None, len(self._text)
        if again >= 0 or (brace < 0 and (is_last or len(self._text) > place + MAX_HEADER_CHARS)):
            return None, place
        if brace < 0:
            return None
        head = self._text[place:brace].rstrip()
        if head.endswith("["):
            return _Array, place + len(head) - 1
        return (_Named if _Named.header.fullmatch(head) else None), place
