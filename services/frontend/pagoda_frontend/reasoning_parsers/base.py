"""Base class of reasoning parsers: text in as it arrives, reasoning and answer out. Knows no HTTP, no engine, no
tokens.

As with tool calls, the result depends only on the text, never on how it was cut into pieces.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

from pagoda_frontend.tool_parsers.base import after_start, find_marker


class ReasoningParser(ABC):
    """Parses the text of one message. Nothing raises."""

    markers: ClassVar[tuple[str, ...]] = ()
    """Markers of the start and end of reasoning. If one is a special token, the text must include special tokens."""
    end: ClassVar[str] = ""
    """The end marker of the reasoning; if it is a single token, structured output begins after it."""

    def __init__(self, *, prompt: str) -> None:
        """`prompt`: the rendered conversation, whose end may open or close the reasoning."""
        self.is_over = False
        """All further text is the answer."""
        self.call_openers: tuple[str, ...] = ()
        """Marker of a tool call. A call ends reasoning that is never closed, and is otherwise part of it."""

    @property
    def is_inside(self) -> bool:
        """Whether the next text is reasoning, as far as is known."""
        return not self.is_over

    @property
    def is_told_empty(self) -> bool:
        """Whether empty reasoning is sent as an empty text."""
        return False

    @abstractmethod
    def append(self, text: str) -> tuple[str, str]:
        """The reasoning and the part of the answer that `text` adds; some of it may be held back."""

    @abstractmethod
    def finish(self) -> tuple[str, str]:
        """The rest at the end of the text."""


class TaggedReasoningParser(ReasoningParser):
    """Reasoning between two tags, at the beginning. White space before the first tag belongs to the tag."""

    start: ClassVar[str]
    """The marker before the reasoning; models whose prompt ends with it do not repeat it."""
    label: ClassVar[str] = ""
    """Text at the beginning of reasoning that is not part of it."""
    tells_empty: ClassVar[bool] = False
    """If the model opens its reasoning and writes none, the reasoning is an empty text instead of None."""
    trims: ClassVar[bool] = True
    """White space around the reasoning is part of the tags; else reasoning and answer stay as the model wrote them."""
    is_assumed: ClassVar[bool] = False
    """A text without a start marker is reasoning too, unless the prompt has closed it."""

    def __init__(self, *, prompt: str) -> None:
        super().__init__(prompt=prompt)
        prompt = prompt.rstrip()
        self.is_over = prompt.endswith(self.end)
        self._is_inside = prompt.endswith(self.start)
        self._has_begun = self.is_over
        self._text = ""
        self._held = ""
        self._has_opened = False
        """Whether there is reasoning, though it may be empty."""
        self._has_reasoned = False
        self._is_behind = False

    @property
    def is_inside(self) -> bool:
        return not self.is_over and (self._has_begun or self._is_inside or self.is_assumed)

    @property
    def is_told_empty(self) -> bool:
        return self.tells_empty and self._has_opened

    def append(self, text: str) -> tuple[str, str]:
        return self._read(text, is_last=False)

    def finish(self) -> tuple[str, str]:
        return self._read("", is_last=True)

    def _read(self, text: str, *, is_last: bool) -> tuple[str, str]:
        self._text += text
        if not self._has_begun and not self._begin(is_last=is_last):
            return "", ""
        reasoning = "" if self.is_over else self._reason(is_last=is_last)
        return reasoning, self._answer(is_last=is_last) if self.is_over else ""

    def _begin(self, *, is_last: bool) -> bool:
        """Whether it is known how the text begins."""
        text = self._text.lstrip()
        has_start = after_start(text, self.start)
        if has_start is None and not is_last:
            return False
        if has_start or self._is_inside:
            opened = text.removeprefix(self.start) if has_start or self.trims else self._text
            labelled = opened.lstrip() if not has_start else opened
            is_labelled = after_start(labelled, self.label)
            if is_labelled is None and not is_last:
                return False
            self._text = labelled.removeprefix(self.label) if is_labelled and self.label else opened
        elif not self.is_assumed:
            self.is_over = True
        self._has_begun = True
        self._has_opened = not self.is_over
        return True

    def _reason(self, *, is_last: bool) -> str:
        place, marker = find_marker(self._text, (self.end, *self.call_openers), is_last=is_last)
        is_held = False
        if marker is not None and marker != self.end:
            end = self._text.find(self.end, place)
            is_held = end < 0 and not is_last
            place, marker = (end, self.end) if end >= 0 else (place, "")
        text = self._held + self._text[:place]
        self._text = self._text[place + len(marker or "") :]
        if not self._has_reasoned and self.trims:
            text = text.lstrip()
        shown = self._without_end(text)
        self._held = text[len(shown) :]
        self._has_reasoned = self._has_reasoned or bool(shown)
        if marker is not None and not is_held:
            self.is_over = self._is_behind = True
        return shown

    def _answer(self, *, is_last: bool) -> str:
        text, self._text = self._text, ""
        if self._is_behind and text:
            text = self._without_start(text)
            self._is_behind = not text and self.trims
        return text

    def _without_end(self, text: str) -> str:
        """`text` without white space that would be part of a following tag."""
        return text.rstrip() if self.trims else text

    def _without_start(self, text: str) -> str:
        """`text`, which follows the tag, without white space that is part of the tag."""
        return text.lstrip() if self.trims else text


class TaggedAnswerParser(TaggedReasoningParser):
    """Parser for models whose answer has tags too, which are dropped."""

    answer_tags: ClassVar[tuple[str, str]]

    def __init__(self, *, prompt: str) -> None:
        super().__init__(prompt=prompt)
        self._has_answered = False
        """Whether it is known if there are tags around the answer."""
        self._is_tagged = False

    def _answer(self, *, is_last: bool) -> str:
        begin, end = self.answer_tags
        if not self._has_answered:
            text = self._text.lstrip()
            has_tag = after_start(text, begin)
            if has_tag is None and not is_last:
                return ""
            self._has_answered, self._held = True, ""
            if has_tag:
                self._text = text.removeprefix(begin)
                self._is_tagged = self._is_behind = True
        if not self._is_tagged:
            return super()._answer(is_last=is_last)
        place, marker = find_marker(self._text, (end,), is_last=is_last)
        text = self._held + self._text[:place]
        self._text = self._text[place + len(marker or "") :]
        if self._is_behind:
            text = text.lstrip()
            self._is_behind = not text
        shown = text if is_last and marker is None else text.rstrip()
        self._held = text[len(shown) :]
        if marker is None:
            return shown
        self._is_tagged = False
        return shown + super()._answer(is_last=is_last)
