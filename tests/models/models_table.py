"""Writes the tables of docs/models.md from what the sweep found.

python -m tests.models.sweep --json > found.jsonl && python -m tests.models.models_table found.jsonl
"""

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- {}: begin -->", "<!-- {}: end -->"
NEXT = "next"
"""What a version is called that is not out."""


@dataclass(frozen=True, slots=True)
class Row:
    """A model type that runs."""

    model_type: str
    architecture: str
    implementation: str
    since: str

    def __str__(self) -> str:
        return f"| {self.model_type} | {self.architecture} | {self.implementation} | {self.since} |"


def read_rows(text: str) -> dict[str, Row]:
    """By model type."""
    part = _part(text, "exact")
    rows = re.findall(r"^\| (\S+) \| (\w+) \| (pagoda|transformers) \| (\S+) \|$", part, re.MULTILINE)
    return {row[0]: Row(*row) for row in rows}


def read_refused(text: str) -> dict[str, str]:
    """Reasons by model type."""
    return dict(re.findall(r"^\| (\S+) \| (.+) \|$", _part(text, "refused"), re.MULTILINE)[1:])


def write(found: list[dict[str, str]]) -> None:
    """Both tables; a row that was there keeps its version."""
    text = PAGE.read_text(encoding="utf-8")
    known = read_rows(text)
    exact, refused = [], []
    for one in sorted(found, key=lambda one: one["model_type"]):
        name = one["model_type"]
        if one["verdict"] == "exact":
            since = known[name].since if name in known else NEXT
            exact.append(str(Row(name, one["architecture"], one["implementation"], since)))
        else:
            reason = "no tiny checkpoint of it can be made" if one["verdict"] == "broken" else _short(one["reason"])
            refused.append(f"| {name} | {reason} |")
    head = f"{len(exact)} of {len(found)} types run.\n\n| model_type | architecture | runs as | exact since |\n"
    text = _put(text, "exact", head + "|---|---|---|---|\n" + "\n".join(exact) + "\n")
    text = _put(text, "refused", "| model_type | why not |\n|---|---|\n" + "\n".join(refused) + "\n")
    PAGE.write_text(text, encoding="utf-8")


def _short(reason: str) -> str:
    reason = re.sub(r"^transformers cannot run \w+ here: ", "", reason).replace("|", "/")
    return reason[:100]


def _part(text: str, name: str) -> str:
    return text.partition(BEGIN.format(name))[2].partition(END.format(name))[0]


def _put(text: str, name: str, part: str) -> str:
    before, begin, rest = text.partition(BEGIN.format(name))
    return before + begin + "\n" + part + END.format(name) + rest.partition(END.format(name))[2]


if __name__ == "__main__":
    write([json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines() if line.startswith("{")])
