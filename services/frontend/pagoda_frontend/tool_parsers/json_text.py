"""Incremental JSON reading: where a value ends, and which call an object describes. Knows no markers and no models."""

import json
import re
from enum import Enum
from typing import Any

from pagoda_frontend.tool_parsers.values import is_utf8, json_text, json_value

_IN_STRING = re.compile(r'[^"\\]*')
_OUTSIDE = re.compile(r"[\s:,0-9A-Za-z+.\-]*")
_SCALAR = re.compile(r"[0-9A-Za-z+.\-]*")
_SPACE = re.compile(r"\s*")
_CONTROL = {code: json.dumps(chr(code))[1:-1] for code in range(0x20)}
"""Models write line breaks into strings, where JSON wants them escaped."""


def after_space(text: str, start: int = 0) -> int:
    """Index of the first character of `text` that is not white space."""
    match = _SPACE.match(text, start)
    assert match is not None
    return match.end()


MAX_HELD_CHARS = 256
"""Characters of arguments that are held back until it is certain that they are JSON."""


class JsonSpan:
    """Finds the end of one value by brackets and strings; numbers and words are not checked."""

    def __init__(self) -> None:
        self.is_done = False
        """Whether the value has ended."""
        self.is_broken = False
        """Whether the next text cannot be part of a value."""
        self._depth = 0
        self._in_string = False
        self._in_scalar = False

    def read(self, text: str, start: int) -> tuple[int, str]:
        """Continue from `start`: the position where reading stopped, and the value's text up to there, with control
        characters escaped.

        A number or word at the top level ends only at the following character.
        """
        place, parts = start, []
        while place < len(text) and not (self.is_done or self.is_broken):
            if self._in_string:
                end = _end(_IN_STRING, text, place)
                parts.append(text[place:end].translate(_CONTROL))
                place = end
                step = 2 if text[end : end + 1] == "\\" else 1
                if place + step > len(text):
                    break
                parts.append(text[place : place + step])
                place += step
                self._in_string = step == 2
                self.is_done = not self._in_string and self._depth == 0
                continue
            end = _end(_OUTSIDE if self._depth else _SCALAR, text, place)
            parts.append(text[place:end])
            self._in_scalar = self._in_scalar or (self._depth == 0 and end > place)
            place = end
            if place == len(text):
                break
            if self._in_scalar:
                self.is_done = True
                break
            parts.append(self._open_or_close(text[place]))
            place += not self.is_broken
        return place, "".join(parts)

    def _open_or_close(self, character: str) -> str:
        if character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]" and self._depth:
            self._depth -= 1
            self.is_done = self._depth == 0
        else:
            self.is_broken = True
            return ""
        return character


def _end(pattern: re.Pattern[str], text: str, start: int) -> int:
    match = pattern.match(text, start)
    assert match is not None
    return match.end()


class Outcome(Enum):
    """How far an object has been read."""

    MORE = "it takes more text"
    DONE = "it has ended, and was a call"
    FAILED = "it is not a call, and nothing was sent"
    BROKEN = "the call began, but then came what is not JSON"


