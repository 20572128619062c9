"""Random JSON schemas of the keywords that people write: each a function of its seed."""

from random import Random
from typing import Any

NAMES = ("a", "b", "ab", "id", "käse", "a b", "$ref", "")
WORDS = ("x", "yes", "no", "a", "ab", 'q"', "ü", "")
PATTERNS = ("^[a-z]{1,4}$", "^a", "b$", "x", "^(yes|no)$", r"^\d+$", "^[A-Z][0-9]{2}$", "^a.*b$", "^$")
NAME_PATTERNS = ("^a", "^ab?$", "^x-", "b$", "^(a|b|c)$", r"^\d+$")
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email", "uri", "hostname", "unknown")
Schema = dict[str, Any]


class SchemaMaker:
    """Draws schemas out of one source of chance."""

    def __init__(self, draw: Random) -> None:
        self._draw = draw
        self._has_definitions = draw.random() < 0.2

    def root(self) -> Schema:
        """A whole schema."""
        schema = self.schema(self._draw.choice((1, 2, 2, 3)))
        schema = schema if isinstance(schema, dict) else {}
        if self._has_definitions:
            schema["$defs"] = {"node": self._object(1), "leaf": self._scalar()}
        return schema

    def schema(self, depth: int) -> Any:
        """A part of at most `depth` levels."""
        draw = self._draw
        if draw.random() < 0.05:
            return True
        if self._has_definitions and draw.random() < 0.2:
            return {"$ref": f"#/$defs/{draw.choice(('node', 'leaf'))}"}
        if depth <= 0 or draw.random() < 0.25:
            return self._scalar()
        kinds = (self._object, self._object, self._array, self._any_of, self._all_of, self._logic, self._typeless)
        return draw.choice(kinds)(depth - 1)

    def _some(self, keywords: dict[str, Any], chance: float = 0.35) -> Schema:
        """Some of `keywords`; each value is made when it is wanted."""
        return {name: make() for name, make in keywords.items() if self._draw.random() < chance}

    def _scalar(self) -> Schema:
        draw = self._draw
        kinds = (self._string, self._number, self._values)
        if draw.random() < 0.2:
            return {"type": draw.choice(("boolean", "null", ["string", "null"], ["integer", "boolean"]))}
        return draw.choice(kinds)()

    def _string(self) -> Schema:
        draw = self._draw
        if draw.random() < 0.3:
            return {"type": "string", "format": draw.choice(FORMATS)}
        low = draw.randrange(4)
        return {"type": "string"} | self._some(
            {
                "minLength": lambda: low,
                "maxLength": lambda: low + draw.randrange(5),
                "pattern": lambda: draw.choice(PATTERNS),
            },
        )

    def _number(self) -> Schema:
        draw = self._draw
        low = draw.choice((0, 1, -5, 0.5, -0.25, 100))
        bounds = self._some(
            {
                draw.choice(("minimum", "exclusiveMinimum")): lambda: low,
                draw.choice(("maximum", "exclusiveMaximum")): lambda: low + draw.choice((0, 1, 2.5, 10, 1000)),
                "multipleOf": lambda: draw.choice((1, 2, 5, 0.5, 0.1)),
            }
        )
        return {"type": draw.choice(("integer", "number"))} | bounds

    def _values(self) -> Schema:
        draw = self._draw
        values: list[Any] = [*WORDS, 1, 2, 1.5, -3, True, False, None, [], [1], {}, {"a": 1}, {"a": ["x"]}]
        if draw.random() < 0.3:
            return {"const": draw.choice(values)}
        return {"enum": draw.sample(values, draw.randrange(1, 5))}

    def _object(self, depth: int) -> Schema:
        draw = self._draw
        names = draw.sample(NAMES, draw.randrange(4))
        keywords = {
            "required": lambda: draw.sample([*names, "other"], draw.randrange(len(names) + 1)),
            "additionalProperties": lambda: draw.choice((False, False, True, self.schema(depth - 1))),
            "patternProperties": lambda: {draw.choice(NAME_PATTERNS): self.schema(depth - 1)},
        }
        rare = {
            "minProperties": lambda: draw.randrange(3),
            "maxProperties": lambda: draw.randrange(4),
            "propertyNames": lambda: draw.choice(({"pattern": "^[a-z]+$"}, {"enum": ["a", "b"]}, {"maxLength": 3})),
            "dependentRequired": lambda: {draw.choice(NAMES): draw.sample(NAMES, 1)},
        }
        properties = {name: self.schema(depth) for name in names}
        parts = self._some(keywords) | self._some(rare, 0.08)
        return {"type": "object", "properties": properties} | parts

    def _array(self, depth: int) -> Schema:
        draw = self._draw
        low = draw.randrange(3)
        keywords = {
            "items": lambda: self.schema(depth),
            "prefixItems": lambda: [self.schema(depth) for _ in range(draw.randrange(1, 3))],
            "minItems": lambda: low,
            "maxItems": lambda: low + draw.randrange(3),
        }
        rare = {"contains": lambda: self.schema(depth - 1), "uniqueItems": lambda: True}
        return {"type": "array"} | self._some(keywords, 0.5) | self._some(rare, 0.08)

    def _any_of(self, depth: int) -> Schema:
        draw = self._draw
        branches = [self.schema(depth) for _ in range(draw.randrange(1, 4))]
        return {draw.choice(("anyOf", "oneOf")): branches}

    def _all_of(self, depth: int) -> Schema:
        make = self._draw.choice((self._object, self._object, self._array, lambda _: self._scalar()))
        return {"allOf": [make(depth), make(depth)]}

    def _logic(self, depth: int) -> Schema:
        base = self._object(depth)
        extra: list[dict[str, Any]] = [
            {"not": {"required": [self._draw.choice(NAMES)]}},
            {"if": self._object(0), "then": self._object(0)},
            {"if": {"required": ["a"]}, "then": {"required": ["b"]}, "else": {"required": ["ab"]}},
            {"anyOf": [self._object(0), {"required": [self._draw.choice(NAMES)]}]},
            {"unevaluatedProperties": False},
        ]
        return base | self._draw.choice(extra)

    def _typeless(self, depth: int) -> Schema:
        parts = self._object(depth) | self._array(depth) | self._string()
        del parts["type"]
        names = self._draw.sample(sorted(parts), min(len(parts), 3))
        return {name: parts[name] for name in names}


def random_schema(seed: int) -> Schema:
    """The schema of a seed."""
    return SchemaMaker(Random(f"schema {seed}")).root()
