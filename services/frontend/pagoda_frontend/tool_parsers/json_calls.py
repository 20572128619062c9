"""Calls as JSON objects, alone or in an array, behind a marker or at the beginning of the text."""

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from pagoda_frontend.tool_parsers import formats
from pagoda_frontend.tool_parsers.base import ToolParser, after_start, find_marker
from pagoda_frontend.tool_parsers.formats import Format, Schemas
from pagoda_frontend.tool_parsers.json_text import JsonCall, Outcome, after_space


class JsonToolParser(ToolParser):
    """Reads ``{"name": …, "arguments": {…}}``. Subclasses say what goes around it."""

    starts: ClassVar[tuple[str, ...]] = ()
    """Markers behind which calls are."""
    end: ClassVar[str] = ""
    """Marker behind them; where it is missing, the object's own end counts."""
    begins_text: ClassVar[bool] = False
    """Calls may be at the beginning of the text without a marker."""
    calls_in_array: ClassVar[bool] = False
    """Behind a marker stands an array of calls with arguments."""
    delimiter: ClassVar[str] = ""
    """Character between objects that are in no array."""
    needs_arguments: ClassVar[bool] = False
    """An object without arguments is no call."""

    def __init__(self, *, schemas: Mapping[str, dict[str, Any]]) -> None:
        super().__init__(schemas=schemas)
        self._raw = ""
        """What was read since the last call or content: content, should no call follow."""
        self._call = JsonCall()
        self._in_array = False
        self._state = self._read_first if self.begins_text else self._read_content

    @classmethod
    def free_format(cls, schemas: Schemas, *, is_parallel: bool) -> Format | None:
        if not cls.calls_in_array:
            return super().free_format(schemas, is_parallel=is_parallel)
        calls = formats.json_value(formats.array_schema(schemas, is_parallel=is_parallel, arguments="arguments"))
        return formats.triggered(
            *cls.starts, tags=[formats.tag(start, calls) for start in cls.starts], is_parallel=False
        )

    def _advance(self, *, is_last: bool) -> bool:
        return self._state(is_last=is_last)

    def _read_content(self, *, is_last: bool) -> bool:
        marker = self._say_until(self.starts, is_last=is_last)
        if marker is None:
            return False
        self._raw = marker
        self._state = self._read_first
        return True

    def _read_first(self, *, is_last: bool) -> bool:
        """Behind a marker: an array or an object."""
        start = after_space(self._text)
        if start == len(self._text):
            return self._give_up() if is_last else False
        self._in_array = self._text[start] == "["
        if self._in_array:
            self._raw += self._read(start + 1)
        return self._expect_object()

    def _expect_object(self) -> bool:
        held = {"max_held_chars": 0} if self.is_constrained else {}
        self._call = JsonCall(needs_arguments=self.needs_arguments, **held)
        self._state = self._read_object
        return True

    def _read_object(self, *, is_last: bool) -> bool:
        call = self._call
        had_begun = call.has_begun
        outcome = call.read(self._text)
        if is_last and outcome is Outcome.MORE:
            call.finish()
        if outcome is Outcome.FAILED or (is_last and not call.has_begun):
            return self._give_up()
        if call.has_begun:
            if not had_begun:
                assert call.name is not None
                self._begin(call.name)
                self._raw = ""
            self._argue("".join(call.news))
            call.news.clear()
            self._read(call.place)
            call.place = 0
        if outcome is Outcome.MORE:
            if is_last:
                self._text = ""
            return False
        self._state = self._read_wreck if outcome is Outcome.BROKEN else self._read_after_object
        return True

    def _read_wreck(self, *, is_last: bool) -> bool:
        """Arguments that are no JSON go on to the end of the call: the client sees what the model wrote."""
        place, marker = find_marker(self._text, self._stops(), is_last=is_last)
        text = self._read(place)
        if self._call.is_arguing:
            self._argue(text)
        if marker is None:
            return False
        if marker == self.end:
            self._read(len(marker))
        self._state = self._read_content
        return True

    def _stops(self) -> tuple[str, ...]:
        return (*self.starts, self.end) if self.end else self.starts

    def _read_after_object(self, *, is_last: bool) -> bool:
        """A separator, the array's end, the marker at the end, or none of them."""
        start = after_space(self._text)
        if start == len(self._text):
            if is_last:
                self._text = ""
            return False
        character = self._text[start]
        if self._in_array and character in ",]":
            self._raw = self._read(start + 1)
            self._in_array = character == ","
            return self._expect_object() if self._in_array else True
        if not self._in_array and character == self.delimiter:
            self._raw = self._read(start + 1)
            return self._expect_object()
        if self.end:
            is_end = after_start(self._text[start:], self.end)
            if is_end is None and not is_last:
                return False
            if is_end:
                self._read(start + len(self.end))
        self._raw = ""
        self._state = self._read_content
        return True

    def _give_up(self) -> bool:
        """It was no call: what was read since the last one is content."""
        self._say(self._raw)
        self._raw = ""
        self._state = self._read_content
        return True


class HermesParser(JsonToolParser):
    """``<tool_call>{"name": …, "arguments": …}</tool_call>``: Hermes, Qwen 2.5 and Qwen 3, the embedded model."""

    starts = ("<tool_call>",)
    end = "</tool_call>"
    markers = ("<tool_call>", "</tool_call>")

    trigger = "<tool_call>"
    separator = "\n"

    @classmethod
    def frame(cls, name: str) -> tuple[str, str]:
        return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": ', "}\n</tool_call>"


class Llama3JsonParser(JsonToolParser):
    """``{"name": …, "parameters": …}`` as the whole answer, several with ; between: Llama 3.1, 3.2 and 3.3."""

    starts = ("<|python_tag|>",)
    markers = ("<|python_tag|>",)
    begins_text = True
    delimiter = ";"
    needs_arguments = True
    separator = "; "

    @classmethod
    def frame(cls, name: str) -> tuple[str, str]:
        return f'{{"name": {json.dumps(name)}, "parameters": ', "}"

    @classmethod
    def free_format(cls, schemas: Schemas, *, is_parallel: bool) -> Format:
        tags = []
        for name, schema in schemas.items():
            begin, end = cls.frame(name)
            beginnings = (begin, begin.replace("{", '{"type": "function", ', 1))
            tags += [formats.tag(beginning, formats.json_value(schema), end) for beginning in beginnings]
        calls = formats.listed(tags, separator=cls.separator, is_parallel=is_parallel)
        plain = r"[^\s{<\[]|\[\s*[^\s{]|<[^|]"
        return formats.at_the_beginning(calls, plain=plain, marker=cls.starts[0])


class GraniteParser(JsonToolParser):
    """``<|tool_call|>[{"name": …, "arguments": …}, …]``: Granite 3."""

    starts = ("<|tool_call|>", "<tool_call>")
    end = "</tool_call>"
    markers = ("<|tool_call|>", "<tool_call>")
    calls_in_array = True


class Phi4MiniJsonParser(JsonToolParser):
    """``functools[{"name": …, "arguments": …}, …]``: Phi-4-mini."""

    starts = ("functools",)
    markers = ("functools",)
    calls_in_array = True


class RequiredCallsParser(JsonToolParser):
    """The array that a required tool choice is constrained to, whatever the model's own way."""

    begins_text = True
    needs_arguments = True
