"""Parser for a named tool choice: the whole text is the call's arguments, constrained to its schema."""

from collections.abc import Mapping
from typing import Any

from pagoda_frontend.tool_parsers.base import ToolParser
from pagoda_frontend.tool_parsers.json_text import JsonSpan, after_space


class NamedCallParser(ToolParser):
    """A text that does not begin with an object is content."""

    def __init__(self, *, schemas: Mapping[str, dict[str, Any]], name: str) -> None:
        super().__init__(schemas=schemas)
        self._name = name
        self._span: JsonSpan | None = None
        self._is_content = False

    def _advance(self, *, is_last: bool) -> bool:
        if self._is_content:
            self._say(self._text)
            self._text = ""
        elif self._span is None:
            start = after_space(self._text)
            if start == len(self._text):
                return False
            if self._text[start] == "{":
                self._read(start)
                self._begin(self._name)
                self._span = JsonSpan()
            else:
                self._is_content = True
            return True
        else:
            end, arguments = self._span.read(self._text, 0)
            self._argue(arguments)
            self._read(end)
            if self._span.is_broken:  # only an engine that does not constrain: the client sees what the model wrote
                self._argue(self._read(len(self._text)))
            self._is_content = self._span.is_done
        return False
