"""Patterns of strings for rewrites of JSON schemas: of words, of all but words, of the names of properties."""

import re
from collections.abc import Collection
from typing import Any

from pagoda_common.grammar.json_schema import resolved, rewritten

ANY = r"(.|\n)"
MAX_WORD_CHARACTERS = 4000
"""In all words whose opposite is written."""
_LITERAL = re.compile(r"\^((?:[A-Za-z0-9 _:/@#%&=,;<>!~'\"-]|\\[.$^*+?()\[\]{}|/\\-])*)(\$?)")
_ONE_KIND = re.compile(r"\^(\[[^\[\]\\]+\]|\\[dw])([+*])\$")
_ANNOTATIONS = frozenset(("title", "description", "default", "examples", "$comment"))
_NAME_KEYWORDS = frozenset(("type", "pattern", "minLength", "maxLength", "enum", "const", "not", "$ref"))

Names = str | frozenset[str] | bool
"""A pattern that names match, the names themselves, or whether there may be any."""


def with_named_words(schema: Any) -> Any:
    """`schema` with the patterns that match a few words only (^word$, ^(one|two)$) among its properties.

    Where properties name all words of a pattern, llguidance leads into a name that nothing can begin.
    """

    def name(part: dict[str, Any]) -> dict[str, Any]:
        patterns = part.get("patternProperties")
        if not isinstance(patterns, dict):
            return part
        properties = dict(part.get("properties") or {})
        rest = {}
        for pattern, wanted in patterns.items():
            words = _words_of(pattern)
            if words is None:
                rest[pattern] = wanted
            for word in words or ():
                properties[word] = {"allOf": [properties[word], wanted]} if word in properties else wanted
        kept = {key: value for key, value in part.items() if key != "patternProperties"}
        return {**kept, "properties": properties, **({"patternProperties": rest} if rest else {})}

    return rewritten(schema, name)


def _words_of(pattern: str) -> list[str] | None:
    """The words that `pattern` matches, where it lists them."""
    if listed := re.fullmatch(r"\^\((?:\?:)?([\w|-]+)\)\$", pattern):
        return list(dict.fromkeys(listed[1].split("|")))
    match = _LITERAL.fullmatch(pattern)
    return [re.sub(r"\\(.)", r"\1", match[1])] if match is not None and match[2] else None


def literal_pattern(text: str) -> str:
    """A pattern that matches only `text`."""
    return "".join(char if char.isascii() and char.isalnum() else rf"\x{{{ord(char):x}}}" for char in text)


def opposite_of_words(words: Collection[str]) -> str | None:
    """A pattern of all strings but `words`; None where that is too long."""
    if sum(map(len, words)) > MAX_WORD_CHARACTERS:
        return None
    try:
        return f"^{_all_but(sorted(set(words)))}$"
    except RecursionError:
        return None


def _all_but(words: list[str], *, is_prefix: bool = False) -> str:
    """With `is_prefix`, of all strings that begin with none of `words`."""
    if is_prefix and "" in words:
        return "[^\\s\\S]"
    options = [] if "" in words else [""]
    heads = sorted({word[0] for word in words if word})
    if not heads:
        return f"{ANY}+"
    options.append(f"[^{''.join(map(literal_pattern, heads))}]{ANY}*")
    for head in heads:
        rest = [word[1:] for word in words if word[:1] == head]
        if not (is_prefix and "" in rest):
            options.append(literal_pattern(head) + _all_but(rest, is_prefix=is_prefix))
    return f"({'|'.join(options)})"


def opposite_of_pattern(pattern: Any) -> str | None:
    """A pattern of all strings that `pattern` does not match; None unless that is a plain beginning or a plain word."""
    match = _LITERAL.fullmatch(pattern) if isinstance(pattern, str) else None
    if match is None or not match[1]:
        return None
    word = re.sub(r"\\(.)", r"\1", match[1])
    return opposite_of_words([word]) if match[2] else f"^{_all_but([word], is_prefix=True)}$"


def pattern_of_names(schema: Any, *, root: Any) -> Names | None:
    """The constraint of `schema` on names of properties; None if it cannot be expressed."""
    schema = resolved(schema, root)
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict) or not schema.keys() - _ANNOTATIONS <= _NAME_KEYWORDS or "$ref" in schema:
        return None
    kinds = schema.get("type", "string")
    if "string" not in (kinds if isinstance(kinds, list) else [kinds]):
        return False
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    asked = schema.keys() & {"pattern", "minLength", "maxLength", "not"}
    if listed is not None:
        return frozenset(name for name in listed if isinstance(name, str)) if not asked else None
    if not asked:
        return True
    if asked == {"not"}:
        return _names_but(schema["not"])
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    if "not" in asked or not isinstance(least, int) or not (most == "" or isinstance(most, int)):
        return None
    if "pattern" not in asked:
        return rf"^{ANY}{{{least},{most}}}$"
    pattern = schema["pattern"]
    if asked == {"pattern"}:
        return pattern if isinstance(pattern, str) else None
    kind = _ONE_KIND.fullmatch(pattern) if isinstance(pattern, str) else None
    if kind is None:
        return None
    return rf"^{kind[1]}{{{max(least, int(kind[2] == '+'))},{most}}}$"


def _names_but(schema: Any) -> Names | None:
    if not isinstance(schema, dict):
        return None
    asked = schema.keys() - _ANNOTATIONS - {"type"}
    if asked == {"pattern"}:
        return opposite_of_pattern(schema["pattern"])
    if asked <= {"enum", "const"} and asked:
        listed = [schema["const"]] if "const" in schema else schema["enum"]
        return opposite_of_words([name for name in listed if isinstance(name, str)])
    return None
