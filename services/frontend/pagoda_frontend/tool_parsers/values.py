"""Reads values that models write without JSON by the tool's schema, and writes JSON that is safe to send."""

import json
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from pagoda_common.grammar.json_schema import resolved
from pagoda_frontend.tool_parsers.python_text import read_python

MAX_DEPTH = 200
"""Maximum nesting of arrays and objects in a value, and of schemas within schemas."""
MAX_WHOLE_DIGITS = 400
"""Maximum exponent of a number that is written out as an integer."""
_ALL_TYPES = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))


@dataclass(frozen=True, slots=True)
class Digits:
    """A number in JSON's spelling, as it was written: every digit stays."""

    text: str


def types_of(schema: Any, root: Any = None, *, depth: int = 0) -> set[str]:
    """The types that `schema` allows, by any keyword; empty if it does not say.

    Args:
        root: schema that references start from; None means `schema` itself.
    """
    root = schema if root is None else root
    schema = resolved(schema, root)
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return set()
    said = []
    kind = schema.get("type")
    if kind:
        said.append({kind} if isinstance(kind, str) else {name for name in kind if isinstance(name, str)})
    choices = choices_of(schema)
    if choices is not None:
        said.append({type_name(value) for value in choices})
    said += [_union(schema.get(name) or (), root, depth + 1) for name in ("anyOf", "oneOf")]
    said += [types_of(part, root, depth=depth + 1) for part in schema.get("allOf") or ()]
    said = [types for types in said if types]
    types = set.intersection(*said) or set.union(*said) if said else _implied(schema)
    return types | {"null"} if types and schema.get("nullable") is True else types


def _union(parts: Any, root: Any, depth: int) -> set[str]:
    types: set[str] = set()
    for part in parts:
        types |= types_of(part, root, depth=depth)
    return types


def choices_of(schema: dict[str, Any]) -> list[Any] | None:
    """The values that `schema` lists; None when it lists none."""
    if "const" in schema:
        return [schema["const"]]
    choices = schema.get("enum")
    return choices if isinstance(choices, list) else None


def _implied(schema: dict[str, Any]) -> set[str]:
    """By keyword: the type that it applies to."""
    if "properties" in schema:
        return {"object"}
    return {"array"} if "items" in schema or "prefixItems" in schema else set()


def typed_value(text: str, schema: Any, root: Any = None, *, reads_untyped: bool = False) -> Any:
    """The value of `text`: JSON or Python notation, unless the schema wants a string. Numbers are `Digits`. Text that
    does not fit the schema stays a string.

    Args:
        root: schema that references start from.
        reads_untyped: without a type in the schema, read JSON; else such a value is a string.
    """
    types = types_of(schema, root)
    if not types and reads_untyped:
        types = set(_ALL_TYPES)
    target = resolved(schema, root if root is not None else schema)
    choices = choices_of(target) if isinstance(target, dict) else None
    if not types or types == {"string"} or (choices is not None and text in choices):
        return text
    word = text.strip().lower()
    if word in ("null", "none") and types != _ALL_TYPES and ("null" in types or "string" not in types):
        return None
    if "boolean" in types and word in ("true", "false"):
        return word == "true"
    try:
        value = _read(text, types)
    except (ValueError, RecursionError):
        return text
    kind = type_name(value)
    if kind in types or "string" not in types:
        return value
    return value if kind == "integer" and "number" in types else text


def _read(text: str, types: set[str]) -> Any:
    """Read JSON, or a Python list or dictionary; raises ValueError if it is neither."""
    try:
        value = json_value(text)
    except ValueError:
        if not types & {"array", "object"} or text.strip()[:1] not in ("[", "{", "("):
            raise
        return checked(read_python(text, number=Digits))
    if isinstance(value, Digits) and "integer" in types and "number" not in types:
        return _whole(value)
    return checked(value)


def json_value(text: str) -> Any:
    """The value of a JSON text, with `Digits` for numbers. Strings may have raw line breaks.

    Raises:
        ValueError: it is not JSON.
    """
    return json.loads(text, parse_int=Digits, parse_float=Digits, parse_constant=_refuse, strict=False)


def _whole(number: Digits) -> Digits:
    """Write 3.0 as 3 where the schema wants an integer."""
    value = Decimal(number.text)
    if value.adjusted() > MAX_WHOLE_DIGITS or value != value.to_integral_value():
        return number
    return number if number.text.lstrip("-").isdigit() else Digits(str(int(value)))


def checked(value: Any, depth: int = 0) -> Any:
    """`value`; raises ValueError if it is nested too deeply to be written."""
    if depth > MAX_DEPTH:
        raise ValueError("too deep")
    for part in value if isinstance(value, list) else value.values() if isinstance(value, dict) else ():
        checked(part, depth + 1)
    return value


def json_text(value: Any) -> str:
    """`value` as JSON that can be written as UTF-8.

    Raises:
        TypeError: it cannot be written as JSON.
        ValueError: it has an infinite number or NaN.
    """
    text = _written(value, is_ascii=False)
    return text if is_utf8(text) else _written(value, is_ascii=True)


def _written(value: Any, *, is_ascii: bool) -> str:
    match value:
        case Digits(text):
            return text
        case list():
            return f"[{', '.join(_written(item, is_ascii=is_ascii) for item in value)}]"
        case dict():
            pairs = (
                f"{json.dumps(key, ensure_ascii=is_ascii)}: {_written(part, is_ascii=is_ascii)}"
                for key, part in value.items()
            )
            return f"{{{', '.join(pairs)}}}"
    return json.dumps(value, ensure_ascii=is_ascii, allow_nan=False)


def is_utf8(text: str) -> bool:
    """Whether `text` has no unpaired surrogate, which JSON escapes can produce."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def type_name(value: Any) -> str:
    """The JSON schema type of `value`."""
    match value:
        case bool():
            return "boolean"
        case Digits(text):
            return "integer" if text.lstrip("-").isdigit() else "number"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case dict():
            return "object"
    return "null"


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")
