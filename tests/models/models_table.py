"""Writes the tables of docs/models.md from what the sweep found.

python -m tests.models.sweep --json > found.jsonl && python -m tests.models.models_table found.jsonl

Without a file, the types stay, and what each of them can do is written again.
"""

import json
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- {}: begin -->", "<!-- {}: end -->"
HEAD = "| model_type | architecture | runs as | exact since | ranks | LoRA | int8, int4 |"
NEXT = "0.2.0"
"""The version in which a type that is exact for the first time appears."""


@dataclass(frozen=True, slots=True)
class Row:
    """A model type that runs."""

    model_type: str
    architecture: str
    implementation: str
    since: str
    ranks: str
    adapters: str
    integers: str

    def __str__(self) -> str:
        return f"| {' | '.join(astuple(self))} |"


def read_rows(text: str) -> dict[str, Row]:
    """By model type."""
    part = _part(text, "exact")
    columns = r"^\| (\S+) \| (\w+) \| (pagoda|transformers) \| (\S+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$"
    rows = re.findall(columns, part, re.MULTILINE)
    return {row[0]: Row(*row) for row in rows}


def read_refused(text: str) -> dict[str, str]:
    """Reasons by model type."""
    return dict(re.findall(r"^\| (\S+) \| (.+) \|$", _part(text, "refused"), re.MULTILINE)[1:])


def write(found: list[dict[str, str]]) -> None:
    """Both tables; a row that was there keeps its version."""
    text = PAGE.read_text(encoding="utf-8")
    known = read_rows(text)
    exact: list[Row] = []
    refused: list[str] = []
    for one in sorted(found, key=lambda one: one["model_type"]):
        name = one["model_type"]
        if one["verdict"] == "exact":
            since = known[name].since if name in known else NEXT
            columns = (one[column] for column in ("ranks", "adapters", "integers"))
            exact.append(Row(name, one["architecture"], one["implementation"], since, *columns))
        else:
            reason = "tests cannot create a tiny checkpoint" if one["verdict"] == "broken" else _short(one["reason"])
            refused.append(f"| {name} | {reason} |")
    text = with_rows(text, exact, num_types=len(found))
    text = _put(text, "refused", "| model_type | why not |\n|---|---|\n" + "\n".join(refused) + "\n")
    PAGE.write_text(text, encoding="utf-8")


def with_rows(text: str, exact: Sequence[Row], *, num_types: int) -> str:
    """The page with another table of what runs."""
    head = f"{len(exact)} of {num_types} types run.\n\n{HEAD}\n{'|---' * HEAD.count(' | ')}|---|\n"
    return _put(text, "exact", head + "\n".join(map(str, exact)) + "\n")


def _short(reason: str) -> str:
    reason = re.sub(r"^transformers cannot run \w+ here: ", "", reason).replace("|", "/")
    return reason[:100]


def _part(text: str, name: str) -> str:
    return text.partition(BEGIN.format(name))[2].partition(END.format(name))[0]


def _put(text: str, name: str, part: str) -> str:
    before, begin, rest = text.partition(BEGIN.format(name))
    return before + begin + "\n" + part + END.format(name) + rest.partition(END.format(name))[2]


def see_abilities() -> None:
    """Write again what each type can do."""
    from tests.models.abilities import abilities_of  # the rest needs no models
    from tests.models.sweep import make_model

    text = PAGE.read_text(encoding="utf-8")
    rows = read_rows(text)
    for name, row in rows.items():
        with tempfile.TemporaryDirectory() as directory:
            model = make_model(name, Path(directory))
            rows[name] = replace(row, **asdict(abilities_of(Path(directory), model)))
        print(rows[name], flush=True)
    text = with_rows(text, list(rows.values()), num_types=len(rows) + len(read_refused(text)))
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        write([json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines() if line.startswith("{")])
    else:
        see_abilities()
