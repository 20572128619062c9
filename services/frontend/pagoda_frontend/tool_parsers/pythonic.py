"""Parses Python calls with literals, in a list or one per line: Llama 3.2 and 4, OLMo 3, LFM2. Nothing is executed."""

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from pagoda_frontend.tool_parsers import formats
from pagoda_frontend.tool_parsers.argument_formats import python_call
from pagoda_frontend.tool_parsers.base import SEPARATORS, ToolParser, after_start, find_marker
from pagoda_frontend.tool_parsers.formats import Format, Schemas
from pagoda_frontend.tool_parsers.json_text import after_space
from pagoda_frontend.tool_parsers.python_text import CallSpan, read_call
from pagoda_frontend.tool_parsers.values import Digits, json_text

MAX_CALL_CHARS = 256 * 1024
_HEAD = re.compile(r"\s*(?:[^\W\d][\w.-]*\s*(?:\(.*)?)?", re.DOTALL)
"""A call, or the beginning of one."""


class PythonicParser(ToolParser):
    """``[get_weather(city="Rome", days=3), now()]`` at the beginning of the text, or of known tools anywhere."""

    start: ClassVar[str] = "<|python_start|>"
    """Marker before the calls; may be missing where calls may begin the text."""
    end: ClassVar[str] = "<|python_end|>"
    """Marker after the calls."""
    markers = (start, end)
    openers = (start,)
    begins_text: ClassVar[bool] = True
    """Whether calls may be without markers."""
    is_bare: ClassVar[bool] = False
    """Whether calls after the marker need no brackets around them."""

    def __init__(self, *, schemas: Mapping[str, dict[str, Any]]) -> None:
        super().__init__(schemas=schemas)
        self._raw = ""
        """Text since the last call or content: content, if no call follows."""
        self._span = CallSpan()
        self._in_list = False
        self._state = self._read_start if self.begins_text else self._read_content

    @classmethod
    def free_format(cls, schemas: Schemas, *, is_parallel: bool) -> Format:
        """A list of calls, between markers if there are any; other text does not begin with a bracket and a name."""
        tags = [python_call(name, schema) for name, schema in schemas.items()]
        calls = formats.tag("[", formats.listed(tags, separator=", ", is_parallel=is_parallel), "]")
        marked = formats.tag(cls.start, calls, ["", cls.end])
        free = formats.triggered(cls.start, tags=[marked], is_parallel=False)
        plain = r"[^\s<\[]|\[\s*[^\sA-Za-z_]|<[^|]"
        text = formats.sequence(formats.regex(rf"\s*({plain})"), free)
        return formats.one_of(calls, marked, formats.regex(r"\s*"), text)

    def _advance(self, *, is_last: bool) -> bool:
        return self._state(is_last=is_last)

    def _read_start(self, *, is_last: bool) -> bool:
        """The beginning of the text, which may be a list of any calls."""
        start = after_space(self._text)
        if start == len(self._text) and not is_last:
            return False
        self._state = self._read_content
        if self._text[start : start + 1] == "[":
            self._expect_list(start)
        return True

    def _read_content(self, *, is_last: bool) -> bool:
        lists = tuple(f"[{name}(" for name in self._schemas) if self.begins_text and not self.is_strict else ()
        place, marker = find_marker(self._text, (self.start, self.end, *lists), is_last=is_last)
        self._say(self._read(place))
        if marker is None:
            return False
        if marker == self.start:
            self._raw = self._read(len(marker))
            self._state = self._read_open
        elif marker == self.end:
            self._read(len(marker))
        else:
            self._expect_list(0)
        return True

    def _read_open(self, *, is_last: bool) -> bool:
        """After the marker: a list, or calls."""
        start = after_space(self._text)
        if start == len(self._text):
            return self._give_up() if is_last else False
        if self._text[start] == "[":
            self._expect_list(start)
        elif self.is_bare:
            self._expect_call()
        else:
            return self._give_up()
        return True

    def _expect_list(self, place: int) -> None:
        """Read the list whose bracket is at `place`."""
        self._raw += self._read(place + 1)
        self._in_list = True
        self._expect_call()

    def _expect_call(self) -> None:
        self._span = CallSpan()
        self._state = self._read_call

    def _read_call(self, *, is_last: bool) -> bool:
        """Read one call up to its closing bracket, where it is known to be a call."""
        if _HEAD.fullmatch(self._text) is None:
            return self._give_up()
        self._span.read(self._text, is_last=is_last)
        if self._span.place > MAX_CALL_CHARS:
            return self._give_up()
        if not self._span.is_closed:
            return self._give_up() if is_last else False
        try:
            name, arguments = read_call(self._text[: self._span.place], number=Digits)
            text = json_text(arguments)
        except ValueError:
            return self._give_up()
        self._read(self._span.place)
        self._begin(name)
        self._argue(text)
        self._raw = ""
        self._state = self._read_behind
        return True

    def _read_behind(self, *, is_last: bool) -> bool:
        """Read another call, the end of the list, the end marker, or none of them."""
        start = after_space(self._text)
        character = self._text[start : start + 1]
        place = after_space(self._text, start + 1) if character and character in SEPARATORS else start
        if place == len(self._text):
            if is_last:
                self._say(self._read(place))
            return False
        following = self._text[place]
        if self._in_list and following == "]":
            self._read(place + 1)
            self._in_list = False
            return True
        if (self._in_list or self.is_bare) and (following.isalpha() or following == "_"):
            self._raw = self._read(place)
            self._expect_call()
            return True
        if not self._in_list and following == "[":
            self._raw = self._read(place)
            self._expect_list(0)
            return True
        is_end = after_start(self._text[place:], self.end)
        if is_end is None and not is_last:
            return False
        if is_end:
            self._read(place + len(self.end))
        self._in_list = False
        self._state = self._read_content
        return True

    def _give_up(self) -> bool:
        """It was not a call: text since the last call is content."""
        self._say(self._raw)
        self._raw = ""
        self._in_list = False
        self._state = self._read_content
        return True


