"""Flags as they are typed: underscores as dashes, and messages in the user's own words. Knows no config."""

import re
from collections.abc import Container, Mapping, Sequence


def dashed(words: Sequence[str], known: Container[str]) -> tuple[list[str], dict[str, str]]:
    """`words` with dashes in the names of flags, and how each flag that changed was typed.

    Args:
        known: option strings; a flag that is one of them stays, and so does every word behind "--".
    """
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


def as_typed(message: str, typed: Mapping[str, str]) -> str:
    """`message` with each flag as the user typed it."""
    for flag, name in typed.items():
        message = re.sub(rf"{re.escape(flag)}(?![\w-])", name, message)
    return message
