"""The channels of gpt-oss: analysis is reasoning, final is content, a message to a function is a call."""

import re
from collections.abc import Mapping
from typing import Any

from pagoda_frontend.tool_parsers import formats
from pagoda_frontend.tool_parsers.base import ToolParser, after_start, find_marker
from pagoda_frontend.tool_parsers.formats import Format, Schemas

_RECIPIENT = re.compile(r"to=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_HEADS = ("<|start|>", "<|channel|>")
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_MESSAGE = "<|message|>"
MAX_HEADER_CHARS = 1024


class HarmonyParser(ToolParser):
    """``<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>`` and its like."""

    markers = (*_HEADS, *_ENDS, _MESSAGE, "<|constrain|>")
    splits_reasoning = True

    def __init__(self, *, schemas: Mapping[str, dict[str, Any]], tells_calls: bool = True) -> None:
        """`tells_calls`: without it, messages to functions are content."""
        super().__init__(schemas=schemas)
        self._tells_calls = tells_calls
        self._kind = "final"
        self._is_empty = True
        self._state = self._read_head

    @classmethod
    def free_format(cls, schemas: Schemas, *, is_parallel: bool) -> Format:
        """Messages of reasoning and commentary, then the answer or a call; <|call|> ends the text."""
        again, free = "<|end|><|start|>assistant", {"type": "any_text"}
        before = [formats.tag(f"<|channel|>{name}<|message|>", free, again) for name in ("analysis", "commentary")]
        last = [formats.sequence(formats.text("<|channel|>final<|message|>"), free)]
        for name, schema in schemas.items():
            heads = [
                f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
                f"<|channel|>commentary to=functions.{name}<|message|>",
                f" to=functions.{name}<|channel|>commentary <|constrain|>json<|message|>",
                f" to=functions.{name}<|channel|>commentary json<|message|>",
            ]
            last += [formats.tag(head, formats.json_value(schema)) for head in heads]
        many = {"type": "tags_with_separator", "tags": before, "separator": ""}
        return formats.sequence(many, formats.one_of(*last))

    def _advance(self, *, is_last: bool) -> bool:
        return self._state(is_last=is_last)

    def _read_head(self, *, is_last: bool) -> bool:
        """From <|start|> or <|channel|> to <|message|>; a text that begins otherwise is content."""
        verdicts = [after_start(self._text, head) for head in _HEADS]
        if True not in verdicts:
            if None in verdicts and not is_last:
                return False
            self._kind, self._state = "final", self._read_body
            return bool(self._text)
        end = self._text.find(_MESSAGE)
        if end > MAX_HEADER_CHARS or (end < 0 and len(self._text) >= MAX_HEADER_CHARS + len(_MESSAGE)):
            self._read(len(_HEADS[verdicts.index(True)]))
            self._kind, self._state = "final", self._read_body
            return True
        if end < 0:
            if is_last:
                self._text = ""  # the answer was cut off before the message
            return False
        head = self._read(end + len(_MESSAGE))
        recipient, channel = _RECIPIENT.search(head), _CHANNEL.search(head)
        self._is_empty = True
        if self._tells_calls and recipient is not None and recipient[1].startswith("functions."):
            self._kind = "call"
            self._begin(recipient[1].removeprefix("functions."))
        else:
            self._kind = "analysis" if channel is not None and channel[1] == "analysis" else "final"
        self._state = self._read_body
        return True

    def _read_body(self, *, is_last: bool) -> bool:
        place, marker = find_marker(self._text, (*_ENDS, *_HEADS), is_last=is_last)
        text = self._read(place)
        self._is_empty = self._is_empty and not text.strip()
        if self._kind == "call":
            self._argue(text)
        elif self._kind == "analysis":
            self._think(text)
        else:
            self._say(text)
        if marker is None:
            if is_last and self._kind == "call" and self._is_empty:
                self._argue("{}")
                self._is_empty = False
            return False
        if self._kind == "call" and self._is_empty:
            self._argue("{}")
        if marker in _ENDS:
            self._read(len(marker))
        self._state = self._read_head
        return True
