"""Links between the pages: each leads to a file that is there, and to a heading of it."""

import re
from functools import cache
from pathlib import Path
from runpy import run_path

import pytest

ROOT = Path(__file__).parents[3]
FOLDERS = ("docs", "kernels", "examples", "benchmarks", "deploy", "common/pagoda_common/models", "training")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"] + [
    page for folder in FOLDERS for page in sorted((ROOT / folder).rglob("*.md")) if "node_modules" not in page.parts
]
LINK = re.compile(r"\]\(([^()\s]+)\)")
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)


@cache
def anchors(page: Path) -> set[str]:
    """What links may name in a page: its headings, lower-case, without punctuation, with hyphens for spaces."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in LINK.findall(CODE.sub("code", page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue  # elsewhere on the net
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            broken.append(target)
    assert not broken


def test_every_page_is_in_the_sites_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:")[1]
    listed = re.findall(r" ([\w-]+\.md)$", navigation, re.MULTILINE)
    copies = run_path(str(ROOT / "scripts" / "docs_hooks.py"))["PAGES"].values()
    assert sorted(listed) == sorted([*(page.name for page in (ROOT / "docs").glob("*.md")), *copies])
