"""Rewrites JSON schemas into forms that llguidance can guarantee: for the same documents, or fewer if requested."""

from collections.abc import Callable
from itertools import combinations, permutations
from math import perm
from typing import Any

VALUES = ("const", "enum", "default", "examples")
"""Keywords that hold values, not schemas."""
MAX_BRANCHES = 64
"""Branches of a oneOf that are compared with each other."""
MAX_HOPS = 16
"""References followed to find what a branch is."""


MAX_SET_VALUES = 7
"""Values that unique items are chosen from; 128 lists in one order."""
MAX_LISTS = 128
_FOURTH = "(0[48]|[2468][048]|[13579][26])"
_LEAP_DAY = f"([0-9]{{2}}{_FOURTH}|{_FOURTH}00)-02-29"
_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"
_DATE = f"({_LEAP_DAY}|{_YEAR}-(02-([01][0-9]|2[0-8])|(0[13-9]|1[0-2])-[0-3][0-9]))"
_TIME = "[0-9]{2}:[0-9]{2}:[0-5][0-9]"
FORMATS: dict[str, dict[str, Any]] = {
    "date": {"pattern": f"^{_DATE}$"},
    "date-time": {"pattern": f"^{_DATE}[Tt]{_TIME}", "maxLength": 35},
    "time": {"pattern": f"^{_TIME}", "maxLength": 25},
    "duration": {"maxLength": 40},
    "email": {"maxLength": 64},
    "hostname": {"maxLength": 64},
    "uri": {"maxLength": 256},
}
"""What is added to a format where its schema says neither maxLength nor pattern: an end to digits and labels, and what
llguidance leaves open: the days that a February has, the year 0, leap seconds."""
DECIMAL = 1e-10
"""Numbers between two bounds are multiples of this unless their schema says otherwise; nothing finer compiles."""
LEAST_BOUND = 1e-3
"""Numbers with smaller bounds than this may need more digits."""


