"""Errors of a request, with the client's field names. Knows no HTTP and no gRPC."""

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pagoda_common.errors import PagodaError

MAX_REPORTED_ERRORS = 10
"""Maximum number of wrong fields that an error names."""


class _Shown(reprlib.Repr):
    """The beginning of a value, which may be megabytes long."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxdict, self.maxlist, self.maxtuple = 2, 10, 20, 20
        self.maxstring = self.maxother = self.maxlong = 200


_shown = _Shown()


@contextmanager
def fields_named(names: Mapping[str, str]) -> Iterator[None]:
    """Rename the field of errors raised within to the client's name; `names`: client's names by inner names."""
    try:
        yield
    except PagodaError as error:
        field = error.field
        if field is not None and field in names:
            error.message = error.message.replace(field, names[field])
            error.field = names[field]
        raise


def validation_message(errors: Sequence[Any]) -> str:
    """Pydantic's errors in one line: ``max_tokens: Input should be a valid integer (got 'x') [int_parsing]; …``.

    Pydantic's error type stands in brackets, because vLLM shows it and programs look for it.
    """
    lines = []
    for error in errors[:MAX_REPORTED_ERRORS]:
        place = ".".join(str(part) for part in error["loc"])
        given = _shown.repr(error["input"])
        given = given if len(given) <= 100 else given[:100] + "…"
        shown = "" if error["type"] == "missing" else f" (got {given})"
        lines.append(f"{place}: {error['msg']}{shown} [{error['type']}]")
    if len(errors) > MAX_REPORTED_ERRORS:
        lines.append(f"and {len(errors) - MAX_REPORTED_ERRORS} more")
    return "; ".join(lines)
