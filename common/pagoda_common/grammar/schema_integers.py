"""Integers in JSON schemas that llguidance would round: a bound moves inwards to the next float, a value is refused.

Only for schemas without negations: a bound that is moved inwards allows fewer documents there, never others.
"""

import math
from typing import Any

from pagoda_common.grammar.schema_opposites import Inexpressible

MAX_INTEGER = 2**63 - 1
"""Read as it is, although no float holds it."""
MAX_BOUND = 2**63 - 1024
"""The largest float below that; bounds beyond it break llguidance."""
_LEAST, _MOST = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")


def with_exact_integers(schema: Any, path: str = "#") -> Any:
    """`schema` with bounds that are floats, none of them further out.

    Raises:
        Inexpressible: a value cannot be written to the digit, or a bound leaves nothing.
    """
    if isinstance(schema, list):
        return [with_exact_integers(part, f"{path}/{place}") for place, part in enumerate(schema)]
    if not isinstance(schema, dict):
        return schema
    exact = {}
    for name, part in schema.items():
        place = f"{path}/{name}"
        if name in ("const", "enum"):
            _check_values(part, place)
        if name in _LEAST and _is_integer(part):
            part = -_at_most(-part, place)
        elif name in _MOST and _is_integer(part):
            part = _at_most(part, place)
        elif name not in ("const", "enum", "default", "examples"):
            part = with_exact_integers(part, place)
        exact[name] = part
    return exact


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _at_most(bound: int, path: str) -> int:
    """The largest float that is not above `bound`."""
    if bound < -MAX_BOUND:
        raise Inexpressible(f"{_shown(bound)} at {path} does not fit into 64 bits")
    bound = min(bound, MAX_BOUND)
    nearest = float(bound)
    return int(nearest if nearest <= bound else math.nextafter(nearest, -math.inf))


def _check_values(value: Any, path: str) -> None:
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_values(part, path)
    if _is_integer(value) and value != MAX_INTEGER and (abs(value) > MAX_BOUND or int(float(value)) != value):
        raise Inexpressible(f"{_shown(value)} at {path} has more digits than can be written exactly")


def _shown(number: int) -> str:
    return str(number) if abs(number) < 10**40 else "a number of more than 40 digits"