class Olmo3Parser(PythonicParser):
    """``<function_calls>`` and a call on each line, without brackets: OLMo 3."""

    start = "<function_calls>"
    end = "</function_calls>"
    markers = (start, end)
    openers = (start,)
    begins_text = False
    is_bare = True

    @classmethod
    def free_format(cls, schemas: Schemas, *, is_parallel: bool) -> Format:
        tags = [python_call(name, schema) for name, schema in schemas.items()]
        calls = formats.listed(tags, separator="\n", is_parallel=is_parallel)
        ends = [cls.end, f"\n{cls.end}"]
        marked = [formats.tag(cls.start, calls, ends), formats.tag(f"{cls.start}\n", calls, ends)]
        return formats.triggered(cls.start, tags=marked, is_parallel=False)


class Lfm2Parser(PythonicParser):
    """``<|tool_call_start|>[…]<|tool_call_end|>``, with text before and after: LFM2."""

    start = "<|tool_call_start|>"
    end = "<|tool_call_end|>"
    markers = (start, end)
    openers = (start,)
    begins_text = False
    is_bare = True

    def __init__(self, *, schemas: Mapping[str, dict[str, Any]]) -> None:
        super().__init__(schemas=schemas)
        self._calls_text = ""
        """Text of the last calls, because models repeat them without the marker."""

    def _read(self, num_characters: int) -> str:
        text = super()._read(num_characters)
        if self._state != self._read_content:
            self._calls_text += text
        return text

    def _read_content(self, *, is_last: bool) -> bool:
        written = self._calls_text.removesuffix(self.end)
        if written and written != self._calls_text:
            is_repeated = after_start(self._text, written)
            if is_repeated is None and not is_last:
                return False
            if is_repeated:
                super()._read(len(written))
        self._calls_text = ""
        return super()._read_content(is_last=is_last)

    @classmethod
    def free_format(cls, schemas: Schemas, *, is_parallel: bool) -> Format:
        tags = [python_call(name, schema) for name, schema in schemas.items()]
        calls = formats.tag("[", formats.listed(tags, separator=", ", is_parallel=is_parallel), "]")
        return formats.triggered(cls.start, tags=[formats.tag(cls.start, calls, cls.end)], is_parallel=is_parallel)
