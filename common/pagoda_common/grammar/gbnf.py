"""GBNF as llama.cpp reads it, rewritten so that llguidance's converter to Lark reads the same.

Escapes become characters, classes are spelled without what a regular expression would understand otherwise, rules get
names that stay different, and an alternative may begin on the next line.
"""

import re

from pagoda_common.errors import InvalidRequest

RULE = re.compile(r"^[ \t]*([\w-]+)[ \t]*::=", re.MULTILINE)
_TOKEN = re.compile(
    r"""
    (?P<comment>\#[^\r\n]*)
    | (?P<string>"(?:\\.|[^"\\])*")
    | (?P<char_class>\[(?:\\.|[^\]\\])*\])
    | (?P<repetition>\{[^{}]*\})
    | (?P<name>[\w-]+)
    | (?P<break>(?:[ \t]*(?:\#[^\r\n]*)?(?:\r\n?|\n))+[ \t]*(?=\|))
    | (?P<any>\.)
    | (?P<other>.)
    """,
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))|([^\\])", re.DOTALL)
_PLAIN = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]"}
_WRITTEN = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\\": "\\\\", '"': '\\"'}
_ANY_CHARACTER = r"([^\n] | [\n])"


def is_gbnf(grammar: str) -> bool:
    """Whether a grammar is GBNF, and not Lark: rules are written with ::=."""
    return RULE.search(grammar) is not None


def plain_gbnf(grammar: str) -> str:
    """`grammar` in the part of GBNF that the converter understands as llama.cpp does.

    Raises:
        InvalidRequest: an escape is none of llama.cpp's, or a range is upside down.
    """
    names: dict[str, str] = {"root": "root"}
    defined = {match[1] for match in RULE.finditer(grammar)}
    written = []
    for match in _TOKEN.finditer(grammar):
        text = match.group()
        match match.lastgroup:
            case "comment":
                text = ""
            case "break":
                text = " "
            case "string":
                text = '"' + "".join(_WRITTEN.get(char, char) for char, _ in _characters(text[1:-1])) + '"'
            case "char_class":
                text = _char_class(text[1:-1])
            case "name":
                if text not in defined:
                    raise _refuse(f"there is no rule {text!r}")
                text = names.setdefault(text, f"rule{_letters(len(names))}")
            case "any":
                text = _ANY_CHARACTER
        written.append(text)
    return "".join(written)


def _letters(number: int) -> str:
    """A number in letters, for names must not end in one."""
    return "".join(chr(ord("a") + int(digit)) for digit in str(number))


def _characters(text: str) -> list[tuple[str, bool]]:
    """The characters of a literal, and whether each was escaped."""
    found = []
    place = 0
    while place < len(text):
        match = _ESCAPE.match(text, place)
        code = match and (match[1] or match[2] or match[3])
        if match is not None and code and int(code, 16) <= 0x10FFFF and not 0xD800 <= int(code, 16) <= 0xDFFF:
            found.append((chr(int(code, 16)), True))
        elif match is not None and match[4] in _PLAIN:
            found.append((_PLAIN[match[4]], True))
        elif match is not None and match[5]:
            found.append((match[5], False))
        else:
            raise _refuse(f"{text[place : place + 10]!r} is not an escape of GBNF")
        place = match.end()
    return found


def _char_class(text: str) -> str:
    sign = "^" if text.startswith("^") else ""
    characters = _characters(text[len(sign) :])
    items, place = [], 0
    while place < len(characters):
        first = characters[place][0]
        is_range = place + 2 < len(characters) and characters[place + 1] == ("-", False)
        if is_range:
            last = characters[place + 2][0]
            if last < first:
                raise _refuse(f"the range {first}-{last} is upside down")
            items.append(f"{_in_class(first)}-{_in_class(last)}")
        else:
            items.append(_in_class(first))
        place += 3 if is_range else 1
    return f"[{sign}{''.join(items)}]"


def _in_class(character: str) -> str:
    is_plain = character.isalnum() or ord(character) > 0x7F
    return character if is_plain else f"\\x{ord(character):02x}"


def _refuse(message: str) -> InvalidRequest:
    return InvalidRequest(f"structured_outputs.grammar cannot be read: {message}"[:500], field="structured_outputs")
