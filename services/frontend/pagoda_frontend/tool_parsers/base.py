"""Base class of tool call parsers: text in as it arrives, content and calls out. Knows no HTTP, no engine, no tokens.

The result depends only on the text, never on how it was cut into pieces: whole or in pieces, a text gives the same
content and the same calls. So one parser serves both streams and single responses.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar

from pagoda_frontend.conversation.drawn_ids import drawn_id
from pagoda_frontend.conversation.message import ToolCallDelta
from pagoda_frontend.tool_parsers.formats import Format, Schemas, json_value, tag, triggered

SEPARATORS = ",; \t\r\n"
"""White space that models write between calls."""


@dataclass(slots=True)
class Piece:
    """Content and calls found in new text."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)


class ToolParser(ABC):
    """Parses the text of one message. Text that is not a call is content; nothing raises.

    A subclass reads `_text`, the unread text, and reports what it finds with `_say`, `_begin` and `_argue`.
    """

    markers: ClassVar[tuple[str, ...]] = ()
    """Markers of the beginning and end of calls. If one is a special token, the text must include special tokens."""
    splits_reasoning: ClassVar[bool] = False
    """The parser finds the reasoning too, so no reasoning parser runs before it."""
    trigger: ClassVar[str] = ""
    """Prefix of every frame, anywhere in the text; "" if calls are the whole text."""
    separator: ClassVar[str] = ""
    """Text between the frames of calls."""
    id_pattern: ClassVar[re.Pattern[str] | None] = None
    """Pattern of the ids that the model's chat template accepts; None if it accepts any."""
    openers: ClassVar[tuple[str, ...]] = ()
    """Marker of a call anywhere in the text; reasoning parsers search for it."""
    keeps_space: ClassVar[bool] = False
    """Whether text beside calls keeps its white space; white space alone beside calls is never content."""
    drops_rest: ClassVar[bool] = False
    """Whether text after calls is dropped instead of being content."""
    thinking: ClassVar[tuple[str, str]] = ("<think>", "</think>")
    """Markers around thoughts at the beginning of a text that no reasoning parser reads; calls quoted there do not
    count."""

    def __init__(self, *, schemas: Mapping[str, dict[str, Any]]) -> None:
        """`schemas`: the JSON schema of the arguments, by the name of the tool."""
        self._schemas = schemas
        self.is_constrained = False
        """A constraint makes the text match the schemas, so nothing has to be held back to check that."""
        self.is_strict = False
        """Calls match their schemas if they begin in the required way; calls in prose are content."""
        self.id_seed = ""
        """Seed of the ids of calls; "" draws them at random."""
        self.make_id = self.call_id
        """Makes the ids; replaced where the text is not in the model's format, but the template requires the model's
        ids."""
        self._text = ""
        self._read_on = self._read_beginning
        self._has_said = False
        self._num_calls = 0
        self._held = ""
        self._is_behind_call = False
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[ToolCallDelta] = []

    @classmethod
    def frame(cls, name: str) -> tuple[str, str] | None:
        """The text before and after the arguments of a call of `name`; None if the arguments are not JSON."""
        return None

    @classmethod
    def free_format(cls, schemas: Schemas, *, is_parallel: bool) -> Format | None:
        """A constraint for texts with valid calls in the model's own format; None if such calls cannot be recognized.

        Raises:
            InvalidRequest: a schema cannot be expressed in this format.
        """
        frames = {name: frame for name in schemas if (frame := cls.frame(name)) is not None}
        if not cls.trigger or len(frames) < len(schemas):
            return None
        tags = [tag(frames[name][0], json_value(schema), frames[name][1]) for name, schema in schemas.items()]
        return triggered(cls.trigger, tags=tags, is_parallel=is_parallel)

    def append(self, text: str) -> Piece:
        """The result of `text`; some of it may be held back until more is known."""
        self._text += text
        while self._text and self._read_on(is_last=False):
            pass
        return self._take()

    def finish(self) -> Piece:
        """The rest at the end of the text."""
        while self._read_on(is_last=True):
            pass
        self._say(self._text)
        self._text = ""
        if self._held and not self._num_calls:
            self._content.append(self._held)
        self._held = ""
        return self._take()

    def _read_beginning(self, *, is_last: bool) -> bool:
        """Whether the text begins with thoughts."""
        is_thinking = after_start(self._text.lstrip(), self.thinking[0])
        if is_thinking is None and not is_last:
            return False
        self._read_on = self._read_thoughts if is_thinking else self._advance
        return True

    def _read_thoughts(self, *, is_last: bool) -> bool:
        """Thoughts are content up to their end marker. Without one, the first call ends them."""
        end = self.thinking[1]
        place, marker = find_marker(self._text, (end, *self.openers), is_last=is_last)
        close = self._text.find(end, place) if marker is not None else -1
        self._say(self._read(place if close < 0 else close + len(end)))
        if close < 0 and not (is_last and marker is not None):
            return False
        self._read_on = self._advance
        return True

    @abstractmethod
    def _advance(self, *, is_last: bool) -> bool:
        """Continue reading; False when more text is needed. With `is_last` there is no more."""

    def _read(self, num_characters: int) -> str:
        """Read and return the next characters."""
        text, self._text = self._text[:num_characters], self._text[num_characters:]
        return text

    def _say(self, text: str) -> None:
        """Add content, without white space beside calls and separators between them.

        Where text keeps its white space, only white space alone is left out.
        """
        if self.drops_rest and self._num_calls:
            return
        text = self._held + text
        if self.keeps_space:
            self._say_with_space(text)
            return
        if self._is_behind_call and not self._has_said:
            text = text.lstrip()
        spoken = text.rstrip()
        if self._is_behind_call and not spoken.strip(SEPARATORS):
            spoken = ""
        self._held = text[len(spoken) :]
        if spoken:
            self._content.append(spoken)
            self._is_behind_call = False
            self._has_said = True

    def _say_with_space(self, text: str) -> None:
        """Add `text` and the held text, as soon as it is more than white space and separators."""
        waits = self._is_behind_call or not self._has_said
        if waits and not text.strip(SEPARATORS if self._is_behind_call else None):
            self._held = text
            return
        self._held = ""
        self._content.append(text)
        self._is_behind_call = False
        self._has_said = True

    def _pass_marker(self) -> None:
        """A marker around calls was read: white space alone beside it is not content."""
        if self.keeps_space:
            self._held = ""
            self._is_behind_call = True

    def _think(self, text: str) -> None:
        """Add reasoning."""
        if text:
            self._reasoning.append(text)

    def _begin(self, name: str, call_id: str | None = None) -> None:
        """Begin a call."""
        self._held = ""
        self._is_behind_call = True
        if not call_id:
            call_id = self.make_id(name, self._num_calls, drawn_id(self.id_seed, str(self._num_calls)))
        self._calls.append(ToolCallDelta(self._num_calls, call_id, name, ""))
        self._num_calls += 1

    def _argue(self, arguments: str) -> None:
        """Continue the arguments of the call that began last."""
        if not arguments:
            return
        last = self._calls[-1] if self._calls else None
        if last is not None and last.name is None:
            last.arguments += arguments
        else:
            self._calls.append(ToolCallDelta(self._num_calls - 1, None, None, arguments))

    @staticmethod
    def call_id(name: str, index: int, drawn: str) -> str:
        """An id in the form that the model's chat template requires; in OpenAI's form if it requires none.

        Args:
            name, index: of the call in its message.
            drawn: at least 32 hexadecimal digits that no other call has.
        """
        return "call_" + drawn[:24]

    def _say_until(self, markers: tuple[str, ...], *, is_last: bool) -> str | None:
        """Report the text before the first of `markers` and read that marker; None if there is none yet."""
        place, marker = find_marker(self._text, markers, is_last=is_last)
        self._say(self._read(place))
        return self._read(len(marker)) if marker is not None else None

    def _take(self) -> Piece:
        piece = Piece("".join(self._reasoning), "".join(self._content), self._calls)
        self._reasoning, self._content, self._calls = [], [], []
        return piece


def find_marker(text: str, markers: tuple[str, ...], *, is_last: bool, start: int = 0) -> tuple[int, str | None]:
    """Position of the first of `markers`, and the marker; without one, the position where one may begin."""
    pattern, beginnings, max_length = _pattern(markers)
    if not markers:
        return len(text), None
    match = pattern.search(text, start)
    if match is not None:
        return match.start(), match[0]
    if not is_last:
        for place in range(max(start, len(text) - max_length + 1), len(text)):
            if text[place] in beginnings and any(marker.startswith(text[place:]) for marker in markers):
                return place, None
    return len(text), None


@lru_cache(maxsize=256)
def _pattern(markers: tuple[str, ...]) -> tuple[re.Pattern[str], frozenset[str], int]:
    """A pattern for `markers`, their first characters, and the length of the longest."""
    pattern = re.compile("|".join(map(re.escape, markers)))
    return pattern, frozenset(marker[0] for marker in markers), max(map(len, markers), default=0)


def after_start(text: str, marker: str) -> bool | None:
    """Whether `text` begins with `marker`; None while it is too short to tell."""
    return True if text.startswith(marker) else None if marker.startswith(text) else False
