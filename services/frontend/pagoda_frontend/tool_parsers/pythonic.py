"""Calls as a list of Python calls with literals: Llama 3.2 and 4. Nothing is ever executed."""

import ast
import re
from collections.abc import Mapping
from typing import Any

from pagoda_frontend.tool_parsers import formats
from pagoda_frontend.tool_parsers.argument_formats import python_call
from pagoda_frontend.tool_parsers.base import ToolParser, after_start
from pagoda_frontend.tool_parsers.formats import Format, Schemas
from pagoda_frontend.tool_parsers.json_text import after_space
from pagoda_frontend.tool_parsers.values import json_text

_PLAIN = re.compile(r"""[^()\[\]{}"'\\]*""")
_WORDS = {"true": True, "false": False, "null": None}
"""JSON's names for what Python calls True, False and None."""
MAX_CALL_CHARS = 256 * 1024


class PythonicParser(ToolParser):
    """``[get_weather(city="Rome", days=3), now()]`` as the whole answer."""

    markers = ("<|python_start|>", "<|python_end|>")

    def __init__(self, *, schemas: Mapping[str, dict[str, Any]]) -> None:
        super().__init__(schemas=schemas)
        self._raw = ""
        self._state = self._read_start
        self._reset()

    @classmethod
    def free_format(cls, schemas: Schemas, *, is_parallel: bool) -> Format:
        """A list of calls, between the markers where one is; other text does not begin with a bracket and a name."""
        tags = [python_call(name, schema) for name, schema in schemas.items()]
        calls = formats.tag("[", formats.listed(tags, separator=", ", is_parallel=is_parallel), "]")
        begin, end = cls.markers
        plain = r"[^\s<\[]|\[\s*[^\sA-Za-z_]|<[^|]"
        text = formats.sequence(formats.regex(rf"\s*({plain})"), {"type": "any_text"})
        return formats.one_of(calls, formats.tag(begin, calls, ["", end]), formats.regex(r"\s*"), text)

    def _reset(self) -> None:
        self._place = 0
        self._depth = 0
        self._quote = ""

    def _advance(self, *, is_last: bool) -> bool:
        return self._state(is_last=is_last)

    def _read_content(self, *, is_last: bool) -> bool:
        return self._say_until(self.markers[1:], is_last=is_last) is not None

    def _read_start(self, *, is_last: bool) -> bool:
        start = after_space(self._text)
        text = self._text[start:]
        marker = self.markers[0]
        if text.startswith(marker):
            self._raw += self._read(start + len(marker))
        elif text.startswith("["):
            self._raw += self._read(start + 1)
            self._state = self._read_call
        elif (text and after_start(text, marker) is False) or is_last:
            return self._give_up()
        else:
            return False
        return True

    def _read_call(self, *, is_last: bool) -> bool:
        """One call up to its closing bracket, which is where it is known to be one."""
        while self._place < len(self._text) and not self._is_closed():
            self._step()
        if self._place > MAX_CALL_CHARS:
            return self._give_up()
        if not self._is_closed():
            return self._give_up() if is_last else False
        call = _read_python_call(self._text[: self._place])
        if call is None:
            return self._give_up()
        self._read(self._place)
        self._begin(call[0])
        self._argue(call[1])
        self._raw = ""
        self._state = self._read_comma
        return True

    def _is_closed(self) -> bool:
        return self._place > 0 and self._depth <= 0 and not self._quote and self._text[self._place - 1] in ")]}"

    def _step(self) -> None:
        """Go on by one bracket, quote, or run of other characters."""
        text, place = self._text, self._place
        match = _PLAIN.match(text, place)
        assert match is not None
        if match.end() > place:
            self._place = match.end()
            return
        character = text[place]
        self._place += 1
        if self._quote:
            if character == "\\":
                self._place += 1  # whatever it is, it does not end the string
            elif character == self._quote:
                self._quote = ""
        elif character in "\"'":
            self._quote = character
        elif character != "\\":
            self._depth += 1 if character in "([{" else -1

    def _read_comma(self, *, is_last: bool) -> bool:
        start = after_space(self._text)
        if start == len(self._text):
            if is_last:
                self._text = ""
            return False
        self._reset()
        if self._text[start] == ",":
            self._raw = self._read(start + 1)
            self._state = self._read_call
            return True
        if self._text[start] == "]":
            self._read(start + 1)
        self._state = self._read_content
        return True

    def _give_up(self) -> bool:
        self._say(self._raw)
        self._raw = ""
        self._state = self._read_content
        return True


def _read_python_call(text: str) -> tuple[str, str] | None:
    """Name and arguments, as JSON text, of a call with literals by keyword; None when `text` is something else."""
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        arguments = {keyword.arg: _literal(keyword.value) for keyword in call.keywords}
        if None in arguments:
            return None
        return ast.unparse(_checked_name(call.func)), json_text(arguments)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _checked_name(node: ast.expr) -> ast.expr:
    """`node`, which is a name, with dots perhaps."""
    inner = node
    while isinstance(inner, ast.Attribute):
        inner = inner.value
    if not isinstance(inner, ast.Name):
        raise ValueError("not a name")
    return node


def _literal(node: ast.expr) -> Any:
    match node:
        case ast.Name(id=name) if name in _WORDS:
            return _WORDS[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            pairs = zip(keys, values, strict=True)
            return {_key(key): _literal(value) for key, value in pairs}
    return ast.literal_eval(node)


def _key(node: ast.expr | None) -> str:
    key = ast.literal_eval(node) if node is not None else None
    if not isinstance(key, str):
        raise ValueError("JSON wants strings for keys")
    return key
