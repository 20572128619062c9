"""docs/benchmarks.md and its pictures are what benchmarks/page.py makes of the results today."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from benchmarks import page
from benchmarks.tools.bars import Bars

PICTURES = page.pictures()


def test_the_tables_are_those_of_the_results() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.page(), "run make docs"


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_that_of_the_results(name: str) -> None:
    assert (page.PICTURES / name).read_text(encoding="utf-8") == PICTURES[name], "run make docs"
    assert f"assets/benchmarks/{name}" in page.PAGE.read_text(encoding="utf-8")


def test_no_picture_is_left_over() -> None:
    assert {path.name for path in page.PICTURES.iterdir()} == set(PICTURES)


def test_the_last_run_that_measured_both_engines_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = [
        ("read", 40),
        *[("0.6b_W1_pagoda_seconds", 1.0), ("0.6b_W1_vllm_seconds", 4.0)],
        ("read", 40),
        *[("0.6b_W1_vllm_seconds", 9.0), ("0.6b_W1_pagoda_seconds", 3.0)],
        ("read", 40),
        ("0.6b_W1_pagoda_seconds", 2.0),
    ]
    lines = [f'{{"name": "{name}", "value": {value}, "machine": "2 x Xeon"}}\n' for name, value in figures]
    (tmp_path / "cpu_compare.jsonl").write_text("".join(lines))
    monkeypatch.setattr(page, "RESULTS", tmp_path)
    assert page.ratio("AMX", "0.6b_W1", "vllm") == 3.0
    assert page.ratio("AMX", "0.6b_W2", "vllm") is None


def test_bars_are_as_long_as_their_values_and_names_are_escaped() -> None:
    picture = ElementTree.fromstring(Bars(title="a < b", groups=[("x", {"s": 2.0}), ("y", {"s": 1.0})]).svg())
    space = "{http://www.w3.org/2000/svg}"
    bars = [bar for bar in picture.iter(f"{space}rect") if bar.get("fill")]
    longer, shorter = (float(bar.get("width", "")) for bar in bars)
    assert longer == pytest.approx(2 * shorter, abs=0.1)
    assert picture.findtext(f"{space}text") == "a < b"
