"""Parses calls with a tag for each argument, whose text is the value: Qwen 3 Coder, Seed-OSS, GLM 4.5."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pagoda_frontend.tool_parsers import formats
from pagoda_frontend.tool_parsers.argument_formats import ended, is_any_object, tagged_arguments, text_without
from pagoda_frontend.tool_parsers.base import ToolParser, find_marker
from pagoda_frontend.tool_parsers.formats import Format, Schemas
from pagoda_frontend.tool_parsers.json_text import MAX_HELD_CHARS
from pagoda_frontend.tool_parsers.values import checked, json_text, json_value, typed_value, types_of

MAX_NAME_CHARS = 1024
"""Characters after which a name without an end is not a call."""
WRAPPERS = ("arguments", "input")
"""Names that models give to an argument that holds all arguments as an object."""
LOOKAHEAD_CHARS = 64
"""Maximum length of a marker after a name."""


@dataclass(slots=True)
class _Pending:
    """A call that was not sent yet."""

    name: str
    text: str
    """Its text so far, as written."""
    arguments: str = ""


class TaggedArgumentsParser(ToolParser):
    """Reads a name, then arguments one after the other. Subclasses define the markers."""

    starts: ClassVar[tuple[str, ...]]
    """Markers before a call."""
    name: ClassVar[re.Pattern[str]]
    """Pattern of the name (group 1) and its end, after the start marker."""
    stops: ClassVar[tuple[str, ...]]
    """Characters that cannot precede the end of a name or key."""
    key: ClassVar[re.Pattern[str]]
    """Pattern of an argument's key (group 1), up to its value."""
    key_start: ClassVar[str]
    """Text before a key."""
    value_ends: ClassVar[tuple[str, ...]]
    """Markers that end a value; all but the first stay in the text."""
    ends: ClassVar[tuple[str, ...]]
    """Markers that end a call."""
    ignored: ClassVar[tuple[str, ...]] = ()
    """Markers around calls."""
    section: ClassVar[tuple[str, str] | None] = None
    """The two markers of `ignored` that enclose all calls; None if calls may be anywhere."""
    reads_untyped: ClassVar[bool] = False
    """Whether values without a type in the schema are read as JSON if they parse; otherwise they are strings."""
    is_whole: ClassVar[bool] = False
    """Whether calls up to `MAX_HELD_CHARS` are held until they end; one that is cut off does not count."""
    has_line_breaks: ClassVar[bool] = True
    """Whether one line break at the beginning and one at the end of a value are part of the tags."""

    def __init__(self, *, schemas: Mapping[str, dict[str, Any]]) -> None:
        super().__init__(schemas=schemas)
        self._schema: dict[str, Any] = {}
        self._properties: dict[str, Any] = {}
        self._key: re.Match[str] | None = None
        self._searched = 0
        """Number of characters of the value without an end marker."""
        self._num_arguments = 0
        self._has_begun_text = False
        """Whether the value's first line break was read."""
        self._wrapped: dict[str, Any] | None = None
        """All arguments, if the only argument so far holds them as an object."""
        self._wrapper = ""
        """That argument as it was written."""
        self._raw = ""
        self._pending: _Pending | None = None
        """The call that is held back until it has ended."""
        self._state = self._read_content
        self._is_inside = self.section is None
        """Whether calls are recognized at this place."""

    def _advance(self, *, is_last: bool) -> bool:
        return self._state(is_last=is_last)

    def _read_content(self, *, is_last: bool) -> bool:
        starts = self.starts if self._is_inside else ()
        marker = self._say_until((*starts, *self.ignored), is_last=is_last)
        if marker is None:
            return False
        if marker in starts:
            self._raw = marker
            self._state = self._read_name
            return True
        self._pass_marker()
        if self.section is not None and marker in self.section:
            self._is_inside = marker == self.section[0]
        return True

    def _read_name(self, *, is_last: bool) -> bool:
        match = self.name.match(self._text)
        if match is None or match.end() > MAX_NAME_CHARS:
            is_short = len(self._text) <= MAX_NAME_CHARS + LOOKAHEAD_CHARS
            if not is_last and is_short and not any(stop in self._text for stop in self.stops):
                return False
            self._say(self._raw)
            self._state = self._read_content
            return True
        head = self._read(match.end())
        name = match[1].strip()
        self._schema = self._schemas.get(name, {})
        properties = self._schema.get("properties")
        self._properties = properties if isinstance(properties, dict) else {}
        self._num_arguments = 0
        self._wrapped, self._wrapper = None, ""
        if self.is_whole and not self.is_constrained:
            self._pending = _Pending(name, self._raw + head)
        else:
            self._begin(name)
        self._state = self._read_key
        return True

    def _read(self, num_characters: int) -> str:
        text = super()._read(num_characters)
        if self._pending is not None:
            self._pending.text += text
            if len(self._pending.text) > MAX_HELD_CHARS:
                self._release()
        return text

    def _argue(self, arguments: str) -> None:
        if self._pending is not None:
            self._pending.arguments += arguments
        else:
            super()._argue(arguments)

    def _release(self) -> None:
        """Report the held call."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._begin(pending.name)
            self._argue(pending.arguments)

    def _read_key(self, *, is_last: bool) -> bool:
        """Read the next argument, or the end; text between arguments is ignored."""
        place, marker = find_marker(self._text, (self.key_start, *self.ends, *self.starts), is_last=is_last)
        self._read(place)
        if marker == self.key_start:
            match = self.key.match(self._text)
            if match is not None:
                self._read(match.end())
                self._expect_value(match)
                return True
            if not is_last and not any(stop in self._text[len(marker) :] for stop in self.stops):
                return False
            self._read(len(marker))
            return True
        if marker is None and not is_last:
            return False
        if marker is None and self._pending is not None:
            pending, self._pending = self._pending, None
            self._say(pending.text)
            self._state = self._read_content
            return True
        self._release()
        if marker in self.ends:
            self._read(len(marker or ""))
        if self._wrapped is not None:
            self._argue(json_text(self._wrapped))
        else:
            self._argue("}" if self._num_arguments else "{}")
        self._state = self._read_content
        return True

    def _expect_value(self, match: re.Match[str]) -> None:
        """An argument has begun with `match`; a value that is certainly text is reported as it arrives."""
        self._key = match
        key = match[1].strip()
        if self._wrapped is not None:  # it was an argument like others
            self._argue(self._wrapper)
            self._wrapped, self._num_arguments = None, 1
        if self._is_wrapper(key) or not self._is_text(match, key):
            self._state = self._read_value
            return
        self._argue(f'{", " if self._num_arguments else "{"}{json_text(key)}: "')
        self._has_begun_text = False
        self._state = self._read_text

    def _is_wrapper(self, key: str) -> bool:
        return key in WRAPPERS and not self._num_arguments and bool(self._properties) and key not in self._properties

    def _is_text(self, match: re.Match[str], key: str) -> bool:
        """Whether the following value is certainly a string."""
        types = types_of(self._properties.get(key), self._schema)
        return types == {"string"} or not (types or self.reads_untyped)

    def _read_text(self, *, is_last: bool) -> bool:
        """More of a value that is text."""
        if self.has_line_breaks and not self._has_begun_text:
            if not self._text and not is_last:
                return False
            self._text = self._text.removeprefix("\n")
        self._has_begun_text = True
        place, marker = find_marker(self._text, self.value_ends, is_last=is_last)
        has_ended = marker is not None or is_last
        text = self._text[:place]
        shown = text.removesuffix("\n") if self.has_line_breaks else text
        self._read(len(text if has_ended else shown))
        self._argue(json_text(shown)[1:-1])
        if not has_ended:
            return False
        if marker == self.value_ends[0]:
            self._read(len(marker))
        self._argue('"')
        self._num_arguments += 1
        self._state = self._read_key
        return True

    def _read_value(self, *, is_last: bool) -> bool:
        place, marker = find_marker(self._text, self.value_ends, is_last=is_last, start=self._searched)
        if marker is None and not is_last:
            self._searched = place
            return False
        self._searched = 0
        text = self._read(place)
        if marker == self.value_ends[0]:
            self._read(len(marker))
        assert self._key is not None
        key, opening = self._key[1].strip(), ", " if self._num_arguments else "{"
        value = self._value(self._key, key, self._trimmed(text))
        argument = f"{opening}{json_text(key)}: {json_text(value)}"
        self._state = self._read_key
        if self._is_wrapper(key) and (wrapped := _object(value)) is not None:
            self._wrapped, self._wrapper = wrapped, argument
            return True
        self._argue(argument)
        self._num_arguments += 1
        return True

    def _value(self, match: re.Match[str], key: str, text: str) -> Any:
        """The value of `text`; `match` is how the key was written."""
        return typed_value(text, self._properties.get(key), self._schema, reads_untyped=self.reads_untyped)

    def _trimmed(self, text: str) -> str:
        """The text without line breaks that are part of the tags."""
        return text.removeprefix("\n").removesuffix("\n") if self.has_line_breaks else text


def _object(value: Any) -> dict[str, Any] | None:
    """`value` as an object, even if it is JSON text of one; None if it is not an object."""
    if isinstance(value, str):
        try:
            value = checked(json_value(value))
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, dict) else None


class Qwen3XmlParser(TaggedArgumentsParser):
    """``<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>``: Qwen 3 Coder, Qwen 3.5."""

    keeps_space = True
    starts = ("<function=",)
    name = re.compile(r"([^<>\n]+)>")
    stops = (">", "<", "\n")
    key_start = "<parameter="
    key = re.compile(r"<parameter=([^<>\n]+)>")
    value_ends = ("</parameter>", "<parameter=", "</function>", "</tool_call>")
    ends = ("</function>", "</tool_call>")
    ignored = ("<tool_call>", "</tool_call>")
    markers = ignored
    openers = ignored[:1]

    @classmethod
    def free_format(cls, schemas: Schemas, *, is_parallel: bool) -> Format:
        begin, end = cls.ignored
        tags = []
        for name, schema in schemas.items():
            call = formats.tag(f"<function={name}>\n", cls._arguments(name, schema))
            tags += [formats.tag(f"{begin}\n", call, f"\n{end}"), call]
        return formats.triggered(begin, "<function=", tags=tags, is_parallel=is_parallel)

    @classmethod
    def _arguments(cls, name: str, schema: dict[str, Any]) -> Format:
        if is_any_object(schema):
            return ended(f"{text_without(('</function>', cls.ends[1], '<function='))}*", "</function>")
        ends, stops = ("<parameter=", ">\n"), (*cls.value_ends, *cls.starts)
        arguments = tagged_arguments(name, schema, key_ends=ends, end="\n</parameter>\n", stops=stops)
        return formats.sequence(arguments, formats.text("</function>"))


class SeedOssParser(Qwen3XmlParser):
    """The same between ``<seed:tool_call>`` and ``</seed:tool_call>``: Seed-OSS."""

    thinking = ("<seed:think>", "</seed:think>")

    value_ends = ("</parameter>", "<parameter=", "</function>", "</seed:tool_call>")
    ends = ("</function>", "</seed:tool_call>")
    ignored = ("<seed:tool_call>", "</seed:tool_call>")
    markers = ignored
    openers = ignored[:1]


class Glm45Parser(TaggedArgumentsParser):
    """``<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>``: GLM 4.5 to 4.7."""

    keeps_space = True
    is_whole = True
    starts = ("<tool_call>",)
    name = re.compile(r"\s*([^\s<>]+)\s*(?=<arg_key>|</tool_call>)")
    stops = ("</tool_call>", "<arg_key>", "<tool_call>")
    key_start = "<arg_key>"
    key = re.compile(r"<arg_key>([^<>]*)</arg_key>\s*<arg_value>")
    value_ends = ("</arg_value>", "<arg_key>", "</tool_call>")
    ends = ("</tool_call>",)
    markers = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    openers = starts
    reads_untyped = True

    @classmethod
    def free_format(cls, schemas: Schemas, *, is_parallel: bool) -> Format:
        tags = []
        for name, schema in schemas.items():
            if is_any_object(schema):
                arguments = ended(f"{text_without(('</tool_call>', '<tool_call>'))}*", "</tool_call>")
            else:
                ends = ("<arg_key>", "</arg_key>\n<arg_value>")
                stops = (*cls.value_ends, *cls.starts)
                inner = tagged_arguments(name, schema, key_ends=ends, end="</arg_value>\n", stops=stops)
                arguments = formats.sequence(inner, formats.text("</tool_call>"))
            tags.append(formats.tag(f"<tool_call>{name}\n", arguments))
        return formats.triggered("<tool_call>", tags=tags, is_parallel=is_parallel)
