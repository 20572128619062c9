"""The pages keep to plain words, and tables to short cells."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]
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


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this is no checkout: git lists the texts")
def test_no_text_has_a_word_of_the_list(script: ModuleType) -> None:
    assert script.main([]) == 0


def test_a_word_of_the_list_is_found_with_its_line(script: ModuleType) -> None:
    text = "Fine.\nNobody waits behind a proxy.\nA stream is gone on with, behind the last token.\n"
    assert [(line, word) for line, word, _ in script.findings(text)] == [
        (2, "Nobody"),
        (3, "behind"),
        (3, "gone on with"),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "It waits for ever.",
        "They run by turns.",
        "It listens elsewhere than on loopback.",
        "It gives its very tokens.",
        "The body is no JSON.",
    ],
)
def test_an_old_turn_of_phrase_is_found(script: ModuleType, text: str) -> None:
    assert [line for line, _, better in script.findings(text) if better] == [1]
    assert list(script.findings("Every text is sent forever, in turns, to the worker.")) == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= MAX_README_LINES


TABLES = [
    page
    for page in sorted(ROOT.rglob("*.md"))
    if not any(part in ("node_modules", "site") or part.startswith(".") for part in page.relative_to(ROOT).parts)
]


@pytest.mark.parametrize("page", TABLES, ids=lambda page: str(page.relative_to(ROOT)))
def test_cells_of_tables_are_short(page: Path) -> None:
    """Addresses of links do not count."""
    rows = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    cells = [re.sub(r"\]\([^)]*\)", "]", cell).strip() for row in rows for cell in re.split(r"(?<!\\)\|", row)]
    assert [cell for cell in cells if len(cell) > MAX_CELL] == []
