"""Many JSON schemas, the same ones every time: every keyword that structured outputs know, nested in each other.

What they describe is bounded (strings, lists, numbers), so that an output under them ends.
"""

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]
NAMES = [
    "name",
    "age",
    "größe",
    "名前",
    "with space",
    'quo"te',
    "back\\slash",
    "emoji 😀",
    "a/b",
    "$id",
    "tab\tkey",
    "",
]
PATTERNS = ["^[A-Z]{2}-\\d{3}$", "^(cat|dog)s?$", "^\\w{1,8}$", '^[^\\s"]{2,5}$', "^a+b?$", "^(\\d{1,2}/){2}\\d{4}$"]
FORMATS = ["date", "time", "date-time", "ipv4", "uuid", "email", "duration"]
TEXTS = ["red", "grün", "blå 🌊", "it's", 'a "b"', "line\nbreak", "x" * 20]


class SchemaMaker:
    """Draws one schema after the other from a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._definitions: dict[str, Schema] = {}

    def schema(self) -> Schema:
        """The next one."""
        self._definitions = {}
        kind = self._random.choice([self._object, self._object, self._object, self._array, self._any])
        made = kind(3)
        return {**made, "$defs": self._definitions} if self._definitions else made

    def _any(self, depth: int) -> Schema:
        leaves: list[Callable[[int], Schema]] = [
            self._string,
            self._pattern,
            self._format,
            self._integer,
            self._number,
            self._multiple,
            self._enum,
            self._const,
            self._simple,
        ]
        branches = [
            self._object,
            self._array,
            self._set,
            self._tuple,
            self._any_of,
            self._one_of,
            self._all_of,
            self._reference,
        ]
        return self._random.choice(leaves + branches if depth > 0 else leaves)(depth)

    def _string(self, depth: int) -> Schema:
        low = self._random.randint(0, 3)
        return {"type": "string", "minLength": low, "maxLength": low + self._random.randint(0, 9)}

    def _pattern(self, depth: int) -> Schema:
        pattern = self._random.choice(PATTERNS)
        return (
            {"type": "string", "pattern": pattern, "maxLength": 12}
            if "+" in pattern
            else {
                "type": "string",
                "pattern": pattern,
            }
        )

    def _format(self, depth: int) -> Schema:
        return {"type": "string", "format": self._random.choice(FORMATS)}

    def _integer(self, depth: int) -> Schema:
        low = self._random.randint(-500, 500)
        bounds = self._random.choice([("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")])
        return {"type": "integer", bounds[0]: low, bounds[1]: low + self._random.randint(2, 900)}

    def _number(self, depth: int) -> Schema:
        return {
            "type": "number",
            "minimum": self._random.choice([-1, 0, 0.5]),
            "maximum": self._random.choice([1, 99.5]),
        }

    def _multiple(self, depth: int) -> Schema:
        return {"type": "integer", "multipleOf": self._random.choice([2, 5, 10]), "minimum": 0, "maximum": 1000}

    def _enum(self, depth: int) -> Schema:
        values = [*TEXTS, 1, -2.5, True, None, [1, "a"], {"k": "v"}]
        return {"enum": self._random.sample(values, self._random.randint(1, 5))}

    def _const(self, depth: int) -> Schema:
        return {"const": self._random.choice([*TEXTS, 7, False, {"a": [1, {"b": "ü"}]}])}

    def _simple(self, depth: int) -> Schema:
        return self._random.choice([{"type": "boolean"}, {"type": "null"}, {"type": ["boolean", "null"]}])

    def _object(self, depth: int) -> Schema:
        names = self._random.sample(NAMES, self._random.randint(1, 4))
        made: Schema = {
            "type": "object",
            "properties": {name: self._any(depth - 1) for name in names},
            "required": self._random.sample(names, self._random.randint(0, len(names))),
            "additionalProperties": False,
        }
        if self._random.random() < 0.15:
            made |= {"title": "An object", "description": "…", "$comment": "said in passing"}
        if self._random.random() < 0.1:
            made["required"], made["minProperties"] = [], 1
        return made

    def _array(self, depth: int) -> Schema:
        low = self._random.randint(0, 2)
        return {
            "type": "array",
            "items": self._any(depth - 1),
            "minItems": low,
            "maxItems": low + self._random.randint(0, 2),
        }

    def _tuple(self, depth: int) -> Schema:
        return {"type": "array", "prefixItems": [self._any(depth - 1) for _ in range(2)], "items": False, "minItems": 2}

    def _set(self, depth: int) -> Schema:
        values = self._random.sample(TEXTS, self._random.randint(2, 5))
        return {"type": "array", "items": {"enum": values}, "uniqueItems": True, "maxItems": self._random.randint(1, 4)}

    def _any_of(self, depth: int) -> Schema:
        return {"anyOf": [self._any(depth - 1) for _ in range(self._random.randint(2, 3))]}

    def _one_of(self, depth: int) -> Schema:
        """Alternatives that are told apart by their type, or by a property."""
        if self._random.random() < 0.5:
            return {"oneOf": [self._integer(depth), self._string(depth), {"type": "null"}]}
        kinds = [
            {
                "type": "object",
                "properties": {"kind": {"const": kind}, "value": self._any(0)},
                "required": ["kind", "value"],
                "additionalProperties": False,
            }
            for kind in ("a", "b")
        ]
        for kind in kinds:
            self._definitions[f"kind{len(self._definitions)}"] = kind
        names = list(self._definitions)[-2:]
        return {"oneOf": [{"$ref": f"#/$defs/{name}"} for name in names]}

    def _all_of(self, depth: int) -> Schema:
        low = self._random.randint(0, 50)
        return {"allOf": [{"type": "integer", "minimum": low}, {"maximum": low + 60}]}

    def _reference(self, depth: int) -> Schema:
        name = f"def{len(self._definitions)}"
        self._definitions[name] = {}
        self._definitions[name] = self._any(depth - 1)
        return {"$ref": f"#/$defs/{name}"}


def make_schemas(count: int, *, seed: int = 0) -> list[Schema]:
    """`count` schemas, all different."""
    maker, made = SchemaMaker(seed), []
    while len(made) < count:
        schema = maker.schema()
        if schema not in made:
            made.append(schema)
    return made