class JsonCall:
    """Reads ``{"name": …, "arguments": {…}}`` with keys in any order, and reports the call as it arrives."""

    def __init__(
        self,
        *,
        needs_arguments: bool = False,
        max_held_chars: int = MAX_HELD_CHARS,
        first_keys: frozenset[str] | None = None,
    ) -> None:
        """Set how strict the reader is.

        Args:
            needs_arguments: an object without arguments is not a call.
            max_held_chars: the call begins once its arguments are longer than this, or when it has ended. A shorter
            call that is cut off does not count. first_keys: an object that begins with another key is not a call; None
            allows all.
        """
        self.place = 0
        """Number of characters that were read."""
        self.name: str | None = None
        self.has_begun = False
        """Whether it is a call, with `news` as its arguments so far."""
        self.is_arguing = False
        """Whether the arguments have not ended."""
        self.news: list[str] = []
        """New text of the arguments, to be taken by the caller."""
        self._needs_arguments = needs_arguments
        self._max_held_chars = max_held_chars
        self._first_keys = first_keys
        self._num_chars = 0
        self._step = self._open
        self._key = ""
        self._span = JsonSpan()
        self._parts: list[str] = []
        self._held: str | None = None

    def read(self, text: str) -> Outcome:
        """Continue; `text` begins with the object until the call has begun, afterwards at `place`."""
        while True:
            before, step = self.place, self._step
            outcome = step(text)
            if outcome is not None:
                return outcome
            if (self.place, self._step) == (before, step):
                return Outcome.MORE

    def _fail(self) -> Outcome:
        return Outcome.BROKEN if self.has_begun else Outcome.FAILED

    def _next(self, text: str) -> str:
        """The next character that is not white space; "" when there is none yet."""
        self.place = after_space(text, self.place)
        return text[self.place : self.place + 1]

    def _open(self, text: str) -> Outcome | None:
        character = self._next(text)
        if character and character != "{":
            return Outcome.FAILED
        if character:
            self.place += 1
            self._step = self._read_key
        return None

    def _read_key(self, text: str) -> Outcome | None:
        character = self._next(text)
        if character == "}":
            self.place += 1
            return self._close()
        if character and character != '"':
            return self._fail()
        span = JsonSpan()
        end, raw = span.read(text, self.place)
        colon = after_space(text, end)
        if not span.is_done or colon == len(text):
            return None
        key = _loads(raw)
        if text[colon] != ":" or not isinstance(key, str):
            return self._fail()
        if self._first_keys is not None and key not in self._first_keys:
            return self._fail()
        self._first_keys = None
        self._key, self.place = key, colon + 1
        self._step = self._read_value
        return None

    def _read_value(self, text: str) -> Outcome | None:
        character = self._next(text)
        if not character:
            return None
        self._span, self._parts = JsonSpan(), []
        is_arguments = self._key in ("arguments", "parameters")
        if is_arguments and character == "{" and self.name is not None and not self.has_begun and not self.news:
            self.is_arguing = True
            self._step = self._read_arguments
        else:
            self._step = self._read_other
        return None

    def _read_arguments(self, text: str) -> Outcome | None:
        self.place, news = self._span.read(text, self.place)
        self.news.append(news)
        self._num_chars += len(news)
        if self._num_chars > self._max_held_chars:
            self.has_begun = True
        if self._span.is_broken:
            return self._fail()
        if self._span.is_done:
            if not self.has_begun and not isinstance(_loads("".join(self.news)), dict):
                return Outcome.FAILED
            self.is_arguing = False
            self._step = self._read_comma
        return None

    def _read_other(self, text: str) -> Outcome | None:
        """Read a whole value: the name, arguments that come before the name, or another key's value."""
        self.place, part = self._span.read(text, self.place)
        self._parts.append(part)
        if self._span.is_broken:
            return self._fail()
        if not self._span.is_done:
            return None
        raw = "".join(self._parts)
        if self._key == "name" and self.name is None:
            name = _loads(raw)
            if not isinstance(name, str) or not name or not is_utf8(name):
                return self._fail()
            self.name = name
        elif self._key in ("arguments", "parameters") and not self.has_begun:
            self._held = _object_text(raw)
            if self._held is None:
                return self._fail()
        elif self._key == "function" and self.name is None:
            self.name, self._held = _wrapped(raw)
        self._step = self._read_comma
        return None

    def _read_comma(self, text: str) -> Outcome | None:
        character = self._next(text)
        if not character:
            return None
        if character not in ",}":
            self.has_begun = self.has_begun or bool(self.news)  # the brace is missing, but the call goes no further
            return self._fail()
        self.place += 1
        if character == "}":
            return self._close()
        self._step = self._read_key
        return None

    def _close(self) -> Outcome:
        if self.has_begun or self.news:
            self.has_begun = True
            return Outcome.DONE
        if self.name is None or (self._held is None and self._needs_arguments):
            return Outcome.FAILED
        self.has_begun = True
        self.news.append("{}" if self._held is None else self._held)
        return Outcome.DONE


def _loads(raw: str) -> Any:
    try:
        return json_value(raw)
    except (ValueError, RecursionError):
        return None


def _wrapped(raw: str) -> tuple[str | None, str | None]:
    """Name and arguments of a call in OpenAI's form, within an object called function; None if it is not one."""
    inner = _loads(raw)
    name = inner.get("name") if isinstance(inner, dict) else None
    if not isinstance(name, str) or not name or not is_utf8(name):
        return None, None
    arguments = inner.get("arguments", inner.get("parameters"))
    try:
        return name, _object_text(json_text(arguments))
    except RecursionError:
        return None, None


def _object_text(raw: str) -> str | None:
    """Arguments as the text of an object, if they are an object, a string that holds one, or null; else None."""
    value = _loads(raw)
    if isinstance(value, str):
        raw = JsonSpan().read(value.strip(), 0)[1]
        value = _loads(raw)
    if isinstance(value, dict) and is_utf8(raw):
        return raw
    return "{}" if raw == "null" else None
