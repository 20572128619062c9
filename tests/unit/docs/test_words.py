"""The pages keep to plain words, and tables to short cells."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]
PAGES = sorted([*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")])
MAX_README_LINES = 140
MAX_CELL = 120


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_words", ROOT / "scripts" / "check_words.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_no_word_of_the_list(script: ModuleType, page: Path) -> None:
    assert script.main([str(page)]) == 0


def test_a_word_of_the_list_is_found_with_its_line(script: ModuleType) -> None:
    text = "Fine.\nNobody waits behind a proxy.\nA stream is gone on with, behind the last token.\n"
    assert [(line, word) for line, word, _ in script.findings(text)] == [
        (2, "Nobody"),
        (3, "behind"),
        (3, "gone on with"),
    ]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= MAX_README_LINES


def test_cells_of_the_readme_and_of_support_are_short() -> None:
    for name in ("README.md", "docs/support.md", "docs/troubleshooting.md", "docs/quickstart.md", "docs/install.md"):
        rows = [line for line in (ROOT / name).read_text(encoding="utf-8").splitlines() if line.startswith("|")]
        long = [cell for row in rows for cell in re.split(r"(?<!\\)\|", row) if len(cell.strip()) > MAX_CELL]
        assert long == [], name
