"""Context-free grammars as users write them, in the one syntax that llguidance reads."""

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from pagoda_common.errors import InvalidRequest


def lark_of(grammar: str) -> str:
    """A grammar in GBNF or Lark as Lark.

    Raises:
        InvalidRequest: it looks like GBNF, and is none.
    """
    try:
        return any_to_lark(grammar)
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
