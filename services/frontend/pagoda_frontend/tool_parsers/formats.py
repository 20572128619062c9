"""Builds structural tags for texts in which a model may call tools, with calls that match their schemas.

A format is the input of `pagoda_common.grammar.structural_tag`. Each dialect has its own; shared parts are here.
"""

from collections.abc import Iterable, Mapping
from typing import Any

Format = dict[str, Any]
Schemas = Mapping[str, dict[str, Any]]
NOTHING: Format = {"type": "regex", "pattern": "()"}


def text(value: str) -> Format:
    """The text `value`."""
    return {"type": "const_string", "value": value}


def regex(pattern: str) -> Format:
    """A constraint that matches `pattern` as a whole."""
    return {"type": "regex", "pattern": pattern}


def json_value(schema: Any) -> Format:
    """A JSON text that matches the schema."""
    return {"type": "json_schema", "json_schema": schema}


def sequence(*elements: Format) -> Format:
    """The formats one after the other."""
    return {"type": "sequence", "elements": list(elements)}


def one_of(*elements: Format) -> Format:
    """Any one of the formats."""
    return {"type": "or", "elements": list(elements)}


def tag(begin: str, content: Format, end: str | list[str] = "") -> Format:
    """`content` between `begin` and one of the ends."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def listed(tags: Iterable[Format], *, separator: str, is_parallel: bool) -> Format:
    """At least one of `tags`; more where calls may be parallel."""
    many = {"type": "tags_with_separator", "tags": list(tags), "separator": separator}
    return {**many, "at_least_one": True, "stop_after_first": not is_parallel}


def optional(format_: Format) -> Format:
    """`format_` (a tag) or nothing."""
    return {"type": "tags_with_separator", "tags": [format_], "separator": "", "stop_after_first": True}


def triggered(*triggers: str, tags: Iterable[Format], is_parallel: bool) -> Format:
    """Free text in which a trigger must continue as one of `tags`."""
    free = {"type": "triggered_tags", "triggers": list(triggers), "tags": list(tags)}
    return {**free, "stop_after_first": not is_parallel}


def at_the_beginning(calls: Format, *, plain: str, marker: str) -> Format:
    """Either calls as the whole text, or text that does not begin like a call.

    Args:
        plain: pattern of the first characters of text that is not a call.
        marker: text that may precede calls anywhere.
    """
    marked = tag(marker, calls)
    free = triggered(marker, tags=[marked], is_parallel=False)
    return one_of(calls, marked, regex(r"\s*"), sequence(regex(rf"\s*({plain})"), free))


def array_schema(schemas: Schemas, *, is_parallel: bool, arguments: str = "parameters") -> dict[str, Any]:
    """An array of calls, whose `arguments` are under that name.

    Each tool's schema becomes a definition, and references within it are rewritten to point there.
    """
    calls, definitions = [], {}
    for place, (name, schema) in enumerate(schemas.items()):
        root = f"#/$defs/tool{place}"
        definitions[f"tool{place}"] = _moved(schema, root)
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, arguments: {"$ref": root}},
                "required": ["name", arguments],
                "additionalProperties": False,
            }
        )
    array = {"type": "array", "items": {"anyOf": calls}, "minItems": 1, "$defs": definitions}
    return array if is_parallel else {**array, "maxItems": 1}


def _moved(node: Any, root: str) -> Any:
    """`node` with references from the top rewritten as references from `root`."""
    if isinstance(node, list):
        return [_moved(item, root) for item in node]
    if not isinstance(node, dict):
        return node
    moved = {key: _moved(value, root) for key, value in node.items()}
    reference = node.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        moved["$ref"] = root + reference[1:]
    return moved
