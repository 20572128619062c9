"""Negates JSON schemas: for each keyword, a schema of documents that do not fit it. Knows no grammar."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import combinations, pairwise
from typing import Any

from pagoda_common.grammar.json_schema import are_disjoint, resolved, type_of
from pagoda_common.grammar.schema_names import opposite_of_pattern, opposite_of_words

TYPES = ("null", "boolean", "number", "string", "array", "object")
MAX_PARTS = 20_000
"""Schemas looked at in one rewrite; what is copied counts again."""
MAX_NESTED = 24
"""References followed within each other to find an opposite."""
MAX_WINDOW = 8
"""First items of an array among which one is found that fits, or does not."""

Schema = dict[str, Any]


class Inexpressible(Exception):
    """A schema that cannot be expressed; the text names keyword and place."""


class Opposites(ABC):
    """Opposites of parts of one schema. A path is a JSON pointer, for messages."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._num_parts = 0
        self._num_nested = 0

    @abstractmethod
    def positive(self, schema: Any, path: str) -> Any:
        """`schema` in what can be written."""

    @abstractmethod
    def _counted(self, wanted: Any, path: str, *, least: Any, most: Any, is_only_array: bool) -> list[Any]:
        """Arrays with `least` to `most` items that are `wanted`, and unless `is_only_array` all that is no array."""

    def negative(self, schema: Any, path: str) -> Any:
        """A schema of documents that do not fit `schema`.

        Raises:
            Inexpressible: there are some, and none can be written.
        """
        if isinstance(schema, bool):
            return not schema
        if not isinstance(schema, dict):
            raise Inexpressible(f"{path} is not a schema")
        self._count(path)
        parts: list[Any] = []
        failure: Inexpressible | None = None
        has_more = False
        for name in schema:
            oppose = _OPPOSED.get(name)
            if oppose is None:
                continue
            try:
                found = [part for part in oppose(self, schema, f"{path}/{name}") if part is not False]
                parts += found
                has_more |= bool(found) and name != "type"
            except Inexpressible as error:
                failure = failure or error
        if failure is not None and not has_more:  # documents of another type alone are not what is meant
            raise failure
        return any_of(parts)

    def _count(self, path: str) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise Inexpressible(f"{path}: there are too many combinations")

    def _excludes(self, one: Any, other: Any) -> bool:
        return are_disjoint(resolved(one, self._root), resolved(other, self._root), self._root)

    # The opposite of a keyword: a list of alternatives.

    def _no_reference(self, schema: Schema, path: str) -> list[Any]:
        target = resolved({"$ref": schema["$ref"]}, self._root)
        if target is None or self._num_nested >= MAX_NESTED or (isinstance(target, dict) and "$ref" in target):
            raise Inexpressible(f"{path}: the opposite of what refers to itself cannot be written")
        self._num_nested += 1
        try:
            return [self.negative(target, path)]
        finally:
            self._num_nested -= 1

    def _no_type(self, schema: Schema, path: str) -> list[Any]:
        kinds = schema["type"]
        names = {kinds} if isinstance(kinds, str) else set(kinds)
        if "integer" in names:
            names.add("number")  # that a number has a fraction cannot be asked for
        return [types_but(*names)]

    def _no_value(self, schema: Schema, path: str) -> list[Any]:
        values = [schema["const"]] if path.endswith("/const") else schema["enum"]
        if not isinstance(values, list):
            raise Inexpressible(f"{path} must be a list")
        by_type: dict[str, list[Any]] = {}
        for value in values:
            by_type.setdefault(type_of(value), []).append(value)
        parts: list[Any] = [types_but(*by_type)]
        if "boolean" in by_type:
            parts += [{"const": flag} for flag in (True, False) if flag not in by_type["boolean"]]
        if "string" in by_type:
            pattern = opposite_of_words(by_type["string"])
            if pattern is None:
                raise Inexpressible(f"{path}: there are too many values")
            parts.append({"type": "string", "pattern": pattern})
        if "number" in by_type:
            numbers = sorted(set(by_type["number"]))
            parts.append({"type": "number", "exclusiveMaximum": numbers[0]})
            parts += [{"type": "number", "exclusiveMinimum": a, "exclusiveMaximum": b} for a, b in pairwise(numbers)]
            parts.append({"type": "number", "exclusiveMinimum": numbers[-1]})
        for kind in ("array", "object"):
            if kind in by_type:
                others = [self.negative(_spelled_out(value), path) for value in by_type[kind]]
                parts.append(all_of([{"type": kind}, *others]))
        return parts

    def _no_bound(self, schema: Schema, path: str) -> list[Any]:
        name = path.rsplit("/", 1)[-1]
        kind, opposite, step = _BOUNDS[name]
        bound = schema[name]
        if isinstance(bound, bool) or not isinstance(bound, int | float):
            raise Inexpressible(f"{path} must be a number")
        if step and bound + step < 0:
            return []
        if opposite == "minProperties" and bound + step > 1:
            raise Inexpressible(f"{path}: only properties that are named are sure to differ")
        return [{"type": kind, opposite: bound + step}]

    def _no_pattern(self, schema: Schema, path: str) -> list[Any]:
        pattern = opposite_of_pattern(schema["pattern"])
        if pattern is None:
            raise Inexpressible(f"{path}: the opposite of a pattern cannot be written but of a plain beginning")
        return [{"type": "string", "pattern": pattern}]

    def _no_required(self, schema: Schema, path: str) -> list[Any]:
        return [{"type": "object", "properties": {name: False}} for name in schema["required"]]

    def _no_properties(self, schema: Schema, path: str) -> list[Any]:
        return [
            {"type": "object", "properties": {name: opposite}, "required": [name]}
            for name, part in schema["properties"].items()
            if (opposite := self.negative(part, f"{path}/{name}")) is not False
        ]

    def _no_items(self, schema: Schema, path: str) -> list[Any]:
        if not isinstance(schema["items"], dict | bool):
            raise Inexpressible(f"{path}: the opposite of a list of items cannot be written")
        opposite = self.negative(schema["items"], path)
        first = schema.get("prefixItems")
        start = len(first) if isinstance(first, list) else 0
        return [item_at(place, opposite) for place in range(start, start + MAX_WINDOW) if opposite is not False]

    def _no_first_items(self, schema: Schema, path: str) -> list[Any]:
        opposites = [self.negative(part, f"{path}/{place}") for place, part in enumerate(schema["prefixItems"])]
        return [item_at(place, opposite) for place, opposite in enumerate(opposites) if opposite is not False]

    def _no_contained(self, schema: Schema, path: str) -> list[Any]:
        least, most, parts = schema.get("minContains", 1), schema.get("maxContains"), []
        if least:
            parts += self._counted(schema["contains"], path, least=0, most=least - 1, is_only_array=True)
        if most is not None:
            parts += self._counted(schema["contains"], path, least=most + 1, most=None, is_only_array=True)
        return parts

    def _no_dependencies(self, schema: Schema, path: str) -> list[Any]:
        parts = []
        for key, demand in schema[path.rsplit("/", 1)[-1]].items():
            opposite = self.negative({"required": demand} if isinstance(demand, list) else demand, f"{path}/{key}")
            parts.append(all_of([{"type": "object", "required": [key]}, opposite]))
        return parts

    def _no_condition(self, schema: Schema, path: str) -> list[Any]:
        condition, path = schema["if"], path.removesuffix("/if")
        parts = []
        if "then" in schema:
            parts.append(all_of([self.positive(condition, path), self.negative(schema["then"], f"{path}/then")]))
        if "else" in schema:
            parts.append(all_of([self.negative(condition, path), self.negative(schema["else"], f"{path}/else")]))
        return parts

    def _no_not(self, schema: Schema, path: str) -> list[Any]:
        return [self.positive(schema["not"], path)]

    def _none_of(self, schema: Schema, path: str) -> list[Any]:
        return [all_of([self.negative(part, f"{path}/{place}") for place, part in enumerate(schema["anyOf"])])]

    def _not_all_of(self, schema: Schema, path: str) -> list[Any]:
        return [self.negative(part, f"{path}/{place}") for place, part in enumerate(schema["allOf"])]

    def _not_one_of(self, schema: Schema, path: str) -> list[Any]:
        branches = schema["oneOf"]
        none = all_of([self.negative(part, f"{path}/{place}") for place, part in enumerate(branches)])
        pairs = [pair for pair in combinations(branches, 2) if not self._excludes(*pair)]
        return [none, *(all_of([self.positive(part, path) for part in pair]) for pair in pairs)]

    def _inexpressible(self, schema: Schema, path: str) -> list[Any]:
        raise Inexpressible(f"{path}: its opposite cannot be written")

    def _not_unique(self, schema: Schema, path: str) -> list[Any]:
        return self._inexpressible(schema, path) if schema["uniqueItems"] is True else []


