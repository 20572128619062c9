"""Calls as JSON objects, alone or in an array, after a marker, at the beginning of the text or within it."""

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from pagoda_frontend.tool_parsers import formats
from pagoda_frontend.tool_parsers.base import SEPARATORS, ToolParser, after_start, find_marker
from pagoda_frontend.tool_parsers.formats import Format, Schemas
from pagoda_frontend.tool_parsers.json_text import JsonCall, Outcome, after_space

CALL_KEYS = frozenset(("name", "type", "function", "id", "arguments", "parameters"))
"""Beginning of an object in prose that may be a call."""


class JsonToolParser(ToolParser):
    """Reads ``{"name": …, "arguments": {…}}``. Subclasses define the markers around it."""

    starts: ClassVar[tuple[str, ...]] = ()
    """Markers before calls."""
    end: ClassVar[str] = ""
    """Marker after calls; without it, the end of the object counts."""
    begins_text: ClassVar[bool] = False
    """Whether calls may begin the text without a marker."""
    calls_in_array: ClassVar[bool] = False
    """Whether an array of calls with arguments follows a marker."""
    array_end: ClassVar[str] = ""
    """Text that must follow the array."""
    is_in_prose: ClassVar[bool] = False
    """Whether calls of known tools may be anywhere in the text without a marker."""
    needs_arguments: ClassVar[bool] = False
    """Whether an object without arguments is not a call."""
    hides_markers: ClassVar[bool] = False
    """Whether markers are never content, whatever is between them, and each line between them may be a call."""

    def __init__(self, *, schemas: Mapping[str, dict[str, Any]]) -> None:
        super().__init__(schemas=schemas)
        self._raw = ""
        """Text since the last call or content: content, if no call follows."""
        self._call = JsonCall()
        self._in_array = False
        self._in_prose = False
        self._state = self._read_first if self.begins_text else self._read_content

    @classmethod
    def free_format(cls, schemas: Schemas, *, is_parallel: bool) -> Format | None:
        if not cls.calls_in_array:
            return super().free_format(schemas, is_parallel=is_parallel)
        calls = formats.json_value(formats.array_schema(schemas, is_parallel=is_parallel, arguments="arguments"))
        tags = [formats.tag(start, calls, cls.array_end) for start in cls.starts]
        return formats.triggered(*cls.starts, tags=tags, is_parallel=False)

    def _advance(self, *, is_last: bool) -> bool:
        return self._state(is_last=is_last)

    def _read_content(self, *, is_last: bool) -> bool:
        opening = ("{",) if self.is_in_prose and not self.is_strict else ()
        hidden = (self.end,) if self.hides_markers else ()
        place, marker = find_marker(self._text, (*self.starts, *opening, *hidden), is_last=is_last)
        self._say(self._read(place))
        if marker is None:
            return False
        if marker in (*self.starts, *hidden):
            self._raw = self._read(len(marker))
            if self.hides_markers:
                self._raw = ""
            if marker in hidden:
                return True
            self._state = self._read_first
            return True
        return self._expect_object(in_prose=True)

    def _read_first(self, *, is_last: bool) -> bool:
        """After a marker: an array or an object."""
        start = after_space(self._text)
        if start == len(self._text):
            return self._give_up() if is_last else False
        self._in_array = self._text[start] == "["
        if self._in_array:
            self._raw += self._read(start + 1)
        return self._expect_object()

    def _expect_object(self, *, in_prose: bool = False) -> bool:
        held = {"max_held_chars": 0} if self.is_constrained else {}
        first_keys = CALL_KEYS if in_prose else None
        self._call = JsonCall(needs_arguments=self.needs_arguments, first_keys=first_keys, **held)
        self._in_prose = in_prose
        self._state = self._read_object
        return True

    def _read_object(self, *, is_last: bool) -> bool:
        call = self._call
        had_begun = call.has_begun
        outcome = call.read(self._text)
        if self._in_prose and call.name is not None and call.name not in self._schemas:
            return self._give_up()
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
        """Arguments that are not JSON extend to the end of the call: the client sees what the model wrote."""
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
        """Read another object, the array's end, the end marker, or none of them."""
        start = after_space(self._text)
        character = self._text[start : start + 1]
        place = after_space(self._text, start + 1) if character and character in SEPARATORS else start
        if place == len(self._text):
            if is_last:
                self._say(self._read(place))
            return False
        if self._in_array and self._text[place] == "]":
            self._read(place + 1)
            self._in_array = False
            return True
        if self._text[place] == "{" or (self._in_array and character in SEPARATORS):
            self._raw = self._read(place)
            return self._expect_object()
        if self.end:
            is_end = after_start(self._text[place:], self.end)
            if is_end is None and not is_last:
                return False
            if is_end:
                self._read(place + len(self.end))
        self._raw = ""
        self._in_array = False
        self._state = self._read_content
        return True

    def _give_up(self) -> bool:
        """It was not a call: text since the last call is content, and so is the brace that looked like a call."""
        self._say(self._raw)
        if self._in_prose:
            self._say(self._read(1))
        is_between_calls = (bool(self._num_calls) or self.hides_markers) and bool(self.end) and not self._in_prose
        self._raw = ""
        self._in_prose = self._in_array = False
        self._state = self._read_fault if is_between_calls else self._read_content
        return True

    def _read_fault(self, *, is_last: bool) -> bool:
        """After other calls: text that is not a call extends to the next object that begins a line, or to the end
        marker."""
        place, marker = find_marker(self._text, ("\n{", *self._stops()), is_last=is_last)
        self._say(self._read(place))
        if marker is None:
            return False
        if marker == "\n{":
            self._raw = self._read(1)
            return self._expect_object()
        if marker == self.end:
            self._read(len(marker))
        self._state = self._read_content
        return True


class HermesParser(JsonToolParser):
    """``<tool_call>{"name": …, "arguments": …}</tool_call>``: Hermes, Qwen 3, Granite 4, pagoda-tiny."""

    keeps_space = True
    starts = ("<tool_call>",)
    end = "</tool_call>"
    markers = ("<tool_call>", "</tool_call>")

    openers = ("<tool_call>",)
    trigger = "<tool_call>"
    separator = "\n"

    @classmethod
    def frame(cls, name: str) -> tuple[str, str]:
        return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": ', "}\n</tool_call>"


class Llama3JsonParser(JsonToolParser):
    """``{"name": …, "parameters": …}``, several with ; between, and text around them: Llama 3.1, 3.2 and 3.3."""

    starts = ("<|python_tag|>",)
    markers = ("<|python_tag|>",)
    begins_text = True
    is_in_prose = True
    needs_arguments = True
    separator = "; "
    openers = ("<|python_tag|>",)

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


class RequiredCallsParser(JsonToolParser):
    """The array that a required tool choice is constrained to, whatever the model's own format."""

    begins_text = True
    needs_arguments = True
