"""Flags as typed: converts underscores to dashes and keys after dots, and keeps the user's spelling in messages. Knows
no config."""

import json
import re
from collections.abc import Container, Mapping, Sequence
from typing import Any


def dashed(words: Sequence[str], known: Container[str]) -> tuple[list[str], dict[str, str]]:
    """`words` with dashes in the names of flags and keys after dots as JSON, and how each flag that changed was typed.

    Args:
        known: option strings; a flag that is one of them stays, and so does every word after "--".
    """
    words = _with_objects(words, known)
    result: list[str] = []
    typed: dict[str, str] = {}
    for place, word in enumerate(words):
        if word == "--":
            return [*result, *words[place:]], typed
        name, equals, value = word.partition("=")
        if name.startswith("--") and "_" in name and name not in known:
            flag = name.replace("_", "-")
            typed[flag] = name
            word = flag + equals + value
        result.append(word)
    return result, typed


def _with_objects(words: Sequence[str], known: Container[str]) -> list[str]:
    """`words` with each --flag.key VALUE, where --flag is known, as a part of --flag={"key": VALUE} at their end.

    Values are JSON where they can be, else texts; a key without a value is true. Later words go before earlier ones.
    """
    rest: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    pending = list(words)
    while pending:
        word = pending.pop(0)
        if word == "--":
            return [*rest, *_written(rest, objects), "--", *pending]
        name, equals, value = word.partition("=")
        flag, dot, path = name.partition(".")
        flag = flag.replace("_", "-")
        if not (dot and path and name.startswith("--")) or name in known or flag not in known:
            rest.append(word)
            continue
        if not equals:
            value = pending.pop(0) if pending and not pending[0].startswith("--") else "true"
        *parents, key = path.split(".")
        place = objects.setdefault(flag, {})
        for parent in parents:
            place = place.setdefault(parent, {})
        place[key] = _value(value)
    return [*rest, *_written(rest, objects)]


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _written(words: list[str], objects: Mapping[str, dict[str, Any]]) -> list[str]:
    """One word for each object, with the keys of an object that `words` give the same flag."""
    written = []
    for flag, given in objects.items():
        whole = None
        for place, word in enumerate(words):
            name, equals, value = word.partition("=")
            if name.replace("_", "-") == flag:
                whole = _value(value if equals else "".join(words[place + 1 : place + 2]))
        written.append(f"{flag}={json.dumps({**whole, **given} if isinstance(whole, dict) else given)}")
    return written


def as_typed(message: str, typed: Mapping[str, str]) -> str:
    """`message` with each flag as the user typed it."""
    for flag, name in typed.items():
        message = re.sub(rf"{re.escape(flag)}(?![\w-])", name, message)
    return message