def any_of(parts: list[Any]) -> Any:
    if not parts:
        return False
    return True if any(part is True for part in parts) else parts[0] if len(parts) == 1 else {"anyOf": parts}


def all_of(parts: list[Any]) -> Any:
    parts = [part for part in parts if part is not True and part != {}]
    if not parts:
        return True
    return False if any(part is False for part in parts) else parts[0] if len(parts) == 1 else {"allOf": parts}


def types_but(*names: str) -> Any:
    left = [name for name in TYPES if name not in names]
    return {"type": left} if left else False


def item_at(place: int, schema: Any) -> Schema:
    return {"type": "array", "prefixItems": [*([True] * place), schema], "minItems": place + 1}


def _spelled_out(value: list[Any] | dict[str, Any]) -> Schema:
    """A schema that fits `value` alone, of its parts."""
    if isinstance(value, list):
        if not value:
            return {"type": "array", "maxItems": 0}
        parts = [{"const": part} for part in value]
        return {"type": "array", "prefixItems": parts, "minItems": len(value), "maxItems": len(value)}
    parts_by_name = {name: {"const": part} for name, part in value.items()}
    size = len(value)
    named = {"type": "object", "minProperties": size, "maxProperties": size}
    return {**named, "properties": parts_by_name, "required": list(value)} if value else named


