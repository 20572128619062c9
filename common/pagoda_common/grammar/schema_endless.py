"""Finds schemas that no finite document fits, because they require themselves recursively. Knows no grammar."""

from typing import Any

from pagoda_common.grammar.json_schema import target

MAX_PARTS = 20_000
"""Parts looked at; what is larger counts as finite."""


def is_endless(schema: Any) -> bool:
    """Whether every document that fits `schema` certainly holds another one that fits it."""
    return _Endless(schema).is_endless(schema, ())


class _Endless:
    """Follows what parts of one schema certainly ask for."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: dict[str, bool] = {}
        self._num_parts = 0

    def is_endless(self, schema: Any, open_references: tuple[str, ...]) -> bool:
        """Whether `schema`, which is asked for inside of `open_references`, has no finite document."""
        self._num_parts += 1
        if not isinstance(schema, dict) or self._num_parts > MAX_PARTS:
            return False
        reference = schema.get("$ref")
        if isinstance(reference, str) and self._follows(reference, open_references):
            return True
        for name in ("anyOf", "oneOf"):
            branches = schema.get(name)
            is_choice = isinstance(branches, list) and branches
            if is_choice and all(self.is_endless(branch, open_references) for branch in branches or ()):
                return True
        parts = schema.get("allOf")
        if isinstance(parts, list) and any(self.is_endless(part, open_references) for part in parts):
            return True
        return any(self.is_endless(part, open_references) for part in self._asked_for(schema))

    def _follows(self, reference: str, open_references: tuple[str, ...]) -> bool:
        if reference in open_references:
            return True
        if reference not in self._known:
            found = self.is_endless(target(reference, self._root), (*open_references, reference))
            if found and open_references:
                return True  # perhaps only within these
            self._known[reference] = found
        return self._known[reference]

    @staticmethod
    def _asked_for(schema: dict[str, Any]) -> list[Any]:
        """The parts that every document has: required properties, first items."""
        asked: list[Any] = []
        kind = schema.get("type")
        if kind == "object":
            properties, required = schema.get("properties"), schema.get("required")
            if isinstance(required, list):
                named = properties if isinstance(properties, dict) else {}
                rest = schema.get("additionalProperties")
                patterns = schema.get("patternProperties")
                asked += [named.get(name, rest if not patterns else None) for name in required if isinstance(name, str)]
        least = schema.get("minItems")
        if kind == "array" and isinstance(least, int) and least > 0:
            first = schema.get("prefixItems")
            first = first if isinstance(first, list) else []
            asked += [*first[:least], *([schema.get("items")] if least > len(first) else [])]
        return asked
