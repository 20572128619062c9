"""Converts users' context-free grammars to llguidance's syntax."""

import re

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from pagoda_common.errors import InvalidRequest
from pagoda_common.grammar.gbnf import is_gbnf, plain_gbnf

_LARK_RULE = re.compile(r"^\s*(%llguidance\b|[?!]?\w[\w.-]*\s*(\[[^\]]*\]|\{[^}]*\})?\s*:)", re.MULTILINE)


def lark_of(grammar: str) -> str:
    """A grammar in GBNF or Lark as Lark.

    Raises:
        InvalidRequest: it looks like GBNF, and is none.
    """
    if not is_gbnf(grammar):
        if _LARK_RULE.search(grammar) is None:
            message = "structured_outputs.grammar cannot be read: it has no rule, neither `root ::= …` nor `start: …`"
            raise InvalidRequest(message, field="structured_outputs")
        return grammar
    plain = plain_gbnf(grammar)
    try:
        return gbnf_to_lark(plain)
    except Exception as error:  # the converter raises whatever comes
        raise InvalidRequest(
            f"structured_outputs.grammar cannot be read: {error}"[:500], field="structured_outputs"
        ) from error


def lark_regex(regex: str) -> str:
    r"""A regular expression between slashes. \d, \w and \s are ASCII's, as in JSON schemas and vLLM's first choice.

    Raises:
        InvalidRequest: it cannot be read.
    """
    try:
        return f"/{regex_to_lark(regex, 'dws')}/"
    except Exception as error:
        raise InvalidRequest(
            f"structured_outputs.regex cannot be read: {error}"[:500], field="structured_outputs"
        ) from error