_BOUNDS = {
    "minimum": ("number", "exclusiveMaximum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1),
    "maxProperties": ("object", "minProperties", 1),
}
"""By keyword: the type it speaks of, the keyword of its opposite, and how far that is from it."""

_Rule = Callable[[Opposites, Schema, str], list[Any]]
_OPPOSED: dict[str, _Rule] = {
    "$ref": Opposites._no_reference,
    "$dynamicRef": Opposites._inexpressible,
    "type": Opposites._no_type,
    "const": Opposites._no_value,
    "enum": Opposites._no_value,
    **dict.fromkeys(_BOUNDS, Opposites._no_bound),
    "pattern": Opposites._no_pattern,
    "format": Opposites._inexpressible,
    "multipleOf": Opposites._inexpressible,
    "required": Opposites._no_required,
    "properties": Opposites._no_properties,
    "patternProperties": Opposites._inexpressible,
    "additionalProperties": Opposites._inexpressible,
    "propertyNames": Opposites._inexpressible,
    "unevaluatedProperties": Opposites._inexpressible,
    "unevaluatedItems": Opposites._inexpressible,
    "items": Opposites._no_items,
    "prefixItems": Opposites._no_first_items,
    "contains": Opposites._no_contained,
    "uniqueItems": Opposites._not_unique,
    "dependentRequired": Opposites._no_dependencies,
    "dependentSchemas": Opposites._no_dependencies,
    "dependencies": Opposites._no_dependencies,
    "if": Opposites._no_condition,
    "not": Opposites._no_not,
    "anyOf": Opposites._none_of,
    "allOf": Opposites._not_all_of,
    "oneOf": Opposites._not_one_of,
}
