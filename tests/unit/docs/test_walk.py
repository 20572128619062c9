"""docs/architecture.md walks through one chat request: each hop is in the code, and the walk seldom comes back."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "architecture.md"
FOLDERS = {
    "pagoda_frontend": "services/frontend",
    "pagoda_scheduler": "services/scheduler",
    "pagoda_worker": "services/worker",
    "pagoda_common": "common",
}
"""Where each package is."""
MAX_RETURNS = 12
ROW = re.compile(r"^\| (\d+) \| `([\w/]+\.py):([\w.]+)` \| (.+) \|$", re.MULTILINE)


def table() -> str:
    """The section's rows, without their head."""
    section = PAGE.read_text(encoding="utf-8").split("## One chat request, hop by hop\n")[1].split("\n## ")[0]
    return section.split("|---|---|---|\n")[1].split("\n\n")[0]


HOPS = ROW.findall(table())


def definitions(body: list[ast.stmt], prefix: str = "") -> set[str]:
    """Functions and methods of a module, by qualified name."""
    found: set[str] = set()
    for node in body:
        if isinstance(node, ast.ClassDef):
            found |= definitions(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(prefix + node.name)
    return found


def returns(files: list[str]) -> list[str]:
    """Files that a walk enters again after it has left them, once for each time."""
    stays = [file for place, file in enumerate(files) if place == 0 or files[place - 1] != file]
    return [file for place, file in enumerate(stays) if file in stays[:place]]


def test_the_files_of_tasks_are_there() -> None:
    section = PAGE.read_text(encoding="utf-8").split("### Which file does what\n")[1].split("\n### ")[0]
    paths = re.findall(r"`((?:services|kernels|common)/[\w/.]+)`", section)
    assert len(paths) >= 20
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_row_of_the_table_is_a_hop_and_they_are_numbered() -> None:
    assert len(HOPS) == len(table().splitlines())
    assert [int(number) for number, *_ in HOPS] == list(range(1, len(HOPS) + 1))
    assert len(HOPS) >= 25
    assert HOPS[0][1].startswith("pagoda_frontend/http/")
    assert HOPS[-1][1].startswith("pagoda_frontend/http/")
    assert {file.partition("/")[0] for _, file, _, _ in HOPS} == FOLDERS.keys()


@pytest.mark.parametrize(("file", "function"), [hop[1:3] for hop in HOPS], ids=lambda value: str(value))
def test_a_hop_exists(file: str, function: str) -> None:
    path = ROOT / FOLDERS[file.partition("/")[0]] / file
    assert path.is_file()
    assert function in definitions(ast.parse(path.read_text(encoding="utf-8")).body)


def test_the_walk_seldom_comes_back() -> None:
    assert returns(["a", "a", "b", "a", "c", "b", "b", "a"]) == ["a", "b", "a"]
    again = returns([file for _, file, _, _ in HOPS])
    assert len(again) <= MAX_RETURNS, again
