"""Finds stop strings in text that arrives in pieces, and holds back text that may become one. Knows no tokens."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopStringResult:
    """Text to output now."""

    text: str
    """Text that is certain: free of stop strings, and not the beginning of one."""
    stop_string: str | None = None
    """The stop string that was met; nothing comes after it."""


class StopStrings:
    """The stop strings of one sequence.

    The one that is complete first wins, so the result is the same however the text is cut into pieces; of two that end
    at the same character, the one named first.
    """

    def __init__(self, stop_strings: Sequence[str], *, include_in_output: bool = False) -> None:
        self._stop_strings = tuple(stop_strings)
        self._include_in_output = include_in_output
        self._held = ""

    def append(self, text: str) -> StopStringResult:
        """Take the next text."""
        if not text:
            return StopStringResult("")
        text = self._held + text
        found: tuple[int, str] | None = None
        for stop_string in self._stop_strings:
            start = text.find(stop_string)
            if start >= 0 and (found is None or start + len(stop_string) < found[0]):
                found = start + len(stop_string), stop_string
        if found is not None:
            end, stop_string = found
            self._held = ""
            return StopStringResult(text[: end if self._include_in_output else end - len(stop_string)], stop_string)
        start = min((self._beginning(text, stop_string) for stop_string in self._stop_strings), default=len(text))
        self._held = text[start:]
        return StopStringResult(text[:start])

    def flush(self) -> str:
        """The sequence has ended without a stop string: returns what was held back."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _beginning(text: str, stop_string: str) -> int:
        """Where a proper beginning of `stop_string` stands at the end of `text`; len(text) if none does."""
        start = text.find(stop_string[0], max(0, len(text) - len(stop_string) + 1))
        while start >= 0:
            if stop_string.startswith(text[start:]):
                return start
            start = text.find(stop_string[0], start + 1)
        return len(text)
