"""Constraint formats for arguments that are not a JSON object: Python keyword arguments, or the text of tags."""

import re
from collections.abc import Iterator
from typing import Any

from pagoda_common.errors import InvalidRequest
from pagoda_common.grammar.json_schema import resolved
from pagoda_common.grammar.schema_names import literal_pattern
from pagoda_frontend.tool_parsers import formats
from pagoda_frontend.tool_parsers.formats import Format
from pagoda_frontend.tool_parsers.values import choices_of, typed_value, types_of

_READ = {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema", "$id"}
_ANNOTATIONS = {"title", "description", "default", "examples", "$comment", "strict"}
_WHOLE = re.compile(r"\^[^|<$]*(?<!\\)\$")
"""Patterns that match a whole text, in which nothing can end a value early."""
_PYTHON_ARGUMENTS = r"""([^()"']|"([^"\\]|\\(.|\n))*"|'([^'\\]|\\(.|\n))*'|\([^()"']*\))*"""
"""Arguments of any kind, with calls one level deep."""


def properties_of(name: str, schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """The name, the schema and whether it is required, of each argument.

    Raises:
        InvalidRequest: the schema has other keywords than these; `field` is tools.
    """
    root = schema
    schema = resolved(schema, root)
    if not isinstance(schema, dict) or (unread := schema.keys() - _READ - _ANNOTATIONS):
        raise _refuse(name, f"with {', '.join(sorted(unread))} beside properties")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    for key in required:
        if key not in properties:
            raise _refuse(name, f"with {key!r} required and not among its properties")
    definitions: dict[str, Any] = {key: root[key] for key in ("$defs", "definitions") if key in root}
    for key, part in properties.items():
        if part is False:
            continue
        part = resolved(part, root)
        yield key, {**definitions, **part} if isinstance(part, dict) else {}, key in required


def is_any_object(schema: dict[str, Any]) -> bool:
    """Whether the schema allows any arguments."""
    return schema == {"type": "object"}


def python_call(name: str, schema: dict[str, Any]) -> Format:
    """``name(key=value, …)`` with JSON values, which the parser reads as Python values."""
    if is_any_object(schema):
        return formats.tag(f"{name}(", formats.regex(_PYTHON_ARGUMENTS), ")")
    arguments = sorted(properties_of(name, schema), key=lambda argument: not argument[2])
    for key, _, _ in arguments:
        if not key.isidentifier():
            raise _refuse(name, f"with a property called {key!r}")
    values = [formats.tag(f"{key}=", formats.json_value(part)) for key, part, _ in arguments]
    num_required = sum(is_required for _, _, is_required in arguments)
    return formats.tag(f"{name}(", _separated(values, num_required, separator=", "), ")")


def quoted_arguments(name: str, schema: dict[str, Any], *, quote: str) -> Format:
    """``key:value,…`` with strings between quotes and other values as JSON.

    Args:
        quote: text before and after a string; it begins with <.
    """
    arguments = sorted(properties_of(name, schema), key=lambda argument: not argument[2])
    values = []
    for key, part, _ in arguments:
        if not key or set(key) & set(':,{}[]<"\n') or key != key.strip():
            raise _refuse(name, f"with a property called {key!r}")
        value = _tagged_value(name, key, part, (quote,))
        if isinstance(value, str):
            values.append(formats.tag(f"{key}:{quote}", ended(value, quote)))
        elif value["type"] == "json_schema":
            values.append(formats.tag(f"{key}:", value))
        else:
            values.append(formats.tag(f"{key}:{quote}", value, quote))
    num_required = sum(is_required for _, _, is_required in arguments)
    return _separated(values, num_required, separator=",")


def _separated(values: list[Format], num_required: int, *, separator: str) -> Format:
    """Tags, of which the first are required, with a text between them."""
    later = [formats.tag(f"{separator}{value['begin']}", value["content"], value["end"]) for value in values]

    def rest(start: int) -> list[Format]:
        return [part if place < num_required else formats.optional(part) for place, part in enumerate(later)][start:]

    if num_required:
        return formats.sequence(values[0], *rest(1))
    firsts = [formats.sequence(value, *rest(place + 1)) for place, value in enumerate(values)]
    return formats.one_of(formats.NOTHING, *firsts)


def tagged_arguments(
    name: str,
    schema: dict[str, Any],
    *,
    key_ends: tuple[str, str],
    end: str,
    stops: tuple[str, ...],
    json_key_end: str | None = None,
) -> Format:
    """Arguments as the text of tags.

    Args:
        key_ends: text before a key, and text between key and value.
        json_key_end: text between a key and a JSON value; None if it is the same.
        end: text after a value.
        stops: texts that end a value wherever they occur.
    """
    tags = []
    for key, part, is_required in properties_of(name, schema):
        if set(key) & set("<>\n") or key != key.strip() or not key:
            raise _refuse(name, f"with a property called {key!r}")
        value = _tagged_value(name, key, part, stops)
        is_json = isinstance(value, dict) and value["type"] == "json_schema"
        key_end = json_key_end if json_key_end is not None and is_json else key_ends[1]
        begin = key_ends[0] + key + key_end
        argument = formats.tag(begin, ended(value, end)) if isinstance(value, str) else formats.tag(begin, value, end)
        tags.append(argument if is_required else formats.optional(argument))
    return formats.sequence(*tags) if tags else formats.NOTHING


def ended(pattern: str, end: str) -> Format:
    """`pattern` and `end` as one pattern, because a matcher misses the end where `pattern` may match its beginning."""
    return formats.regex(f"({pattern}){literal_pattern(end)}")


def _tagged_value(name: str, key: str, schema: dict[str, Any], stops: tuple[str, ...]) -> Format | str:
    """The format of a value's text, which `typed_value` can read again, or its pattern."""
    types = types_of(schema)
    asked = schema.keys() - _ANNOTATIONS - {"type", "$defs", "definitions"}
    values = choices_of(schema)
    is_text = not types - {"null"} or types == {"string"}
    if is_text and isinstance(values, list):
        spelled = [value for value in values if isinstance(value, str) and typed_value(value, schema) == value]
        spelled = [value for value in spelled if value and not any(stop in value for stop in stops)]
        if not spelled:
            raise _refuse(name, f"with the values of {key!r}")
        return formats.one_of(*map(formats.text, spelled))
    if types <= {"string", "null"} and not asked - {"anyOf"} and _are_plain(schema.get("anyOf", [])):
        return f"{text_without(stops)}*"
    if not is_text:
        return formats.json_value(schema)
    if asked <= {"minLength", "maxLength"}:
        return f"[^<]{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}"
    pattern = schema.get("pattern")
    if asked == {"pattern"} and isinstance(pattern, str) and _WHOLE.fullmatch(pattern):
        return pattern[1:-1]
    raise _refuse(name, f"with {', '.join(sorted(asked))} of {key!r}")


def _are_plain(branches: Any) -> bool:
    return all(isinstance(part, dict) and part.keys() - _ANNOTATIONS <= {"type"} for part in branches)


def text_without(stops: tuple[str, ...]) -> str:
    """A pattern of text without any of `stops`, which begin with <."""
    words = [stop[1:] for stop in stops]
    beginnings = sorted({word[:size] for word in words for size in range(len(word))})
    others = []
    for beginning in beginnings:
        following = {word[len(beginning)] for word in words if word.startswith(beginning) and word != beginning}
        others.append(f"{literal_pattern(beginning)}[^{''.join(map(literal_pattern, sorted({*following, '<'})))}]")
    return f"([^<]|<+({'|'.join(others)}))"


def _refuse(name: str, what: str) -> InvalidRequest:
    advice = "use tool_choice required, or name the tool"
    message = f"tools: {name!r} cannot be strict in this model's call format, {what}: {advice}"
    return InvalidRequest(message[:500], field="tools")
