"""Values that models write without JSON, read as the tool's schema says, and JSON that is safe to send on."""

import json
from typing import Any


def types_of(schema: Any) -> set[str]:
    """The types that `schema` allows, as far as it says so by itself; empty when it does not."""
    if not isinstance(schema, dict):
        return set()
    kind = schema.get("type")
    types = {kind} if isinstance(kind, str) else {name for name in kind if isinstance(name, str)} if kind else set()
    for name in ("anyOf", "oneOf", "allOf"):
        for part in schema.get(name) or ():
            types |= types_of(part)
    if not types and isinstance(schema.get("enum"), list):
        types = {"string" if isinstance(value, str) else "integer" for value in schema["enum"]}
    if not types and "$ref" in schema:
        types = {"object"}
    return types


def typed_value(text: str, schema: Any) -> Any:
    """`text` as the value that it stands for: JSON where the schema wants something else than a string."""
    types = types_of(schema)
    if not types - {"null"} or types == {"string"}:
        return text
    if "null" in types and text.strip().lower() in ("null", "none"):
        return None
    if "boolean" in types and text.strip().lower() in ("true", "false"):
        return text.strip().lower() == "true"
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text
    if isinstance(value, float) and value.is_integer() and "number" not in types:
        value = int(value)
    if "integer" in types:
        types.add("number")
    return text if "string" in types and _type_name(value) not in types else value


def json_text(value: Any) -> str:
    """`value` as JSON that can be written as UTF-8.

    Raises:
        TypeError: it cannot be written as JSON.
        ValueError: it has a number without end.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if is_utf8(text) else json.dumps(value, allow_nan=False)


def is_utf8(text: str) -> bool:
    """Whether `text` has no half of a surrogate pair, which JSON's escapes can write."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")


def _type_name(value: Any) -> str:
    match value:
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case dict():
            return "object"
    return "null"
