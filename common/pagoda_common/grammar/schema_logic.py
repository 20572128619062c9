"""JSON schemas without not, if, contains, propertyNames and their kind: the same demands by allOf and anyOf alone.

llguidance merges allOf and anyOf exactly, and knows nothing of the rest. What fits the result always fits the schema;
where a part of an opposite cannot be written it is left out, and then not all that is valid can be made.
"""

from collections.abc import Callable
from itertools import combinations, islice
from typing import Any

from pagoda_common.errors import InvalidRequest
from pagoda_common.grammar.json_schema import resolved, with_any_of, with_listed_sets
from pagoda_common.grammar.schema_endless import is_endless
from pagoda_common.grammar.schema_integers import with_exact_integers
from pagoda_common.grammar.schema_names import pattern_of_names, with_named_words
from pagoda_common.grammar.schema_opposites import (
    MAX_NESTED,
    MAX_WINDOW,
    Inexpressible,
    Opposites,
    Schema,
    all_of,
    any_of,
    types_but,
)

MAX_PLACEMENTS = 64
MAX_COUNT = 64
"""Items that `minContains` may ask for."""

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMAS = ("items", "additionalItems", "additionalProperties")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SIZES = ("minProperties", "maxProperties")
_CONDITIONS = ("if", "then", "else", "minContains", "maxContains")


def without_logic(schema: Any) -> Any:
    """`schema` with allOf and anyOf in the place of all that llguidance does not know.

    Raises:
        Inexpressible: a keyword cannot be replaced.
    """
    return _Logic(schema).positive(schema, "#")


def guaranteed(schema: Any) -> Any:
    """`schema` in the words that llguidance knows.

    Raises:
        InvalidRequest: it asks for what cannot be guaranteed; the message names keyword and place.
    """
    if is_endless(schema):
        message = "Unsatisfiable schema: each document that fits would hold another one"
        raise InvalidRequest(message, field="structured_outputs")
    try:
        return with_exact_integers(with_named_words(without_logic(with_listed_sets(with_any_of(schema)))))
    except Inexpressible as error:
        raise InvalidRequest(f"cannot be guaranteed: {error}"[:500], field="structured_outputs") from None


