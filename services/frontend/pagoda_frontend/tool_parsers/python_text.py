"""Parses Python calls and literals as models write them. Nothing is executed, keywords are ordinary names, and strings
may have raw line breaks. Knows no markers and no models."""

import math
import re
import unicodedata
from collections.abc import Callable
from typing import Any

MAX_DEPTH = 200
"""Maximum nesting of brackets in a value."""
_NAME = re.compile(r"[^\W\d][\w-]*(?:\.[^\W\d][\w-]*)*")
_KEY = re.compile(r"[^\W\d][\w-]*")
_SPACE = re.compile(r"(?:\s|\\\n)*")
_NUMBER = re.compile(
    r"([+-]?)\s*(0[xX][\da-fA-F_]+|0[oO][0-7_]+|0[bB][01_]+|(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][+-]?\d[\d_]*)?)"
)
_STRING = re.compile(r"([rRuU]?)('''|\"\"\"|'|\")")
_WORDS: dict[str, Any] = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
"""JSON's names of True, False and None are accepted too."""
_ESCAPE = re.compile(r"\\(x[\da-fA-F]{2}|u[\da-fA-F]{4}|U[\da-fA-F]{8}|N\{[^{}]+\}|[0-7]{1,3}|.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "\n": ""}
_ESCAPES.update({character: character for character in "\\'\""})

Number = Callable[[str], Any]


def read_python(text: str, *, number: Number) -> Any:
    """The value of a literal; `number` converts a number's JSON spelling.

    Raises:
        ValueError: it is not a literal.
    """
    reader = _Reader(text, number)
    value = reader.value(0)
    reader.expect_end()
    return value


def read_call(text: str, *, number: Number) -> tuple[str, dict[str, Any]]:
    """Name and arguments of ``name(key=literal, …)``.

    Raises:
        ValueError: it is something else.
    """
    reader = _Reader(text, number)
    call = reader.call()
    reader.expect_end()
    return call


class _Reader:
    """Reads from a position."""

    def __init__(self, text: str, number: Number) -> None:
        self._text = text
        self._place = 0
        self._number = number

    def call(self) -> tuple[str, dict[str, Any]]:
        name = self._match(_NAME)
        self._expect("(")
        arguments: dict[str, Any] = {}
        while not self._has(")"):
            key = self._match(_KEY)
            self._expect("=")
            if key in arguments:
                raise ValueError(f"{key} is there twice")
            arguments[key] = self.value(0)
            if not self._has(","):
                self._expect(")")
                break
        return name, arguments

    def value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError("too deep")
        if self._has("["):
            return self._items("]", depth)[0]
        if self._has("("):
            items, has_comma = self._items(")", depth)
            return items if has_comma or not items else items[0]
        if self._has("{"):
            return self._pairs(depth)
        start = self._after_space()
        if _STRING.match(self._text, start):
            return self._strings()
        if match := _NUMBER.match(self._text, start):
            self._place = match.end()
            return self._number(_json_number(match[1], match[2].replace("_", "").lower()))
        word = self._match(_KEY)
        if word not in _WORDS:
            raise ValueError(f"{word} is not a literal")
        return _WORDS[word]

    def _items(self, end: str, depth: int) -> tuple[list[Any], bool]:
        """Items up to `end`, and whether there was a comma."""
        items, has_comma = [], False
        while not self._has(end):
            items.append(self.value(depth + 1))
            if not self._has(","):
                self._expect(end)
                break
            has_comma = True
        return items, has_comma

    def _pairs(self, depth: int) -> dict[str, Any]:
        pairs: dict[str, Any] = {}
        while not self._has("}"):
            if _STRING.match(self._text, self._after_space()) is None:
                raise ValueError("JSON wants strings for keys")
            key = self._strings()
            self._expect(":")
            pairs[key] = self.value(depth + 1)
            if not self._has(","):
                self._expect("}")
                break
        return pairs

    def _strings(self) -> str:
        """Adjacent strings are joined."""
        parts = []
        while match := _STRING.match(self._text, self._after_space()):
            parts.append(self._string(match))
        return "".join(parts)

    def _string(self, match: re.Match[str]) -> str:
        start = place = match.end()
        while not self._text.startswith(match[2], place):
            if place >= len(self._text):
                raise ValueError("the string does not end")
            place += 2 if self._text[place] == "\\" else 1
        self._place = place + len(match[2])
        raw = self._text[start:place]
        return raw if match[1] in ("r", "R") else _ESCAPE.sub(_unescaped, raw)

    def expect_end(self) -> None:
        if self._after_space() < len(self._text):
            raise ValueError("there is text after it")

    def _after_space(self) -> int:
        match = _SPACE.match(self._text, self._place)
        assert match is not None
        return match.end()

    def _has(self, mark: str) -> bool:
        """Whether `mark` comes next; reads it if so."""
        start = self._after_space()
        if not self._text.startswith(mark, start):
            return False
        self._place = start + len(mark)
        return True

    def _expect(self, mark: str) -> None:
        if not self._has(mark):
            raise ValueError(f"{mark} is missing")

    def _match(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self._text, self._after_space())
        if match is None:
            raise ValueError("a name is missing")
        self._place = match.end()
        return match[0]


def _json_number(sign: str, digits: str) -> str:
    """A Python number in JSON's spelling, with all of its digits."""
    if digits[:2] in ("0x", "0o", "0b"):
        digits = str(int(digits, 0))
    else:
        mantissa, mark, exponent = digits.partition("e")
        whole, point, fraction = mantissa.partition(".")
        if len(whole) > 1 and whole.startswith("0"):
            raise ValueError("numbers do not begin with 0")
        digits = (whole or "0") + (f".{fraction or '0'}" if point else "") + mark + exponent
        if math.isinf(float(digits)) and (point or mark):
            raise ValueError("the number has no end")
    return ("-" if sign == "-" else "") + digits


def _unescaped(match: re.Match[str]) -> str:
    code = match[1]
    if code in _ESCAPES:
        return _ESCAPES[code]
    if code[0] in "xuU" and len(code) > 1:
        number = int(code[1:], 16)
        return chr(number) if number < 0x110000 else match[0]
    if "0" <= code[0] <= "7":
        return chr(int(code, 8))
    if code.startswith("N{"):
        return unicodedata.lookup(code[2:-1]) if _is_character(code[2:-1]) else match[0]
    return match[0]


def _is_character(name: str) -> bool:
    try:
        unicodedata.lookup(name)
    except KeyError:
        return False
    return True


class CallSpan:
    """Finds the end of the first bracket, skipping strings."""

    def __init__(self) -> None:
        self.place = 0
        """Number of characters that were read."""
        self.is_closed = False
        self._depth = 0
        self._quote = ""

    def read(self, text: str, *, is_last: bool) -> None:
        """Continue in `text`, which begins as before."""
        while self.place < len(text) and not self.is_closed:
            pattern = _IN_STRING[self._quote[0]] if self._quote else _OUTSIDE
            match = pattern.match(text, self.place)
            assert match is not None
            self.place = match.end()
            if self.place == len(text) or not self._step(text, is_last=is_last):
                return

    def _step(self, text: str, *, is_last: bool) -> bool:
        """Advance to the next bracket or quote; False when more text is needed."""
        character = text[self.place]
        if character == "\\":
            if self.place + 1 == len(text):
                return False
            self.place += 2
            return True
        if self._quote or character in "\"'":
            quotes = text[self.place : self.place + 3]
            is_short = quotes == character * len(quotes) and len(quotes) < 3 and not is_last
            if is_short and self._quote != character:
                return False
            if self._quote:
                is_end = quotes.startswith(self._quote)
                self.place += len(self._quote) if is_end else 1
                self._quote = "" if is_end else self._quote
            else:
                self._quote = character * (3 if quotes == character * 3 else 1)
                self.place += len(self._quote)
            return True
        self.place += 1
        self._depth += 1 if character in "([{" else -1
        self.is_closed = self._depth <= 0
        return True


_OUTSIDE = re.compile(r"""[^()\[\]{}"'\\]*""")
_IN_STRING = {'"': re.compile(r'[^"\\]*'), "'": re.compile(r"[^'\\]*")}
