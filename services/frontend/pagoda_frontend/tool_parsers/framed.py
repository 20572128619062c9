"""Calls whose name stands between markers, with the arguments as JSON after it: DeepSeek, Kimi."""

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from pagoda_frontend.tool_parsers import formats
from pagoda_frontend.tool_parsers.base import Piece, ToolParser, find_marker
from pagoda_frontend.tool_parsers.formats import Format, Schemas
from pagoda_frontend.tool_parsers.json_text import JsonSpan

MAX_HEADER_CHARS = 1024
"""Characters after which text without arguments is not a call."""


class FramedParser(ToolParser):
    """Reads start marker, header with the name, ``{…}``, end marker. Subclasses define these markers."""

    start: ClassVar[str]
    """Marker before a call."""
    header: ClassVar[re.Pattern[str]]
    """The text between start and arguments; group `name` is the name, group `id` the id, if any."""
    end: ClassVar[str] = ""
    """Marker after a call."""
    ignored: ClassVar[tuple[str, ...]] = ()
    """Markers around all calls."""

    def __init__(self, *, schemas: Mapping[str, dict[str, Any]]) -> None:
        super().__init__(schemas=schemas)
        self._span = JsonSpan()
        self._state = self._read_content

    def _advance(self, *, is_last: bool) -> bool:
        return self._state(is_last=is_last)

    def _read_content(self, *, is_last: bool) -> bool:
        marker = self._say_until((self.start, *self.ignored), is_last=is_last)
        if marker is None:
            return False
        if marker == self.start:
            self._state = self._read_header
        else:
            self._read_ignored(marker)
        return True

    def _read_ignored(self, marker: str) -> None:
        """One of `ignored` was read."""

    def _read_header(self, *, is_last: bool) -> bool:
        brace = self._text.find("{")
        stop, marker = find_marker(self._text, self._stops(), is_last=False)
        if 0 <= brace < stop and brace <= MAX_HEADER_CHARS:
            match = self.header.fullmatch(self._text[:brace].strip())
            if match is not None:
                self._read(brace)
                groups = match.groupdict()
                self._begin(groups["name"].strip(), groups.get("id"))
                self._span = JsonSpan()
                self._state = self._read_arguments
                return True
        elif marker and marker == self.end and (match := self.header.fullmatch(self._text[:stop].strip())):
            self._read(stop + len(marker))
            self._begin(match["name"].strip(), match.groupdict().get("id"))
            self._argue("{}")
            self._state = self._read_content
            return True
        elif marker is None and not is_last and len(self._text) <= MAX_HEADER_CHARS:
            return False
        self._say(self.start)
        self._state = self._read_content
        return True

    def _read_arguments(self, *, is_last: bool) -> bool:
        place, arguments = self._span.read(self._text, 0)
        self._argue(arguments)
        self._read(place)
        if self._span.is_done or self._span.is_broken:
            self._state = self._read_end
            return True
        if is_last:
            self._argue(self._read(len(self._text)))
        return False

    def _read_end(self, *, is_last: bool) -> bool:
        """Skip up to the end marker, but keep the rest of arguments that are not JSON."""
        if not self.end and not self._span.is_broken:
            self._state = self._read_content
            return True
        place, marker = find_marker(self._text, self._stops(), is_last=is_last)
        text = self._read(place)
        if self._span.is_broken:
            self._argue(text)
        if marker is None:
            return False
        if marker == self.end:
            self._read(len(marker))
        self._state = self._read_content
        return True

    def _stops(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.end, self.start, *self.ignored)))


class SectionParser(FramedParser):
    """Calls that stand together between two markers, the first and last of `ignored`.

    As in vLLM's parsers of these models, text between or after calls is not content.
    """

    call_separator: ClassVar[str] = ""
    keeps_space = True
    drops_rest = True

    def __init__(self, *, schemas: Mapping[str, dict[str, Any]]) -> None:
        super().__init__(schemas=schemas)
        self._is_inside = False
        """Whether reading is between the markers."""
        self._noise = ""
        """Text of the section that is not a call; content if the section has no call."""

    def finish(self) -> Piece:
        while self._read_on(is_last=True):
            pass
        self._leave()
        return super().finish()

    def _read_ignored(self, marker: str) -> None:
        if marker == self.ignored[0]:
            self._is_inside = True
        else:
            self._leave()

    def _leave(self) -> None:
        """End the section."""
        self._is_inside = False
        noise, self._noise = self._noise, ""
        self._say(noise)

    def _say(self, text: str) -> None:
        if self._is_inside and not self._num_calls:
            self._noise += text
        else:
            super()._say(text)

    @classmethod
    def _call(cls, name: str, schema: dict[str, Any]) -> Format:
        """The format of one call; each dialect has its own, and this class is not a dialect."""
        raise NotImplementedError

    @classmethod
    def free_format(cls, schemas: Schemas, *, is_parallel: bool) -> Format:
        begin, end = cls.ignored
        tags = [cls._call(name, schema) for name, schema in schemas.items()]
        calls = formats.listed(tags, separator=cls.call_separator, is_parallel=is_parallel)
        return formats.triggered(begin, tags=[formats.tag(begin, calls, end)], is_parallel=False)


class DeepSeekV3Parser(SectionParser):
    """``<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME`` and the arguments as a block of JSON: DeepSeek V3 and R1."""

    start = "<｜tool▁call▁begin｜>"
    header = re.compile(r"function<｜tool▁sep｜>(?P<name>[^\n`]+?)\s*(?:```(?:json)?)?")
    end = "<｜tool▁call▁end｜>"
    ignored = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    openers = (ignored[0], start)
    markers = (start, end, *ignored, "<｜tool▁sep｜>")
    call_separator = "\n"

    @classmethod
    def _call(cls, name: str, schema: dict[str, Any]) -> Format:
        begin = f"{cls.start}function<｜tool▁sep｜>{name}\n```json\n"
        return formats.tag(begin, formats.json_value(schema), f"\n```{cls.end}")


class DeepSeekV31Parser(DeepSeekV3Parser):
    """``<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}<｜tool▁call▁end｜>``: DeepSeek V3.1."""

    header = re.compile(r"(?P<name>[^\n]+?)<｜tool▁sep｜>")
    call_separator = ""

    @classmethod
    def _call(cls, name: str, schema: dict[str, Any]) -> Format:
        return formats.tag(f"{cls.start}{name}<｜tool▁sep｜>", formats.json_value(schema), cls.end)


class KimiK2Parser(SectionParser):
    """``<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{…}``: Kimi K2, whose template requires its ids.

    Text without a number after the name is not a call.
    """

    start = "<|tool_call_begin|>"
    header = re.compile(r"(?P<id>(?:functions\.)?(?P<name>[^\s<]+?):\d+)\s*<\|tool_call_argument_begin\|>")
    end = "<|tool_call_end|>"
    ignored = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    markers = (start, end, *ignored, "<|tool_call_argument_begin|>")
    openers = (ignored[0], start)

    @staticmethod
    def call_id(name: str, index: int, drawn: str) -> str:
        return f"functions.{name}:{index}"

    @classmethod
    def _call(cls, name: str, schema: dict[str, Any]) -> Format:
        following = formats.text("<|tool_call_argument_begin|>")
        content = formats.sequence(formats.regex("[0-9]{1,3}"), following, formats.json_value(schema))
        return formats.tag(f"{cls.start}functions.{name}:", content, cls.end)
