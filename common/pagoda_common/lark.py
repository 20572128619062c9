"""Context-free grammars as users write them, in the one syntax that llguidance reads."""

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
