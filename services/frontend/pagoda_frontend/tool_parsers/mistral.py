"""Mistral's calls, in both ways of its templates, and its ids."""

import re
from collections.abc import Mapping
from typing import Any

from pagoda_frontend.tool_parsers import formats
from pagoda_frontend.tool_parsers.base import Piece, ToolParser, find_marker
from pagoda_frontend.tool_parsers.formats import Format, Schemas
from pagoda_frontend.tool_parsers.framed import FramedParser
from pagoda_frontend.tool_parsers.json_calls import JsonToolParser
from pagoda_frontend.tool_parsers.json_text import after_space

_START = "[TOOL_CALLS]"
ID_CHARS = 9
"""Mistral's templates refuse ids of any other length, and all but letters and digits."""


class _Named(FramedParser):
    start = _START
    header = re.compile(
        r"(?P<name>[^\s\[\]]+?)\s*(?:\[CALL_ID\]\s*(?:(?P<id>[A-Za-z0-9]{9})|\S*?)\s*)?(?:\[ARGS\])?", re.ASCII
    )


class _Array(JsonToolParser):
    starts = (_START,)


class MistralParser(ToolParser):
    """``[TOOL_CALLS][{"name": …, "arguments": …}]``, and since version 11 ``[TOOL_CALLS]NAME[ARGS]{…}``."""

    markers = (_START, "[ARGS]", "[CALL_ID]")
    id_pattern = re.compile(f"[A-Za-z0-9]{{{ID_CHARS}}}")
    openers = (_START,)

    @classmethod
    def free_format(cls, schemas: Schemas, *, is_parallel: bool) -> Format:
        """An array, or named calls; more of these follow each other."""
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
        """Up to the first marker all is content; what follows it says which of the two it is from there on."""
        place, marker = find_marker(self._text, (_START,), is_last=is_last)
        self._say(self._read(place))
        behind = after_space(self._text, len(_START)) if marker else 0
        if marker is None or behind == len(self._text):
            return False
        kind = _Array if self._text[behind] in "[{" else _Named
        self._inner = kind(schemas=self._schemas)
        self._inner.id_seed = self.id_seed
        self._inner.make_id = self.make_id
        self._inner._read_on, self._inner._has_said = self._inner._advance, self._has_said
        piece = self._inner.append(self._held + self._read(len(self._text)))
        self._held = ""
        self._content.append(piece.content)
        self._calls += piece.tool_calls
        return False
