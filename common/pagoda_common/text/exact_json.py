"""JSON with exact integers: orjson converts those beyond 64 bits to floats, and cannot write them."""

import json
from typing import Any

import orjson

_LONG_NUMBER = b"0" * 19
"""A run of zeros, by which `_DIGITS` replaces digits: it is found fast, while the interpreter is held."""
_DIGITS = bytes(ord("0") if byte in b"0123456789" else ord(" ") for byte in range(256))


def loads(text: str | bytes) -> Any:
    """The value that `text` is.

    Raises:
        orjson.JSONDecodeError: it is not JSON.
    """
    raw = text.encode() if isinstance(text, str) else text
    value = orjson.loads(raw)
    if _LONG_NUMBER not in raw.translate(_DIGITS):
        return value
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):  # more digits or levels than Python reads
        return value


def dumps(value: Any) -> bytes:
    """`value` as JSON text without spaces.

    Raises:
        TypeError, ValueError: a part of it is not a JSON value.
    """
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
