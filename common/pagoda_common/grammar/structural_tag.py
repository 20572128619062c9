"""Structural tags (free text with constrained parts between tags) as a grammar for llguidance. Knows no tokenizer.

Two shapes are understood, both with type "structural_tag": {"structures": [{"begin", "schema", "end"}], "triggers"} and
{"format": …} with the formats of `_FORMATS`, which nest.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from pagoda_common.errors import InvalidRequest
from pagoda_common.grammar.json_schema import with_ends
from pagoda_common.grammar.lark import lark_of, lark_regex
from pagoda_common.grammar.schema_logic import guaranteed

MAX_FORMATS = 4096
"""Formats in one tag."""


def structural_tag_grammar(text: str, *, special_tokens: Mapping[str, int], json_options: dict[str, Any]) -> str:
    """A structural tag as llguidance's JSON.

    Args:
        text: JSON text of the tag.
        special_tokens: ids by spelling; special tokens are not text to the grammar, so it must name them.
        json_options: llguidance's options for JSON schemas.

    Raises:
        InvalidRequest: the tag is not understood; `field` is structured_outputs.
    """
    tag = json.loads(text)
    if tag.get("type", "structural_tag") != "structural_tag":
        raise _refuse("type", f"must be 'structural_tag', got {tag.get('type')!r}")
    writer = _Writer(special_tokens, json_options)
    if "format" in tag:
        start = writer.format(_object(tag["format"], "format"), "format")
    else:
        start = writer.format(_from_structures(tag), "structures")
    return writer.grammar(start)


def _from_structures(tag: dict[str, Any]) -> dict[str, Any]:
    """The older shape as the newer one."""
    tags = []
    for place, structure in enumerate(_list(tag.get("structures"), "structures")):
        name = f"structures.{place}"
        structure = _object(structure, name)
        content = {"type": "json_schema", "json_schema": structure.get("schema", {})}
        tags.append({"begin": structure.get("begin"), "content": content, "end": structure.get("end", "")})
    return {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}


class _Writer:
    """Rules of one Lark grammar, and grammars beside it."""

    def __init__(self, special_tokens: Mapping[str, int], json_options: dict[str, Any]) -> None:
        self._special_tokens = special_tokens
        names = sorted((re.escape(name) for name in special_tokens), key=len, reverse=True)
        self._special = re.compile("|".join(names)) if names else None
        self._json_options = json_options
        self._rules = ["TEXT: /(.|\\n)*/"]
        self._beside: list[dict[str, str]] = []
        self._num_formats = 0

    def grammar(self, start: str) -> str:
        """Everything, beginning with `start`."""
        lark = "\n".join([f"start: {start}", *self._rules])
        return json.dumps({"grammars": [{"name": "structural_tag", "lark_grammar": lark}, *self._beside]})

    def _rule(self, body: str, options: str = "") -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def _pieces(self, text: str) -> list[str]:
        """`text` as terms, its special tokens by id."""
        pieces, at = [], 0
        for match in self._special.finditer(text) if self._special else ():
            if match.start() > at:
                pieces.append(json.dumps(text[at : match.start()]))
            pieces.append(f"<[{self._special_tokens[match.group()]}]>")
            at = match.end()
        return [*pieces, json.dumps(text[at:])] if at < len(text) else pieces

    def _literal(self, text: str) -> str:
        return " ".join(self._pieces(text)) or '""'

    def _text_until(self, text: str) -> str:
        """Free text up to the first `text`, with it."""
        first, *rest = self._pieces(text)
        head = f"TEXT {first}" if first.startswith("<[") else self._rule(f"TEXT {first}", "[lazy]")
        return " ".join([head, *rest])

    def format(self, value: dict[str, Any], name: str) -> str:
        """The expression of one format."""
        self._num_formats += 1
        if self._num_formats > MAX_FORMATS:
            raise _refuse(name, f"there may be at most {MAX_FORMATS} formats")
        kind = value.get("type")
        write = _FORMATS.get(kind) if isinstance(kind, str) else None
        if write is None:
            raise _refuse(f"{name}.type", f"must be one of {', '.join(_FORMATS)}, got {kind!r}")
        return write(self, value, name)

    def const_string(self, value: dict[str, Any], name: str) -> str:
        return self._literal(_text(value.get("value"), f"{name}.value"))

    def any_text(self, value: dict[str, Any], name: str) -> str:
        return "TEXT"

    def json_schema(self, value: dict[str, Any], name: str) -> str:
        schema = value.get("json_schema", True)
        if isinstance(schema, bool):
            if not schema:
                raise _refuse(f"{name}.json_schema", "must not be false")
            schema = {}
        schema = _object(schema, f"{name}.json_schema")
        try:
            schema = guaranteed(schema)
        except InvalidRequest as error:
            raise _refuse(f"{name}.json_schema", error.message) from None
        schema = {**with_ends(schema), "x-guidance": self._json_options}
        return self._rule(f"%json {json.dumps(schema)}")

    def regex(self, value: dict[str, Any], name: str) -> str:
        pattern = _text(value.get("pattern"), f"{name}.pattern")
        return self._rule(lark_regex(pattern))

    def lark(self, value: dict[str, Any], name: str) -> str:
        grammar = f"g{len(self._beside)}"
        self._beside.append({"name": grammar, "lark_grammar": lark_of(_text(value.get("grammar"), f"{name}.grammar"))})
        return f"@{grammar}"

    def alternatives(self, value: dict[str, Any], name: str) -> str:
        parts = self._elements(value, name)
        options = [self.format(part, f"{name}.elements.{place}") for place, part in enumerate(parts)]
        return self._rule(" | ".join(options))

    def sequence(self, value: dict[str, Any], name: str) -> str:
        """Parts one after the other; free text ends where the text after it begins."""
        parts, terms, place = self._elements(value, name), [], 0
        while place < len(parts):
            part, following = parts[place], parts[place + 1] if place + 1 < len(parts) else None
            if part.get("type") == "any_text" and following is not None:
                terms.append(self._free_text_before(following, f"{name}.elements.{place + 1}"))
                place += 1
            else:
                terms.append(self.format(part, f"{name}.elements.{place}"))
            place += 1
        return self._rule(" ".join(terms))

    def _free_text_before(self, after: dict[str, Any], name: str) -> str:
        if after.get("type") == "const_string":
            return self._text_until(_text(after.get("value"), f"{name}.value"))
        if after.get("type") == "tag":
            return f"{self._text_until(_text(after.get('begin'), f'{name}.begin'))} {self._content(after, name)}"
        raise _refuse(name, "only const_string and tag may follow any_text")

    def _elements(self, value: dict[str, Any], name: str) -> list[dict[str, Any]]:
        elements = _list(value.get("elements"), f"{name}.elements")
        return [_object(part, f"{name}.elements.{place}") for place, part in enumerate(elements)]

    def tag(self, value: dict[str, Any], name: str) -> str:
        begin = _text(value.get("begin"), f"{name}.begin", may_be_empty=True)
        return self._rule(f"{self._literal(begin)} {self._content(value, name)}")

    def _content(self, tag: dict[str, Any], name: str) -> str:
        """Content and end of a tag."""
        content = _object(tag.get("content", {"type": "any_text"}), f"{name}.content")
        ends = tag.get("end", "")
        ends = [_text(end, f"{name}.end", may_be_empty=True) for end in (ends if isinstance(ends, list) else [ends])]
        if content.get("type") == "any_text" and all(ends):
            return self._rule(" | ".join(map(self._text_until, ends)))
        return f"{self.format(content, f'{name}.content')} ({' | '.join(map(self._literal, ends))})"

    def _tags(self, value: dict[str, Any], name: str) -> list[dict[str, Any]]:
        tags = _list(value.get("tags"), f"{name}.tags")
        return [_object(tag, f"{name}.tags.{place}") for place, tag in enumerate(tags)]

    def triggered_tags(self, value: dict[str, Any], name: str) -> str:
        """Free text in which a trigger must continue as one of its tags."""
        tags = self._tags(value, name)
        triggers = [_text(text, f"{name}.triggers") for text in _list(value.get("triggers"), f"{name}.triggers")]
        rests: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        whole = []
        for place, tag in enumerate(tags):
            begin = _text(tag.get("begin"), f"{name}.tags.{place}.begin")
            content = self._rule(self._content(tag, f"{name}.tags.{place}"))
            found = [trigger for trigger in triggers if begin.startswith(trigger)]
            if not found:
                raise _refuse(f"{name}.tags.{place}.begin", f"must begin with one of the triggers, got {begin!r}")
            trigger = max(found, key=len)
            rests[trigger].append(f"{self._literal(begin[len(trigger) :])} {content}")
            whole.append(f"{self._literal(begin)} {content}")
        called = " | ".join(
            f"{self._text_until(trigger)} ({' | '.join(rest)})" for trigger, rest in rests.items() if rest
        )
        first, later = self._rule(" | ".join(whole)), self._rule(called)
        if value.get("stop_after_first"):
            return first if value.get("at_least_one") else self._rule(f"{later} | TEXT")
        return f"{first} {later}* TEXT" if value.get("at_least_one") else f"{later}* TEXT"

    def tags_with_separator(self, value: dict[str, Any], name: str) -> str:
        """Tags with a text between them and nothing else."""
        tags = [self.tag(tag, f"{name}.tags.{place}") for place, tag in enumerate(self._tags(value, name))]
        separator = _text(value.get("separator", ""), f"{name}.separator", may_be_empty=True)
        one = self._rule(" | ".join(tags))
        many = one if value.get("stop_after_first") else self._rule(f"{one} ({self._literal(separator)} {one})*")
        return many if value.get("at_least_one") else f"({many})?"


_FORMATS = {
    "const_string": _Writer.const_string,
    "json_schema": _Writer.json_schema,
    "regex": _Writer.regex,
    "grammar": _Writer.lark,
    "any_text": _Writer.any_text,
    "sequence": _Writer.sequence,
    "or": _Writer.alternatives,
    "tag": _Writer.tag,
    "triggered_tags": _Writer.triggered_tags,
    "tags_with_separator": _Writer.tags_with_separator,
}


def _refuse(name: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"structural_tag.{name} {message}"[:500], field="structured_outputs")


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _refuse(name, f"must be an object, got {value!r}")
    return value


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise _refuse(name, f"must be a list that is not empty, got {value!r}")
    return value


def _text(value: Any, name: str, *, may_be_empty: bool = False) -> str:
    if not isinstance(value, str) or not (value or may_be_empty):
        raise _refuse(name, f"must be a string{'' if may_be_empty else ' that is not empty'}, got {value!r}")
    return value
