"""Gemma 4's calls, whose strings stand between markers and whose keys have no quotes."""

import re
from collections.abc import Mapping
from typing import Any

from pagoda_frontend.tool_parsers import formats
from pagoda_frontend.tool_parsers.argument_formats import ended, is_any_object, quoted_arguments, text_without
from pagoda_frontend.tool_parsers.base import ToolParser, after_start
from pagoda_frontend.tool_parsers.formats import Format, Schemas
from pagoda_frontend.tool_parsers.json_text import after_space
from pagoda_frontend.tool_parsers.values import Digits, json_text, json_value

_QUOTE = '<|"|>'
_HEAD = re.compile(r"\s*call:([^\s{}<>:]+)\s*\{")
_HEAD_SO_FAR = re.compile(r"\s*(?:c|ca|cal|call|call:[^\s{}<>:]*\s*)?")
_OUTSIDE = re.compile(r'[^{}\[\]<"]*')
_BARE = re.compile(r"[^,{}\[\]<]*")
_KEY = re.compile(r"[^:,{}\[\]<]*")
_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
"""Some calls are JSON nevertheless."""
MAX_DEPTH = 200
"""Maximum nesting of arrays and objects."""


class Gemma4Parser(ToolParser):
    """``<|tool_call>call:NAME{key:<|"|>text<|"|>,other:5}<tool_call|>``: Gemma 4."""

    start = "<|tool_call>"
    end = "<tool_call|>"
    markers = (start, end, _QUOTE)
    openers = (start,)

    def __init__(self, *, schemas: Mapping[str, dict[str, Any]]) -> None:
        super().__init__(schemas=schemas)
        self._name = ""
        self._head = ""
        """The name as it was written."""
        self._place = 0
        self._depth = 0
        self._in_string = False
        self._state = self._read_content

    @classmethod
    def free_format(cls, schemas: Schemas, *, is_parallel: bool) -> Format:
        tags = [formats.tag(f"call:{name}{{", _arguments(name, schema)) for name, schema in schemas.items()]
        calls = formats.listed(tags, separator=f"{cls.end}{cls.start}", is_parallel=is_parallel)
        return formats.triggered(cls.start, tags=[formats.tag(cls.start, calls, cls.end)], is_parallel=False)

    def _advance(self, *, is_last: bool) -> bool:
        return self._state(is_last=is_last)

    def _read_content(self, *, is_last: bool) -> bool:
        marker = self._say_until((self.start, self.end), is_last=is_last)
        if marker is None:
            return False
        if marker == self.start:
            self._state = self._read_head
        return True

    def _read_head(self, *, is_last: bool) -> bool:
        match = _HEAD.match(self._text)
        if match is None:
            if not is_last and _HEAD_SO_FAR.fullmatch(self._text):
                return False
            self._say(self.start)
            self._state = self._read_content
            return True
        self._head = self._read(match.end() - 1)
        self._name, self._place, self._depth, self._in_string = match[1], 0, 0, False
        self._state = self._read_arguments
        return True

    def _read_arguments(self, *, is_last: bool) -> bool:
        """All arguments up to the closing brace or the end marker; a call that is cut off does not count."""
        while not self._is_closed():
            if not self._step(is_last=is_last):
                break
        if not self._is_closed() and not self._text.startswith(self.end, self._place):
            if is_last:
                self._say(self.start + self._head + self._read(len(self._text)))
                self._state = self._read_content
            return False
        arguments = _Reader(self._text[: self._place]).value(0)
        self._read(self._place)
        self._begin(self._name)
        self._argue(json_text(arguments))
        self._state = self._read_end
        return True

    def _is_closed(self) -> bool:
        return self._place > 0 and self._depth == 0

    def _step(self, *, is_last: bool) -> bool:
        """Advance by one bracket, quote, or run of other characters; False at the end, or if more text is needed."""
        text, place = self._text, self._place
        if self._in_string:
            end = text.find(_QUOTE, place)
            if end < 0:
                self._place = len(text) if is_last else max(place, len(text) - len(_QUOTE) + 1)
                return False
            self._place, self._in_string = end + len(_QUOTE), False
            return True
        match = _OUTSIDE.match(text, place)
        assert match is not None
        self._place = place = match.end()
        if place == len(text):
            return False
        if text[place] == '"':
            string = _JSON_STRING.match(text, place)
            self._place = string.end() if string is not None else len(text) if is_last else place
            return string is not None
        if text[place] != "<":
            self._place += 1
            self._depth += 1 if text[place] in "{[" else -1
            return True
        is_quote, is_end = after_start(text[place:], _QUOTE), after_start(text[place:], self.end)
        if is_end or (None in (is_quote, is_end) and not is_last):
            return False
        self._in_string = bool(is_quote)
        self._place += len(_QUOTE) if is_quote else 1
        return True

    def _read_end(self, *, is_last: bool) -> bool:
        """Read the end marker and separators after it, if there are any."""
        start = after_space(self._text)
        is_end = after_start(self._text[start:], self.end)
        if is_end is None and not is_last:
            return False
        if is_end:
            self._read(start + len(self.end))
        self._state = self._read_content
        return True


class _Reader:
    """Reads values as far as there are any."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._place = 0

    def value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            self._place = len(self._text)
            return None
        if self._has("{"):
            return self._pairs(depth)
        if self._has("["):
            items = []
            while not self._has("]") and self._place < len(self._text):
                items.append(self.value(depth + 1))
                self._has(",")
            return items
        if self._has(_QUOTE):
            return self._string()
        if self._has('"'):
            return _bare(self._json_string())
        return _bare(self._run(_BARE))

    def _pairs(self, depth: int) -> dict[str, Any]:
        pairs: dict[str, Any] = {}
        while not self._has("}") and self._place < len(self._text):
            if self._has(_QUOTE):
                key = self._string()
            elif self._has('"'):
                key = str(_bare(self._json_string()))
            else:
                key = self._run(_KEY).strip()
            if self._has(":"):
                pairs[key] = self.value(depth + 1)
            elif not self._has(","):
                self._place += 1  # whatever it is, it is no key
            self._has(",")
        return pairs

    def _string(self) -> str:
        text, quote, _ = self._text[self._place :].partition(_QUOTE)
        self._place += len(text) + len(quote)
        return text

    def _json_string(self) -> str:
        """The string whose first quote was read, with both quotes."""
        start = self._place - 1
        match = _JSON_STRING.match(self._text, start)
        self._place = match.end() if match is not None else len(self._text)
        return self._text[start : self._place]

    def _run(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self._text, self._place)
        assert match is not None
        text, self._place = match[0], match.end()
        if not text and pattern is _BARE:
            self._place += 1  # no value begins like this
        return text

    def _has(self, mark: str) -> bool:
        start = after_space(self._text, self._place)
        if not self._text.startswith(mark, start):
            return False
        self._place = start + len(mark)
        return True


def _bare(text: str) -> Any:
    """A number, a JSON literal, or else text."""
    text = text.strip()
    if text.lower() in ("null", "none", "nil"):
        return None
    try:
        value = json_value(text.lower() if text in ("True", "False") else text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, Digits | bool | str) else text


def _arguments(name: str, schema: dict[str, Any]) -> Format:
    """Text after the opening brace, including the closing one."""
    if is_any_object(schema):
        return ended(f"{text_without((Gemma4Parser.end, Gemma4Parser.start))}*", "}")
    return formats.sequence(quoted_arguments(name, schema, quote=_QUOTE), formats.text("}"))
