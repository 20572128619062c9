"""Write the table of sampling fields into docs/sampling.md: ``python scripts/sampling_table.py``."""

import ast
import inspect
import math
import re
from pathlib import Path

from pagoda_common.params.fields import EVERYWHERE, SamplingField
from pagoda_common.params.sampling_params import SAMPLING_FIELDS, SamplingParams

PAGE = Path(__file__).resolve().parents[1] / "docs" / "sampling.md"
BEGIN, END = "<!-- sampling fields: begin -->", "<!-- sampling fields: end -->"
HEAD = ("field", "default", "bounds", "HTTP", "gRPC", "what it does")
NO_BOUND = 2**31 - 1
"""Upper bounds from here on say how a number is stored, and are not shown."""


def descriptions() -> dict[str, str]:
    """First clause of the docstring of each field, by name."""
    [shape] = ast.parse(inspect.getsource(SamplingParams)).body
    assert isinstance(shape, ast.ClassDef)
    found = {}
    for field, text in zip(shape.body, shape.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            assert isinstance(field.target, ast.Name)
            found[field.target.id] = re.split(r"[;.](?:\s|$)", str(text.value.value))[0]
    return found


def bodies(row: SamplingField) -> str:
    """The bodies that take a field: all of them, or which, with names that differ."""
    names = {api: name for api in EVERYWHERE if (name := row.name_in(api)) is not None}
    if not names:
        return ""
    if len(set(names.values())) == 1:
        name = next(iter(names.values()))
        shown = "" if name == row.name else f"`{name}`"
        where = "all" if len(names) == len(EVERYWHERE) else ", ".join(names)
        return f"{where}: {shown}" if shown else where
    return ", ".join(api if name == row.name else f"{api}: `{name}`" for api, name in names.items())


def default(row: SamplingField) -> str:
    """The default as JSON would have it, and whether generation_config.json may name another."""
    value = row.default
    if value is None or value == ():
        shown = ""
    elif isinstance(value, bool):
        shown = str(value).lower()
    else:
        shown = f"{value:g}" if isinstance(value, int | float) else str(value.name)
    return f"{shown} \\*" if row.generation_config == row.name else shown


def bounds(row: SamplingField) -> str:
    """The bounds that a user can meet."""
    if row.kind == "integer" and NO_BOUND <= row.high < math.inf and row.name != "seed":
        return f"at least {row.low}"
    return "64 bits" if row.name == "seed" else row.bound


def table() -> str:
    """The table, as Markdown."""
    texts = descriptions()
    lines = ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    for name, row in SAMPLING_FIELDS.items():
        proto = "" if row.proto is None else "yes" if row.proto == name else f"`{row.proto}`"
        cells = (f"`{name}`", default(row), bounds(row), bodies(row), proto, texts[name])
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def with_table(page: str) -> str:
    """`page` with the table between its two marks.

    Raises:
        ValueError: a mark is missing.
    """
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"{PAGE} must have {BEGIN} and {END} once each")
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