class _Logic(Opposites):
    """Rewrites parts of one schema. A path is a JSON pointer, for messages."""

    def positive(self, schema: Any, path: str) -> Any:
        """`schema` in what can be written."""
        if not isinstance(schema, dict):
            return schema
        self._count(path)
        kept: Schema = {}
        extra: list[Any] = []
        for name, part in schema.items():
            if name in _REPLACED:
                extra += self._replaced(name, schema, path)
            elif name in _CONDITIONS:
                continue
            elif name in _SIZES and (sized := self._sized(name, schema, path)) is not None:
                extra.append(sized)
            elif name in _MAPS and isinstance(part, dict):
                kept[name] = {key: self.positive(value, f"{path}/{name}/{key}") for key, value in part.items()}
            elif name in _LISTS and isinstance(part, list):
                kept[name] = [self.positive(value, f"{path}/{name}/{place}") for place, value in enumerate(part)]
            else:
                kept[name] = self.positive(part, f"{path}/{name}") if name in _SCHEMAS else part
        if "oneOf" in kept and (exclusive := self._one_of(schema["oneOf"], path)) is not None:
            del kept["oneOf"]
            extra.append(exclusive)
        if extra:
            before = kept.get("allOf")
            kept["allOf"] = [*(before if isinstance(before, list) else ()), *extra]
        return kept

    def _replaced(self, name: str, schema: Schema, path: str) -> list[Any]:
        try:
            return _REPLACED[name](self, schema, f"{path}/{name}")
        except Inexpressible as error:
            text = str(error)
            raise Inexpressible(text if text.startswith("'") else f"'{name}' at {path}: {text}") from None

    # What takes the place of a keyword.

    def _not(self, schema: Schema, path: str) -> list[Any]:
        return [self.negative(schema["not"], path)]

    def _if(self, schema: Schema, path: str) -> list[Any]:
        """Either the condition and what follows from it, or neither."""
        if "then" not in schema and "else" not in schema:
            return []
        path = path.removesuffix("/if")
        yes = [self.positive(schema["if"], f"{path}/if"), self.positive(schema.get("then", True), f"{path}/then")]
        otherwise = self.positive(schema.get("else", True), f"{path}/else")
        no = [self.negative(schema["if"], f"{path}/if"), otherwise]
        return [any_of([part for part in (all_of(yes), all_of(no)) if part is not False])]

    def _one_of(self, branches: Any, path: str) -> Any | None:
        """Each branch without the others; None when that cannot be said."""
        if not isinstance(branches, list):
            return None
        variants = []
        for place, branch in enumerate(branches):
            parts = [self.positive(branch, f"{path}/oneOf/{place}")]
            for other_place, other in enumerate(branches):
                if other_place == place or self._excludes(branch, other):
                    continue
                try:
                    parts.append(self.negative(other, f"{path}/oneOf/{other_place}"))
                except Inexpressible:
                    return None
            variants.append(all_of(parts))
        return any_of([variant for variant in variants if variant is not False])

    def _contains(self, schema: Schema, path: str) -> list[Any]:
        least, most = schema.get("minContains", 1), schema.get("maxContains")
        return self._counted(schema["contains"], path, least=least, most=most, is_only_array=False)

    def _counted(self, wanted: Any, path: str, *, least: Any, most: Any, is_only_array: bool) -> list[Any]:
        """Arrays with `least` to `most` items that are `wanted`, and unless `is_only_array` all that is no array."""
        if not all(isinstance(bound, int) and bound >= 0 for bound in (least, 0 if most is None else most)):
            raise Inexpressible("minContains and maxContains must be whole numbers")
        if least == 0 and most is None:
            return []
        if least > MAX_COUNT:
            raise Inexpressible(f"minContains is {least}, which is more than {MAX_COUNT}")
        window = max(least, MAX_WINDOW)
        found = self.positive(wanted, path)
        others = True if most is None else self.negative(wanted, path)
        counts = [least] if most is None else range(least, min(most, window) + 1)
        variants: list[Any] = [] if is_only_array else [types_but("array")]
        for count in counts:
            for number, chosen in enumerate(combinations(range(window), count)):
                if number >= MAX_PLACEMENTS:
                    break
                size = chosen[-1] + 1 if chosen else 0
                array: Schema = {"type": "array", "minItems": size}
                if size:
                    array["prefixItems"] = [found if place in chosen else others for place in range(size)]
                if others is not True:
                    array["items"] = others
                variants.append(array)
        return [any_of(variants)]

    def _sized(self, name: str, schema: Schema, path: str) -> Any | None:
        """A schema that counts properties by their names; None if llguidance counts them itself."""
        bound = schema[name]
        names: Schema = {}
        self._looks_at(schema, names, {}, 0)
        required = schema.get("required")
        listed = pattern_of_names(schema.get("propertyNames", True), root=self._root)
        if isinstance(listed, frozenset):
            names = dict.fromkeys(sorted(listed), True)
        names = {key: True for key in names if not isinstance(required, list) or key not in required}
        num_required = len(required) if isinstance(required, list) else 0
        is_closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
        is_closed = is_closed or isinstance(listed, frozenset) or listed is False
        if isinstance(bound, bool) or not isinstance(bound, int):
            return None
        bound -= num_required
        if name == "minProperties":
            if not is_closed and bound - len(names) > 1:
                text = f"'minProperties' at {path} is {schema[name]}: only properties that are named are sure to differ"
                raise Inexpressible(text)
            if bound <= 0 or not names:
                return True if bound <= 0 else None
            if bound > len(names):  # one of any other name is needed as well
                return {"required": list(names), "minProperties": schema[name]}
            return any_of([{"required": list(some)} for some in islice(combinations(names, bound), MAX_PLACEMENTS)])
        if bound < 0:
            return False
        if not names:
            return None
        if bound >= len(names) and is_closed:
            return True
        choices = list(islice(combinations(names, max(0, min(bound, len(names)))), MAX_PLACEMENTS))
        absent: list[Schema] = [{key: key in chosen for key in names} for chosen in choices]
        fixed = dict.fromkeys(required or (), True)
        return any_of([{"properties": fixed | named, "additionalProperties": False} for named in absent])

    def _property_names(self, schema: Schema, path: str) -> list[Any]:
        pattern = pattern_of_names(schema["propertyNames"], root=self._root)
        if pattern is None:
            raise Inexpressible("only type, pattern, lengths, enum, const and their like can be asked of names")
        if isinstance(pattern, bool):
            return [] if pattern else [{"properties": {}, "additionalProperties": False}]
        if isinstance(pattern, frozenset):
            return [{"properties": dict.fromkeys(sorted(pattern), True), "additionalProperties": False}]
        return [{"patternProperties": {pattern: True}, "additionalProperties": False}]

    def _dependencies(self, schema: Schema, path: str) -> list[Any]:
        """Where a property is, so is what it asks for."""
        name = path.rsplit("/", 1)[-1]
        asked = schema[name]
        if not isinstance(asked, dict):
            raise Inexpressible("must be an object")
        parts = []
        for key, demand in asked.items():
            then = {"required": demand} if isinstance(demand, list) else self.positive(demand, f"{path}/{key}")
            parts.append(any_of([{"properties": {key: False}}, all_of([{"required": [key]}, then])]))
        return parts

    def _unevaluated_properties(self, schema: Schema, path: str) -> list[Any]:
        """Closed to all names but those that are looked at: a variant for each branch, which looks at its own."""
        rest = self.positive(schema["unevaluatedProperties"], path)
        if rest is True:
            return []
        variants: list[list[Any]] = [[schema]]
        for name in ("anyOf", "oneOf"):
            branches = schema.get(name)
            if isinstance(branches, list):
                variants = [[*looked_at, branch] for looked_at in variants for branch in branches]
        if "if" in schema:
            ways = [[schema["if"], schema.get("then", True)], [{"not": schema["if"]}, schema.get("else", True)]]
            variants = [[*looked_at, *way] for looked_at in variants for way in ways]
        if len(variants) > MAX_PLACEMENTS:
            raise Inexpressible("there are too many combinations")
        closed = []
        for looked_at in variants:
            names: Schema = {}
            patterns: Schema = {}
            is_open = [self._looks_at(part, names, patterns, 0) for part in looked_at]
            close = {"properties": names, "patternProperties": patterns, "additionalProperties": rest}
            branches = [self.positive(part, path) for part in looked_at[1:]]
            closed.append(all_of([*branches, True if any(is_open) else close]))
        return [any_of(closed)]

    def _looks_at(self, schema: Any, names: Schema, patterns: Schema, depth: int) -> bool:
        """Gather the names that `schema` certainly looks at; whether it looks at all."""
        schema = resolved(schema, self._root)
        if not isinstance(schema, dict) or depth > MAX_NESTED:
            return False
        for keyword, gathered in (("properties", names), ("patternProperties", patterns)):
            if isinstance(schema.get(keyword), dict):
                gathered.update(dict.fromkeys(schema[keyword], True))
        parts = schema.get("allOf")
        inner = [self._looks_at(part, names, patterns, depth + 1) for part in parts] if isinstance(parts, list) else []
        return "additionalProperties" in schema or any(inner)

    def _unevaluated_items(self, schema: Schema, path: str) -> list[Any]:
        rest = self.positive(schema["unevaluatedItems"], path)
        parts = [schema, *(schema.get("allOf") or ())]
        parts = [part for part in (resolved(part, self._root) for part in parts) if isinstance(part, dict)]
        if rest is True or any("items" in part for part in parts):
            return []
        size = max(len(part["prefixItems"]) if isinstance(part.get("prefixItems"), list) else 0 for part in parts)
        return [{"prefixItems": [True] * size, "items": rest}] if size else [{"items": rest}]

    def _unique_items(self, schema: Schema, path: str) -> list[Any]:
        """If an item may have many values, only a tuple of different constants certainly has unique items."""
        if schema["uniqueItems"] is not True:
            return []
        first, most = schema.get("prefixItems"), schema.get("maxItems")
        if not isinstance(first, list) or not (schema.get("items") is False or most == len(first)):
            raise Inexpressible("the items have too many values to tell that none is there twice")
        if not all(self._excludes(one, other) for one, other in combinations(first, 2)):
            raise Inexpressible("two items may be the same")
        return []


_Rule = Callable[[_Logic, Schema, str], list[Any]]
_REPLACED: dict[str, _Rule] = {
    "not": _Logic._not,
    "if": _Logic._if,
    "contains": _Logic._contains,
    "propertyNames": _Logic._property_names,
    "dependentRequired": _Logic._dependencies,
    "dependentSchemas": _Logic._dependencies,
    "dependencies": _Logic._dependencies,
    "unevaluatedProperties": _Logic._unevaluated_properties,
    "unevaluatedItems": _Logic._unevaluated_items,
    "uniqueItems": _Logic._unique_items,
}