def with_listed_sets(schema: Any) -> Any:
    """`schema` with each list of unique items out of few values as an enumeration of lists.

    Where they are too many, in the order of the values only: what is unique is meant as a set.
    """

    def enumerate_lists(part: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(part.get("uniqueItems"), bool):
            return part
        rest = {name: value for name, value in part.items() if name != "uniqueItems"}
        least, most = part.get("minItems", 0), part.get("maxItems", MAX_SET_VALUES)
        if not part["uniqueItems"] or most == 1:
            return rest
        values = _set_values(resolved(part.get("items"), schema))
        if values is None or part.get("type") != "array" or not (isinstance(least, int) and isinstance(most, int)):
            return part
        sizes = range(least, min(most, len(values)) + 1)
        choose = permutations if sum(perm(len(values), size) for size in sizes) <= MAX_LISTS else combinations
        lists = [list(chosen) for size in sizes for chosen in choose(values, size)]
        kept = {name: value for name, value in rest.items() if name not in ("type", "items", "minItems", "maxItems")}
        return {**kept, "enum": lists}

    return rewritten(schema, enumerate_lists)


def _set_values(items: Any) -> list[Any] | None:
    """The values of `items` when they are few and nothing but values."""
    if not isinstance(items, dict):
        return None
    asked = items.keys() - {"title", "description", "default"}
    low, high = items.get("minimum"), items.get("maximum")
    if asked == {"type", "minimum", "maximum"} and items["type"] == "integer":
        if not (isinstance(low, int) and isinstance(high, int)) or high - low >= MAX_SET_VALUES:
            return None
        return list(range(low, high + 1))
    if not asked <= {"type", "enum", "const"}:
        return None
    values = [True, False] if asked == {"type"} and items["type"] == "boolean" else _values(items)
    if values is None or len(values) > MAX_SET_VALUES:
        return None
    types = _types({"type": items["type"]}) if "type" in items else None
    fitting = [value for value in values if types is None or type_of(value) in types]
    return [value for place, value in enumerate(fitting) if value not in fitting[:place]]


def with_ends(schema: Any) -> Any:
    """`schema` without the endless forms of a value: seconds with a thousand digits, 0.500000…

    A model that is unsure repeats itself, and would continue to its last allowed token.
    """

    def shorten(part: dict[str, Any]) -> dict[str, Any]:
        kinds = part.get("type")
        name = part.get("format")
        if isinstance(name, str) and name in FORMATS and "maxLength" not in part and "pattern" not in part:
            return {**part, **FORMATS[name]}
        if (kinds == "number" or (isinstance(kinds, list) and "number" in kinds)) and "multipleOf" not in part:
            low: Any = part.get("minimum", part.get("exclusiveMinimum"))
            high: Any = part.get("maximum", part.get("exclusiveMaximum"))
            if all(isinstance(bound, int | float) for bound in (low, high)) and max(abs(low), abs(high)) > LEAST_BOUND:
                return {**part, "multipleOf": DECIMAL}
        return part

    return rewritten(schema, shorten)


def without_additional_properties(schema: Any) -> Any:
    """`schema` with additionalProperties false in every object that names properties and does not say."""

    def close(part: dict[str, Any]) -> dict[str, Any]:
        return {"additionalProperties": False, **part} if isinstance(part.get("properties"), dict) else part

    return rewritten(schema, close)


def with_any_of(schema: Any) -> Any:
    """`schema` with anyOf in the place of each oneOf whose branches exclude each other."""

    def replace(part: dict[str, Any]) -> dict[str, Any]:
        branches = part.get("oneOf")
        if not isinstance(branches, list) or len(branches) > MAX_BRANCHES or "anyOf" in part:
            return part
        targets = [resolved(branch, schema) for branch in branches]
        if not all(are_disjoint(one, other, schema) for one, other in combinations(targets, 2)):
            return part
        return {**{name: value for name, value in part.items() if name != "oneOf"}, "anyOf": branches}

    return rewritten(schema, replace)


def rewritten(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """`schema` with `change` made to each schema in it, the innermost first."""
    if isinstance(schema, list):
        return [rewritten(part, change) for part in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {}
    for name, part in schema.items():
        if name in ("properties", "patternProperties", "$defs", "definitions") and isinstance(part, dict):
            inner[name] = {key: rewritten(value, change) for key, value in part.items()}
        else:
            inner[name] = part if name in VALUES else rewritten(part, change)
    return change(inner)


def resolved(schema: Any, root: Any) -> Any:
    """The schema in `root` to which `schema` refers; `schema` itself if it is not a plain reference."""
    for _ in range(MAX_HOPS):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str) or not reference.startswith("#"):
            return schema
        schema = target(reference, root)
    return None


def target(reference: str, root: Any) -> Any:
    """The part of `root` that `reference` names; None where there is none."""
    if not reference.startswith("#"):
        return None
    part = root
    for step in reference[1:].split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if not isinstance(part, dict) or key not in part:
            return None
        part = part[key]
    return part


def are_disjoint(one: Any, other: Any, root: Any) -> bool:
    """Whether certainly no document fits both."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    own, others = _values(one), _values(other)
    if own is not None and others is not None:
        return not any(value == another for value in own for another in others)
    types, other_types = _types(one), _types(other)
    if types and other_types and not types & other_types:
        return True
    if types != {"object"} or other_types != {"object"}:
        return False
    if _forbids(one, _required(other)) or _forbids(other, _required(one)):
        return True
    shared = _required(one) & _required(other)
    return any(
        are_disjoint(_property(one, name, root), _property(other, name, root), root)
        for name in shared
        if _values(_property(one, name, root)) is not None and _values(_property(other, name, root)) is not None
    )


def _forbids(schema: dict[str, Any], names: set[str]) -> bool:
    """Whether an object under `schema` is without one of `names`."""
    properties = schema.get("properties", {})
    if not isinstance(properties, dict):
        return False
    is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    return any(properties[name] is False if name in properties else is_closed for name in names)


def _property(schema: dict[str, Any], name: str, root: Any) -> Any:
    properties = schema.get("properties")
    return resolved(properties.get(name), root) if isinstance(properties, dict) else None


def _required(schema: dict[str, Any]) -> set[str]:
    names = schema.get("required")
    return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()


def _values(schema: Any) -> list[Any] | None:
    """The values that `schema` allows, where it lists them."""
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _types(schema: dict[str, Any]) -> set[str]:
    """The types that `schema` allows, integers as numbers; empty when it does not say."""
    values, kinds = _values(schema), schema.get("type")
    if values is not None:
        return {type_of(value) for value in values}
    names = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else []
    return {"number" if name == "integer" else str(name) for name in names}


def type_of(value: Any) -> str:
    match value:
        case bool():
            return "boolean"
        case None:
            return "null"
        case int() | float():
            return "number"
        case str():
            return "string"
    return "array" if isinstance(value, list) else "object"
