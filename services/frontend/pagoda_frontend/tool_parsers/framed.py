"""Calls whose name stands between markers, with the arguments as JSON behind it: DeepSeek, Kimi, Mistral."""

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from pagoda_frontend.tool_parsers import formats
from pagoda_frontend.tool_parsers.base import Piece, ToolParser, find_marker
from pagoda_frontend.tool_parsers.formats import Format, Schemas
from pagoda_frontend.tool_parsers.json_calls import JsonToolParser
from pagoda_frontend.tool_parsers.json_text import JsonSpan, after_space

MAX_HEADER_CHARS = 1024
"""Without arguments within this, it was no call."""


class FramedParser(ToolParser):
    """Reads: start, header with the name, ``{…}``, end. Subclasses say how they look."""

    start: ClassVar[str]
    """Marker before a call."""
    header: ClassVar[re.Pattern[str]]
    """All of what stands between start and arguments; group `name` is the name, `id` if there is one the id."""
    end: ClassVar[str] = ""
    """Marker behind a call."""
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
        return True

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
        """Up to the end marker nothing counts, but the rest of arguments that are no JSON."""
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
    """Calls that stand together between two markers, the first and last that are `ignored`."""

    call_separator: ClassVar[str] = ""

    @classmethod
    def _call(cls, name: str, schema: dict[str, Any]) -> Format:
        """The format of one call; every dialect has its own, and this class is none."""
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
    header = re.compile(r"function<｜tool▁sep｜>(?P<name>[^\n]+)\n```json")
    end = "<｜tool▁call▁end｜>"
    ignored = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
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
    """``<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{…}``: Kimi K2, whose template wants its ids."""

    start = "<|tool_call_begin|>"
    header = re.compile(r"(?P<id>(?:functions\.)?(?P<name>[^\s<]+?)(?::\d+)?)\s*<\|tool_call_argument_begin\|>")
    end = "<|tool_call_end|>"
    ignored = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    markers = (start, end, *ignored, "<|tool_call_argument_begin|>")

    @classmethod
    def _call(cls, name: str, schema: dict[str, Any]) -> Format:
        behind = formats.text("<|tool_call_argument_begin|>")
        content = formats.sequence(formats.regex("[0-9]{1,3}"), behind, formats.json_value(schema))
        return formats.tag(f"{cls.start}functions.{name}:", content, cls.end)


MISTRAL_ID_CHARS = 9
"""Mistral's templates refuse ids of any other length."""


class _MistralNamed(FramedParser):
    start = "[TOOL_CALLS]"
    header = re.compile(r"(?P<name>[^\s\[\]]+?)\s*(?:\[CALL_ID\](?P<id>\w+)\s*)?(?:\[ARGS\])?")

    def _make_id(self) -> str:
        return self._drawn_id()[:MISTRAL_ID_CHARS]


class _MistralArray(JsonToolParser):
    starts = ("[TOOL_CALLS]",)

    def _make_id(self) -> str:
        return self._drawn_id()[:MISTRAL_ID_CHARS]


class MistralParser(ToolParser):
    """``[TOOL_CALLS][{"name": …, "arguments": …}]``, and since version 11 ``[TOOL_CALLS]NAME[ARGS]{…}``."""

    markers = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")

    @classmethod
    def free_format(cls, schemas: Schemas, *, is_parallel: bool) -> Format:
        """An array, or named calls; more of these follow each other."""
        start, named = "[TOOL_CALLS]", []
        for name, schema in schemas.items():
            arguments = formats.json_value(schema)
            numbered = formats.sequence(formats.regex("[A-Za-z0-9]{9}"), formats.text("[ARGS]"), arguments)
            named += [formats.tag(f"{name}[ARGS]", arguments), formats.tag(f"{name}[CALL_ID]", numbered)]
        array = formats.json_value(formats.array_schema(schemas, is_parallel=is_parallel, arguments="arguments"))
        calls = formats.one_of(formats.listed(named, separator=start, is_parallel=is_parallel), array)
        return formats.triggered(start, tags=[formats.tag(start, calls)], is_parallel=False)

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
        start = "[TOOL_CALLS]"
        place, marker = find_marker(self._text, (start,), is_last=is_last)
        self._say(self._read(place))
        behind = after_space(self._text, len(start)) if marker else 0
        if marker is None or behind == len(self._text):
            return False
        kind = _MistralArray if self._text[behind] in "[{" else _MistralNamed
        self._inner = kind(schemas=self._schemas)
        self._inner.id_seed = self.id_seed
        piece = self._inner.append(self._held + self._read(len(self._text)))
        self._held = ""
        self._content.append(piece.content)
        self._calls += piece.tool_calls
        return False
